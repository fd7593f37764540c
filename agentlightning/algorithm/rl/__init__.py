"""Reinforcement learning: `settings`, the groups on their way (`groups`), a step's `batch`, the loop (`reinforcement`)."""
