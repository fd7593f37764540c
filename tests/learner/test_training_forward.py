"""Trained in a forest, every transition gives the log-probabilities and the gradient it gives
alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from agentlightning.data.forest import Forest, build_forest, prefix_order
from agentlightning.data.sequences import Level, TrainingSequence, build_sequences
from agentlightning.learner import training_forward as forest_module
from agentlightning.learner.losses import KLEstimator, Loss, LossKind
from agentlightning.learner.policy import Policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.torch import TorchLearner
from agentlightning.learner.training_forward import (
    Sampled,
    forest_hidden,
    has_plain_head,
    sampled,
    unsupported,
)
from tests.data.test_sequences import credited
from tests.models import tiny_model

MODELS = {family: tiny_model(family) for family in ("llama", "qwen3")}
EVERYTHING = 100_000

# Each kind of loss, way to aggregate and KL estimator at least once.
TERMS: list[tuple[str, KLEstimator]] = [
    ("sequence-mean", "k3"),
    ("token-mean", "k1"),
    ("rollout-mean", "k2"),
    ("constant", "k3"),
    ("token-mean", "k2"),
]
LOSSES = [
    Loss(
        kind=kind,
        dual_clip=3.0 if kind == "ppo_clip" else None,
        aggregation=aggregation,
        constant_length=8 if aggregation == "constant" else None,
        kl_coefficient=0.04,
        kl_estimator=estimator,
        entropy_coefficient=0.01,
        temperature=0.8,
    )
    for kind, (aggregation, estimator) in zip(get_args(LossKind), TERMS, strict=True)
]


@pytest.fixture(autouse=True, scope="module")
def blocks() -> Iterator[None]:
    """Branches of a few tokens are computed in blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest_module, "QUERIES_AT_ONCE", 3)
        yield


def learner(family: Any = "qwen3", tokens: int = EVERYTHING, **model: Any) -> TorchLearner:
    """One that moves nothing: the gradient of its step is there to be read."""
    one = TorchLearner(
        Policy(tiny_model(family, **model), None),  # type: ignore[arg-type]
        AdamW(learning_rate=1e-30, micro_batch_tokens=tokens, max_grad_norm=1e9),
        reference=True,
    )
    one.optimizer = torch.optim.SGD(one.model.parameters())
    for parameter in one.reference.parameters() if one.reference else ():
        parameter.mul_(1.1)
    return one


def gradient(one: TorchLearner, batch: Sequence[TrainingSequence], loss: Loss) -> Tensor:
    one.step(batch, loss)
    return torch.cat([p.grad.flatten() for p in one.model.parameters() if p.grad is not None])


def agents(seed: int, level: Level, rollouts: int = 4) -> list[TrainingSequence]:
    """Rollouts of one task over five tokens: their prompts, and some of their answers, begin alike;
    histories are extended, edited and started afresh."""
    random = np.random.default_rng(seed)
    batch: list[TrainingSequence] = []
    for rollout in range(rollouts):
        history = [2, 3, 4, 2, 2, 3]
        calls = []
        for turn in range(4):
            answer = random.integers(2, 5, int(random.integers(1, 5))).tolist()
            calls.append(credited(history, answer, float(random.normal()), f"r{rollout}", turn))
            history = (
                history[: 4 if turn == 1 else None] + answer + random.integers(2, 7, 2).tolist()
            )
        batch += build_sequences(calls, level)
    return batch


def dense_mask(forest: Forest) -> Tensor:
    """The reference: whom each slot sees, bool[1, 1, L, L]."""
    seen = np.eye(len(forest.token_ids), dtype=bool)
    for slot, previous in enumerate(forest.previous):
        if previous >= 0:
            seen[slot] |= seen[previous]
    return torch.from_numpy(seen)[None, None]


@torch.no_grad()
def logprob_error(model: Any, sequences: list[np.ndarray]) -> float:
    """The largest difference of any token's log-probability, in the forest from alone; each state
    is also that under the dense mask."""
    order, shared = prefix_order(sequences)
    forest, paths = build_forest([sequences[i] for i in order], shared)
    ids, depths = (
        torch.from_numpy(forest.token_ids.astype(np.int64)),
        torch.from_numpy(forest.depths),
    )
    hidden = forest_hidden(model, forest)
    dense = model.base_model(
        input_ids=ids[None], position_ids=depths[None], attention_mask=dense_mask(forest)
    )
    torch.testing.assert_close(hidden, dense.last_hidden_state, atol=1e-4, rtol=0)
    largest = 0.0
    for i, path in zip(order, paths, strict=True):
        alone = model(input_ids=torch.from_numpy(sequences[i].astype(np.int64))[None]).logits[0]
        found = model.get_output_embeddings()(hidden[0, path])
        largest = max(
            largest,
            float((torch.log_softmax(found, -1) - torch.log_softmax(alone, -1)).abs().max()),
        )
    return largest


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    sequences=st.lists(
        st.lists(st.integers(2, 4), min_size=1, max_size=12), min_size=1, max_size=8
    ),
    family=st.sampled_from([*MODELS]),
)
def test_a_slot_has_the_state_its_sequence_has_alone_and_under_the_dense_mask(
    sequences: list[list[int]], family: str
) -> None:
    assert (
        logprob_error(MODELS[family], [np.array(sequence, np.int32) for sequence in sequences])
        < 1e-5
    )


def gradient_error(
    batches: dict[Level, list[TrainingSequence]], loss: Loss, tokens: int, **model: Any
) -> float:
    """How far the gradient at level `tree` is from that of each transition alone, relative to
    it."""
    alone = gradient(learner(**model), batches["transition"], loss)
    together = gradient(learner(tokens=tokens, **model), batches["tree"], loss)
    return float((together - alone).norm() / alone.norm())


@settings(deadline=None, max_examples=8)
@given(
    st.integers(0, 1000), st.sampled_from(LOSSES), st.sampled_from([*MODELS]), st.integers(10, 80)
)
def test_the_gradient_is_exact_whatever_the_agents_did(
    seed: int, loss: Loss, family: str, tokens: int
) -> None:
    batches: dict[Level, list[TrainingSequence]] = {
        level: agents(seed, level) for level in ("transition", "tree")
    }
    assert gradient_error(batches, loss, tokens, family=family) < 1e-4


def test_the_metrics_say_how_many_tokens_were_computed_and_saved() -> None:
    one = learner()
    alone = one.step(agents(1, "transition"), Loss())
    joined = one.step(agents(1, "trajectory"), Loss())
    shared = one.step(agents(1, "tree"), Loss())
    assert alone["tokens_saved"] == 0
    assert 0 < joined["tokens_saved"] < shared["tokens_saved"]
    for metrics in (joined, shared):
        assert metrics["tokens_computed"] + metrics["tokens_saved"] == alone["tokens_computed"]
        assert metrics["tokens"] == alone["tokens"]


def test_an_architecture_that_is_not_exact_is_trained_call_by_call_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert all(unsupported(model) is None for model in MODELS.values())
    windowed = learner("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert windowed.step(agents(1, "tree"), Loss())["tokens_saved"] == 0
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "level 'tree' cannot be used: the model attends to a sliding window"
    ]


def test_a_model_that_fails_the_check_on_the_first_batch_is_trained_call_by_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = learner()
    attention = one.model.base_model.layers[0].self_attn  # type: ignore[union-attr,index]
    usual = attention.forward

    def looks_at_the_batch(hidden_states: Tensor, **rest: Any) -> Any:
        """Something no list of architectures tells: a layer that sees how many tokens were computed
        together."""
        out, weights = usual(hidden_states=hidden_states, **rest)
        return out * hidden_states.shape[1], weights

    attention.forward = looks_at_the_batch  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        assert one.step(agents(1, "tree"), Loss())["tokens_saved"] == 0
    assert "on two sequences of the first batch its log-probabilities are off by" in caplog.text


HIDDEN, VOCABULARY, STATES, TOKENS = 16, 50, 37, 60


def world() -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = (3 * torch.randn(STATES, HIDDEN)).requires_grad_()
    # some are drawn from twice
    of = torch.cat([torch.randperm(STATES), torch.randint(STATES, (TOKENS - STATES,))])
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,)), of


def loss(values: Sampled) -> torch.Tensor:
    weights = torch.linspace(-1, 2, TOKENS)
    return (values.logprobs * weights + 0.3 * values.entropy * weights.square()).sum()


@pytest.mark.parametrize("at_once", [1, 7, 36])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_all_at_once(
    at_once: int, entropy_gradient: bool
) -> None:
    results: list[tuple[torch.Tensor, ...]] = []
    for size in (STATES, at_once):
        head, hidden, targets, of = world()
        values = sampled(
            head, hidden, targets, of, 0.7, entropy_gradient=entropy_gradient, at_once=size
        )
        loss(values).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        results.append((values.logprobs, values.entropy, hidden.grad, head.weight.grad))
        distributions = torch.distributions.Categorical(logits=head(hidden)[of] / 0.7)
        torch.testing.assert_close(values.logprobs, distributions.log_prob(targets))
        torch.testing.assert_close(values.entropy, distributions.entropy())
    for whole, parts in zip(*results, strict=True):
        assert float((parts - whole).detach().norm() / whole.detach().norm()) < 1e-5


def test_heads_that_do_more_than_project_are_found_out() -> None:
    small: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    )
    assert has_plain_head(tiny_model()) and has_plain_head(gpt2.eval())
    assert not has_plain_head(Gemma2ForCausalLM(Gemma2Config(**small)).eval())  # capped
    # scaled
    assert not has_plain_head(GraniteForCausalLM(GraniteConfig(**small, logits_scaling=8.0)).eval())
