"""The dashboard: the data of its page, computed from a store, and the page's own files."""
