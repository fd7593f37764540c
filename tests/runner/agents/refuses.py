"""A module that can only be imported in an environment that names a model."""

raise ValueError("no key for the client")
