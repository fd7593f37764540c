"""`Baseline`: run the agent on the tasks and change nothing. The measure that training is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.evaluation import Evaluation, evaluate
from agentlightning.errors import ConfigError
from agentlightning.types import Mode, RolloutConfig


@dataclass
class Baseline:
    """Runs the agent `samples` times on each validation task. The result is in `evaluations` afterwards."""

    samples: int = 1
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(timeout_seconds=300.0, max_attempts=3, retry_condition=("unresponsive",))
    )
    mode: Mode = "val"
    name: str = "baseline"
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation], init=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}; it is how often each task is run: at least 1")

    async def run(self, context: RunContext) -> None:
        if not context.val_tasks:
            raise ConfigError("there is nothing to evaluate: the validation dataset is missing or empty")
        evaluation = await evaluate(
            context,
            context.val_tasks,
            step=0,
            version=context.run.policy_version,
            mode=self.mode,
            config=self.rollout,
            samples=self.samples,
        )
        self.evaluations = [evaluation]
        values = {"val_reward": evaluation.reward, "val_unrewarded": float(evaluation.unrewarded)}
        await context.tracking.record(0, values)
