"""Automatic prompt optimisation: critique, edit and race prompts until the budget or the rounds are
over."""

from agentlightning.algorithm.apo.apo import APO as APO
