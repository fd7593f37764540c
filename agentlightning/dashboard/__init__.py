"""The dashboard: the data of its page, computed from a store, and the page's own files.

This room knows stores and the pure functions of `data`. It does not know HTTP, keys or permissions.
"""
