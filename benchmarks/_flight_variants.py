"""One short training run of the flight task with one thing changed: what
`benchmarks/experiments.py` compares.

    python benchmarks/_flight_variants.py VARIANT SEED START OUT

START is a folder with the policy of that seed, made and warm-started if it is empty. Writes
OUT/result.json."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from _flight import recipe, tasks, train

import agentlightning as agl
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.config import make_algorithm
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import Transition, tool_success
from agentlightning.learner.policy import Policy, load_policy

import agent  # isort: skip  (of the flight example, which `_flight` makes importable)

STEPS: Final = 10
HELDOUT_TASKS: Final = 120
COMMON: Final[dict[str, Any]] = {
    "name": "grpo",
    "steps": STEPS,
    "tasks_per_step": 16,
    "group_size": 8,
    "minibatches": 2,
    "clip_high": 0.28,
    "max_tokens": 40,
    "level": "tree",
}
# Exact under whatever weights sampled; the only one for which nothing needs to be known of how
# likely a token was.
ON_POLICY: Final[dict[str, Any]] = {"loss": "policy_gradient", "minibatches": 1, "clip_high": None}
USEFUL: Final = {"memory": 0.3, "search": 0.2, "calculator": 0.2}


@dataclass(frozen=True)
class Variant:
    """Settings that differ from `COMMON`; an agent that forgets what tools told it before their
    last answer; answers trained as their text is tokenised, instead of as they were sampled."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    forgets: bool = False
    retokenised: bool = False


DR_GRPO: Final[dict[str, Any]] = {"baseline": "dr_grpo"}
BY_CALL: Final = DR_GRPO | {"equal_rewards": True}
VARIANTS: Final = {
    "grpo": Variant(),
    # How the reward of a rollout becomes that of its calls; `grpo` divides by a spread that these
    # change.
    "identical": Variant(DR_GRPO),
    "discounted": Variant(BY_CALL | {"returns": "discounted"}),
    "air": Variant(
        BY_CALL | {"returns": "air", "returns_options": {"alpha": 0.2, "tool_weights": USEFUL}}
    ),
    "air_dense": Variant(
        BY_CALL | {"returns": "air_dense", "returns_options": {"tool_weights": USEFUL}}
    ),
    "last call only": Variant(
        BY_CALL | {"returns": "air_dense", "returns_options": {"tool_weights": {}}}
    ),
    "tree credit": Variant({"returns": "tree", "baseline": "none"}),
    # An agent that edits its history.
    "edited history as a tree": Variant(forgets=True),
    "edited history as transitions": Variant({"level": "transition"}, forgets=True),
    # The ids that were sampled, against those of the text.
    "exact ids": Variant(ON_POLICY),
    "re-tokenised text": Variant(ON_POLICY, retokenised=True),
    # One thing off.
    "no baseline": Variant({"baseline": "none"}),
    "no clip-higher": Variant({"clip_high": None}),
    "no prefix tree": Variant({"level": "transition"}),
    "mean per call": Variant({"aggregation": "sequence-mean"}),
    "asynchronous": Variant({"max_staleness": 4}),
}


def make_variant(variant: Variant, policy: Policy, counts: dict[str, int]) -> Reinforcement:
    algorithm = make_algorithm(COMMON | variant.settings)
    assert isinstance(algorithm, Reinforcement)
    if variant.retokenised:
        algorithm.advantages = _retokenising(algorithm.advantages, policy, counts)  # type: ignore[method-assign]
    return algorithm


Credit = Callable[[Sequence[RewardedGroup]], list[list[list[CreditedTransition]]]]


def _retokenising(credit: Credit, policy: Policy, counts: dict[str, int]) -> Credit:
    """As `credit`, of answers whose text went through the tokenizer again."""

    def again(one: Transition) -> Transition:
        text = policy.tokenizer.decode(one.response_ids, skip_special_tokens=False)
        ids = np.asarray(policy.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        counts["calls"] += 1
        counts["changed"] += not np.array_equal(ids, one.response_ids)
        size = len(ids)
        return msgspec.structs.replace(
            one,
            response_ids=ids,
            logprobs=np.zeros(size, np.float32),
            versions=np.full(size, -1, np.int32),
        )

    def credit_again(groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        told = [
            [[again(call) for call in calls] for calls in group.transitions] for group in groups
        ]
        return credit(
            [RewardedGroup(calls, group.rewards) for calls, group in zip(told, groups, strict=True)]
        )

    return credit_again


@agl.rollout
async def forgetful(task: dict[str, Any], llm: agl.LLM) -> float:
    """The travel desk, which keeps of its history only what the last tool answered."""
    client = agl.openai_client(llm)
    messages: list[Any] = [
        {"role": "system", "content": agent.SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    calls: list[str] = []
    for _ in range(agent.MAX_TURNS):
        for message in messages[:-1]:
            if message["role"] == "tool":
                message["content"] = "…"
        answer = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=agent.TOOLS
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return agent.grade(task, said.content or "", calls)
        messages.append(said.model_dump(include={"role", "content", "tool_calls"}))
        for call in said.tool_calls:
            calls.append(call.function.name)
            result = agent.use_tool(task, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def main(name: str, seed: int, start: Path, out: Path) -> None:
    began = time.monotonic()
    variant = VARIANTS[name]
    if (start / "config.json").is_file():
        policy = load_policy(start)
    else:
        policy = recipe.starting_policy(seed)
        policy.save(start)
    counts = {"calls": 0, "changed": 0}
    trainer = agl.Trainer(
        model=policy,
        algorithm=make_variant(variant, policy, counts),
        optimizer=recipe.optimizer(),
        **recipe.SIZES,
        run_dir=out / "run",
        seed=seed,
    )
    result = trainer.fit(
        forgetful if variant.forgets else train.flight,
        tasks.train_tasks(seed=seed),
        tasks.heldout_tasks(HELDOUT_TASKS),
    )
    steps = [one.values for one in result.metrics if "reward" in one.values]
    report = {
        "seed": seed,
        "before": result.evaluations[0].reward,
        "after": result.evaluations[-1].reward,
        "seconds": time.monotonic() - began,
        "curve": steps,
        "tool_success": tool_success(task.traced for task in result.evaluations[-1].tasks),
        "changed": counts["changed"] / max(1, counts["calls"]),
        "settings": COMMON | variant.settings,
    }
    (out / "result.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
