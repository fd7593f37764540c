"""The dashboard: what its page shows, made of what a store holds, and the page's own files.

This room knows stores and the pure readings of `data`. It does not know HTTP, keys or who may see what.
"""
