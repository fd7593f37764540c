"""The server: the store, the gateway and what belongs to them in one ASGI application."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__
