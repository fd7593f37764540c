"""Agents under the module name that Agent Lightning 0.3 gave them."""

from agentlightning import __getattr__ as __getattr__  # every name is the package's own
