"""Rewards: comparison of texts, comparison of numbers, and a model as judge.

Each takes the agent's answer and the right one, and returns a float. They know nothing of rollouts or training; only
the judge records spans, inside a rollout.
"""

from agentlightning.rewards.judge import LLMJudge
from agentlightning.rewards.numbers import extract_number, numeric_equal
from agentlightning.rewards.text import exact_match, normalize_answer, token_f1

__all__ = [
    "LLMJudge",
    "exact_match",
    "extract_number",
    "normalize_answer",
    "numeric_equal",
    "token_f1",
]
