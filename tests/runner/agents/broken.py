"""A module that cannot be imported."""

agent = missing  # noqa: F821
