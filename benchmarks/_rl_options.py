"""What a run of `benchmarks/rl.py` is told, and what it tells: JSON between processes of different
environments."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Options:
    start: str
    directory: str
    steps: int
    tasks_per_step: int
    learning_rate: float
    threads: int
    seed: int
    evaluate_every: int
    heldout: int
    group_size: int = 8
    call_tokens: int = 40  # sampled in one turn at most
    conversation_tokens: int = 320  # after the prompt, the tools' answers among them
    level: str = "tree"
    max_staleness: int = 0
    sums: str = ""  # the folder with the tasks of `_rl_sums.py`; else the travel desk
    slow_tool: bool = False  # with a log-normal latency: mean 0.5 s, 99th percentile 5 s

    @classmethod
    def parse(cls, text: str) -> Options:
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Outcome:
    """Seconds are those of training: of sampling, learning and what lies between, but of no
    evaluation. Where a learner takes groups while others are sampled, `sample_seconds` are those it
    waited for them: it was idle.

    `curve` is (step, seconds so far, held-out reward). `trained` counts the sampled tokens that the
    loss was taken of, `computed` all those that the learner's forward saw."""

    curve: list[tuple[int, float, float]] = field(default_factory=list)
    train_seconds: float = 0.0
    sample_seconds: float = 0.0
    learn_seconds: float = 0.0
    whole_seconds: float = 0.0
    cpu_seconds: float = 0.0
    agents_cpu_seconds: float = 0.0  # of the agents, where they have a process of their own
    generated: float = 0.0
    trained: float = 0.0
    computed: float = 0.0
    rollouts: float = 0.0

    def tell(self) -> None:
        print(json.dumps(asdict(self)), flush=True)
