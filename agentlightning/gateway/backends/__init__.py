"""What answers calls over HTTP: one module per kind of server."""
