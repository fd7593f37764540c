"""Gradient steps, and where a policy comes from. Import the modules, not the package."""
