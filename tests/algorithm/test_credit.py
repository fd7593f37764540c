"""Credit and losses in the whole pipeline: from spans to a gradient, and through a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning import semconv
from agentlightning.data.credit_table import RewardedGroup
from agentlightning.data.sequences import build_sequences
from agentlightning.data.transitions import Transition, trace_rollout
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.learner.torch import TorchLearner
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture
from tests.models import tiny_model


def flight(name: str, reward: float, results: Sequence[str | None]) -> tuple[Rollout, list[Span]]:
    """A rollout of calls that each use a tool, whose results come with the next, and one that answers."""
    spans: list[Span] = []
    told: list[Any] = []
    for index, result in enumerate([*results, "answer"]):
        called = (
            [{"id": f"t{index}", "function": {"name": "search", "arguments": "{}"}}] if index < len(results) else []
        )
        about = {
            semconv.CALL_INDEX: index,
            semconv.CALL_ENDPOINT: "chat/completions",
            semconv.GEN_AI_INPUT_MESSAGES: msgspec.json.encode(told).decode(),
            semconv.GEN_AI_OUTPUT_MESSAGES: msgspec.json.encode([{"role": "assistant", "tool_calls": called}]).decode(),
        }
        told = [*told, {"role": "tool", "tool_call_id": f"t{index}", "content": result}]
        ids = (5 + index, 6 + index, 7 + len(name))
        choice = SampledChoice(token_ids=ids, logprobs=(-4.5,) * 3, finish_reason="stop", versions=((0, 3),))
        captured = TokenCapture(prompt_token_ids=(1, 2, 3 + index), choices=(choice,))
        spans.append(span(name, f"{name}{index}", float(index), about, captured))
    final: dict[str, Any] = {semconv.reward_name(0): "primary", semconv.reward_value(0): reward}
    spans.append(span(name, f"{name}reward", 99.0, final, None))
    return Rollout(rollout_id=name, input="task", start_time=0.0, status="succeeded"), spans


def span(rollout: str, name: str, start: float, about: dict[str, Any], tokens: TokenCapture | None) -> Span:
    return Span(
        rollout_id=rollout,
        attempt_id="a",
        sequence_id=int(start),
        trace_id="0" * 32,
        span_id=name,
        name=name,
        start_time=start,
        end_time=start + 0.5,
        attributes=about,
        tokens=tokens,
    )


def gradient(algorithm: agl.GRPO) -> torch.Tensor:
    """Of the step that two flights make, one of which looked in vain."""
    flights = [flight("good", 1.0, ["KL23"]), flight("poor", 0.0, [None, "KL23"])]
    traced = [trace_rollout(rollout, spans, reward=algorithm.reward) for rollout, spans in flights]
    rewards = [one.reward for one in traced]
    (credited,) = algorithm.advantages([RewardedGroup([one.transitions for one in traced], rewards)])  # type: ignore[arg-type]
    learner = TorchLearner(Policy(tiny_model("qwen3"), make_tokenizer(["a few words"], 300)))
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.0)
    batch = [sequence for transitions in credited for sequence in build_sequences(transitions, "transition")]
    learner.step(batch, algorithm.make_loss())
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


def test_alpha_changes_grpos_gradient() -> None:
    plain = gradient(agl.GRPO())
    blended = [gradient(agl.GRPO(returns="air", returns_options={"alpha": alpha})) for alpha in (0.0, 0.2, 0.6)]
    torch.testing.assert_close(blended[0], plain)
    for one, other in ((plain, blended[1]), (blended[1], blended[2])):
        assert float((one - other).norm()) > 0.01 * float(plain.norm())


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo", "cispo", "policy_gradient"])
def test_every_loss_makes_a_step_of_its_own(loss: Any) -> None:
    """The behaviour logprobs here are not the model's, so that no two agree."""
    assert float((gradient(agl.GRPO(loss=loss)) - gradient(agl.GRPO())).norm()) > 0


TASKS = [{"word": word} for word in ("apple", "ocean", "quiet")]


@agl.rollout
async def twice(task: Any, llm: agl.LLM) -> float:
    """Two calls, of which the first is rewarded by itself."""
    client = agl.openai_client(llm)
    said = ""
    for turn in range(2):
        message: Any = {"role": "user", "content": task["word"] + said}
        answer = await client.chat.completions.create(model=llm.model, messages=[message])
        said += answer.choices[0].message.content or ""
        if turn == 0:
            agl.emit_reward(0.5, final=False)
    return float(sum(letter in "aeiou" for letter in said))


def first_call_counts_double(reward: float, transitions: Sequence[Transition]) -> np.ndarray:
    assert [transition.reward for transition in transitions] == [0.5, None]
    return reward * np.array([2.0, 1.0])


def test_a_function_of_your_own_trains(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["apple ocean quiet"] * 3, 300)
    algorithm = agl.GRPO(
        returns=first_call_counts_double,
        baseline="reinforce++_baseline",
        loss="cispo",
        reward=agl.RewardSpec(length_penalty=1.0),
        steps=1,
        tasks_per_step=2,
        group_size=3,
        max_tokens=6,
        temperature=2.0,
    )
    trainer = agl.Trainer(
        model=Policy(make_model(tokenizer, seed=0), tokenizer),
        algorithm=algorithm,
        run_dir=tmp_path / "run",
        max_sequence_length=128,
    )
    (metrics,) = trainer.fit(twice, TASKS).metrics
    values = metrics.values
    assert values["loss"] != 0
    assert values["reward/length_penalty"] < 0
    assert values["reward"] == pytest.approx(values["reward/final"] + values["reward/length_penalty"])
