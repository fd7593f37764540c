"""Reinforcement learning: `settings`, groups on their way (`groups`), a step's `batch`, the loop (`reinforcement`)."""
