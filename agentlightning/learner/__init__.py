"""Gradient steps, and where a policy comes from.

Import the modules, not the package: `learner.tiny` makes a small policy, `learner.warm_start` teaches it the form of a
conversation from demonstrations.
"""
