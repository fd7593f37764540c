"""The server: the store, the gateway and what belongs to them in one ASGI application."""
