"""Reinforcement learning: `settings`, the `groups` in progress, a step's `batch`, the loop
(`reinforcement`)."""
