"""Where agents are defined and run: the agent's forms, its client, and the process that leases
rollouts.

This room knows the store's interface and the tracing context. It does not know the gateway, tokens
or training: an agent meets those only through the URL it is given."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__
