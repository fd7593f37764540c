"""The reward: the share of letters in what the harness printed last, which any model can learn to
raise."""

from typing import Any

from agentlightning import CommandOutput


def letters(task: Any, output: CommandOutput) -> float:
    said = output.stdout.strip()[-200:]
    return sum(map(str.isalpha, said)) / len(said) if said else 0.0
