from agent import write


async def rollout(task: dict) -> float:
    return float("sea" in await write(task["topic"]))
