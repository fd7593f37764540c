"""Texts that a program itself sends to a model: found in recordings, and replaced where they
pass."""
