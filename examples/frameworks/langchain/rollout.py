from agent import write


def rollout(task: dict) -> float:
    return float("sea" in write(task["topic"]))
