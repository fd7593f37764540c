"""The store: the only meeting point of runners, gateway and algorithm."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__
