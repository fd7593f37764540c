"""Reinforcement learning: settings and credit (`settings`), a step's batch (`batch`), the loop (`reinforcement`), how it goes on after a kill (`resumption`)."""
