"""PPO: a critic's values reach the tokens they are of, and it trains, resumes and repeats as any
other algorithm."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import agentlightning as agl
from agentlightning import semconv
from agentlightning.algorithm.rl.batch import Batch, Values, make_batches
from agentlightning.cli.main import run
from agentlightning.data import credit
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import ConfigError
from agentlightning.learner.training_forward import CRITIC_FILE
from agentlightning.types import Rollout, Span
from tests import agents
from tests.algorithm.test_tracking import unknown_names
from tests.data.recordings import reward as reward_span
from tests.data.recordings import sampled, span, trace_stored
from tests.test_trainer import TASKS, policy, trainer


def flight(name: str, reward: float, results: Sequence[str | None]) -> tuple[Rollout, list[Span]]:
    """A rollout of calls that each use a tool, whose results come with the next, and one that
    answers."""
    spans: list[Span] = []
    told: list[Any] = []
    for index, result in enumerate([*results, "answer"]):
        called = (
            [{"id": f"t{index}", "function": {"name": "search", "arguments": "{}"}}]
            if index < len(results)
            else []
        )
        about = {
            semconv.CALL_INDEX: index,
            semconv.CALL_ENDPOINT: "chat/completions",
            semconv.GEN_AI_INPUT_MESSAGES: msgspec.json.encode(told).decode(),
            semconv.GEN_AI_OUTPUT_MESSAGES: msgspec.json.encode(
                [{"role": "assistant", "tool_calls": called}]
            ).decode(),
        }
        told = [*told, {"role": "tool", "tool_call_id": f"t{index}", "content": result}]
        ids = (5 + index, 6 + index, 7 + len(name))
        capture = sampled(1, 2, 3 + index, token_ids=ids, logprobs=(-4.5,) * 3, versions=((0, 3),))
        spans.append(span(f"{name}{index}", float(index), index + 0.5, tokens=capture, **about))
    spans.append(reward_span(reward, 99.0))
    spans = [msgspec.structs.replace(one, rollout_id=name) for one in spans]
    return Rollout(rollout_id=name, input="task", start_time=0.0, status="succeeded"), spans


def ppo(**changes: Any) -> agl.PPO:
    settings: dict[str, Any] = {
        "steps": 2,
        "tasks_per_step": 8,
        "minibatches": 2,
        "max_tokens": 6,
        "temperature": 2.0,
    }
    return agl.PPO(**(settings | changes))


def groups(*rewards: float) -> list[RewardedGroup]:
    """A group of one for each reward; its rollout looks once and answers."""
    flights = [flight(f"f{index}", reward, ["KL23"]) for index, reward in enumerate(rewards)]
    return [rewarded_group([trace_stored(rollout, spans)], "exclude") for rollout, spans in flights]


def batch_of(
    algorithm: Any, groups: Sequence[RewardedGroup], values: Values | None = None
) -> Batch:
    return make_batches(algorithm, groups, {"policy": values})["policy"]


def telling_tokens(sequences: Sequence[TrainingSequence]) -> list[np.ndarray]:
    """A critic to whom a token is worth its id."""
    return [sequence.token_ids[sequence.positions].astype(np.float32) for sequence in sequences]


def silent(sequences: Sequence[TrainingSequence]) -> list[np.ndarray]:
    return [np.zeros(len(sequence.positions), np.float32) for sequence in sequences]


@pytest.mark.parametrize("level", ["transition", "trajectory", "tree"])
def test_every_sampled_token_has_its_own_value_and_no_other_token_has_one(level: Any) -> None:
    batch = batch_of(ppo(level=level), groups(1.0, 0.0, 0.5), telling_tokens).sequences
    for sequence, values in zip(batch, telling_tokens(batch), strict=True):
        assert sequence.values is not None
        assert len(sequence.positions) < len(sequence)  # what was observed is there too
        assert sequence.values.tolist() == values.tolist()


def test_advantages_and_targets_are_those_of_gae_over_the_sampled_tokens() -> None:
    """Across calls what lies between them is no step: neither value nor discount nor advantage."""
    rollouts = groups(1.0, 0.0)
    settings: dict[str, Any] = {"gamma": 0.9, "lam": 0.8, "across_calls": True}
    chosen = ppo(
        returns="air_dense", returns_options={"tool_weights": 0.3}, level="transition", **settings
    )
    batch = batch_of(chosen, rollouts, telling_tokens).sequences
    values = np.concatenate(telling_tokens(batch)).astype(np.float64)
    rewards = np.array([0, 0, 0.3, 0, 0, 1.0, 0, 0, 0.3, 0, 0, 0])
    advantages = np.zeros(12)
    for k in reversed(range(12)):
        last = k in (5, 11)
        delta = rewards[k] + (0.0 if last else 0.9 * values[k + 1]) - values[k]
        advantages[k] = delta + (0.0 if last else 0.9 * 0.8 * advantages[k + 1])
    whitened = credit.whiten(advantages, np.repeat([0, 1], 6))
    targets = np.concatenate([sequence.value_targets for sequence in batch])  # type: ignore[misc]
    np.testing.assert_allclose(
        np.concatenate([sequence.advantages for sequence in batch]), whitened, rtol=1e-5
    )
    np.testing.assert_allclose(targets, advantages + values, rtol=1e-5)


def test_a_batch_of_equal_rewards_trains_the_critic_until_it_knows_them() -> None:
    """Nothing is better than anything else, so that the policy has nothing to learn from it."""
    unknown = batch_of(ppo(lam=1.0), groups(1.0, 1.0), silent)
    assert unknown.sequences and not any(
        sequence.advantages.any() for sequence in unknown.sequences
    )
    assert unknown.metrics["value_mean"] == 0.0 and unknown.metrics[
        "value_target_mean"
    ] == pytest.approx(1.0)
    known = batch_of(ppo(), groups(0.0, 0.0), silent)
    assert not known.sequences and known.metrics["groups_without_variance"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_it_trains_and_is_trained_again_bit_for_bit(
    tmp_path: Path, trunk: Any, capsys: Any
) -> None:
    policy().save(tmp_path / "model")
    result = trainer(
        tmp_path, algorithm=ppo(critic=trunk, checkpoint_every=1), model=tmp_path / "model"
    ).fit(agents.vowels, TASKS)
    last = result.metrics[-1].values
    for name in (
        "value_loss",
        "value_mean",
        "explained_variance",
        "value_clip_fraction",
        "critic_grad_norm",
    ):
        assert math.isfinite(last[name])
    assert last["value_mean"] != 0 and last["inference_mismatch"] < 1e-4
    assert unknown_names(result.metrics) == set()
    assert result.checkpoint is not None
    assert load_file(result.checkpoint / CRITIC_FILE)["head.weight"].any()
    for steps in ("1-2", "2"):
        assert run(["replay", str(result.directory), "--steps", steps, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] is True


def test_during_its_warm_up_the_critic_alone_is_trained(tmp_path: Path) -> None:
    result = trainer(tmp_path, algorithm=ppo(critic_warmup=1, checkpoint_every=1)).fit(
        agents.vowels, TASKS
    )
    first, second = result.metrics[-2].values, result.metrics[-1].values
    assert first["grad_norm"] == 0 and first["critic_grad_norm"] > 0
    assert second["grad_norm"] > 0
    after = load_file(tmp_path / "run" / "checkpoints" / "step-000001" / "model.safetensors")
    begun = policy().model.state_dict()
    assert all(np.array_equal(weights, begun[name].numpy()) for name, weights in after.items())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: agl.PPO(lam=1.5), "lam is 1.5; it lies between 0 and 1"),
        (lambda: agl.PPO(across_calls=True), "give returns='air_dense'"),
        (lambda: agl.PPO(returns="tree"), "a second baseline"),
        (lambda: agl.PPO(critic="own"), "critic is 'own'; known: shared, separate"),
        (lambda: agl.PPO(critic_warmup=-1), "critic_warmup is -1"),
        (lambda: agl.PPO(critic_learning_rate=0.0), "must be above 0"),
        (lambda: agl.PPO(value_clip=0.0), "value_clip is 0.0"),
        (lambda: agl.PPO(whiten_over="calls"), "known: rollouts, tokens"),
        (lambda: agl.PPO(loss="policy_gradient"), "give 1 of each"),
        (lambda: agl.PPO(returns="air", reward=agl.RewardSpec(base="sum")), "would count twice"),
        (lambda: agl.GRPO(baseline="gae"), "agl.PPO"),
        (lambda: agl.GRPO(baseline=credit.gae), "agl.PPO"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
