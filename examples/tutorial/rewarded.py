"""What is added: the agent with a reward for the right number."""

from agent import ask

import agentlightning as agl


@agl.rollout
def rewarded(task: dict) -> float:
    return agl.rewards.numeric_equal(ask(task["question"]), task["answer"])
