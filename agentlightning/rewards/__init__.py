"""Ready-made rewards: text, numbers, and a judge that is itself a model.

Each takes what the agent answered and what is right, and gives a float. They know nothing of rollouts or training;
only the judge leaves spans, where it is asked inside a rollout.
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
