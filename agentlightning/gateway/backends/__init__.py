"""Backends over HTTP: one module per kind of server."""
