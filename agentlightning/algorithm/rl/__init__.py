"""Reinforcement learning: settings and credit (`settings`), a step's batch (`batch`), the loop (`loop`)."""
