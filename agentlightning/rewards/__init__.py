"""Rewards: comparison of texts, comparison of numbers, scorers of generated tasks, and a model as
judge of one answer or of several.

Each takes the agent's answer and the right one, and returns a float. They know nothing of rollouts
or training; only the judge records spans, inside a rollout."""

from agentlightning.rewards.comparison import (
    exact_match,
    extract_number,
    normalize_answer,
    numeric_equal,
    token_f1,
)
from agentlightning.rewards.judge import LLMJudge
from agentlightning.rewards.reasoning_gym import reasoning_gym_score
from agentlightning.rewards.relative import Ranking, RelativeJudge

__all__ = [
    "LLMJudge",
    "Ranking",
    "RelativeJudge",
    "exact_match",
    "extract_number",
    "normalize_answer",
    "numeric_equal",
    "reasoning_gym_score",
    "token_f1",
]
