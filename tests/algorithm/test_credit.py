"""Credit in the whole pipeline: from spans to a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

import agentlightning as agl
from agentlightning import semconv
from agentlightning.data.credit_table import RewardedGroup
from agentlightning.data.sequences import build_sequences
from agentlightning.data.transitions import trace_rollout
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_tokenizer
from agentlightning.learner.torch import TorchLearner
from agentlightning.types import Rollout, Span
from tests.data.recordings import reward as reward_span
from tests.data.recordings import sampled, span
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
        capture = sampled(1, 2, 3 + index, token_ids=ids, logprobs=(-4.5,) * 3, versions=((0, 3),))
        spans.append(span(f"{name}{index}", float(index), index + 0.5, tokens=capture, **about))
    spans.append(reward_span(reward, 99.0))
    spans = [msgspec.structs.replace(one, rollout_id=name) for one in spans]
    return Rollout(rollout_id=name, input="task", start_time=0.0, status="succeeded"), spans


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
