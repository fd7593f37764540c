def grade(task: dict, output) -> float:
    return float("sea" in output.stdout)
