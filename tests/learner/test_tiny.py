"""The tiny policy: what its tokenizer, its chat template and its first weights promise."""

from __future__ import annotations

import math
import multiprocessing
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentlightning.errors import ConfigError
from agentlightning.learner.tiny import (
    answers_of,
    chat_text,
    make_model,
    make_policy,
    make_tokenizer,
    warm_start,
)
from agentlightning.learner.torch import TorchLearner

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"from": {}, "max": {}}},
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search", "arguments": {"from": "Oslo", "max": 400}},
}
CONVERSATION = [
    {"role": "system", "content": "Travel desk."},
    {"role": "user", "content": "Find a flight from Oslo, max 400 euro."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "flight: KL23"},
    {"role": "assistant", "content": "flight: KL23"},
]
RENDERED = (
    "<|system|>Travel desk.\nsearch(from, max)<|end|>"
    "<|user|>Find a flight from Oslo, max 400 euro.<|end|>"
    '<|assistant|><tool_call>{"name": "search", "arguments": {"from": "Oslo", "max": 400}}</tool_call><|end|>'
    "<|tool|>flight: KL23<|end|>"
    "<|assistant|>flight: KL23<|end|>"
)
TOKENIZER = make_tokenizer([chat_text(CONVERSATION, [TOOL])] * 3, 600)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return make_model(tokenizer, seed=1).eval()


@given(st.text())
def test_any_text_survives_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_the_template_writes_tools_calls_and_results(tokenizer: PreTrainedTokenizerFast) -> None:
    assert chat_text(CONVERSATION, [TOOL]) == RENDERED
    assert tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False) == RENDERED


def test_a_prompt_begins_with_the_prompt_and_the_answer_before_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    first, second = (
        tokenizer.apply_chat_template(
            CONVERSATION[:turns], tools=[TOOL], add_generation_prompt=True, return_dict=False
        )
        for turns in (2, 4)
    )
    answer = RENDERED.split("<|assistant|>")[1].split("<|tool|>")[0]
    sampled = tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert second[: len(first) + len(sampled)] == first + sampled


@torch.no_grad()
def test_a_new_model_copies_before_any_training(model: Qwen3ForCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    said, between = (
        torch.randint(6, model.config.vocab_size, (8, 20), generator=generator) for _ in range(2)
    )
    logits = model(torch.cat([said, between, said], dim=1)).logits
    hits = logits[:, 42:-1].argmax(-1) == said[:, 3:]
    assert hits.float().mean() > 0.9


def demonstrate(generator: random.Random) -> dict:
    name, number = (
        generator.choice(["Anna", "Ben", "Carla", "Dov", "Elsa", "Finn", "Greta"]),
        generator.randrange(10, 99),
    )
    messages = [
        ("user", f"name: {name}, number: {number}."),
        ("assistant", f"number: {number}, name: {name}"),
    ]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def test_a_warm_start_teaches_what_the_assistant_says_the_same_for_the_same_seed() -> None:
    generator = random.Random(1)
    *shown, new = (demonstrate(generator) for _ in range(300))
    policy = make_policy(shown, seed=1, steps=40)
    sequence = answers_of(
        policy.tokenizer, policy.tokenizer(chat_text(new["messages"]))["input_ids"]
    )  # type: ignore[arg-type]
    learned = policy.tokenizer.decode(sequence.token_ids[sequence.positions])
    assert learned == new["messages"][1]["content"] + "<|end|>"
    (logprobs,) = TorchLearner(policy).logprobs([sequence])
    assert float(logprobs.exp().min()) > 0.5
    drawn = torch.random.get_rng_state()
    short = [
        make_policy(shown, seed=seed, steps=2).model.get_input_embeddings().weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(short[0], short[1]) and not torch.equal(short[0], short[2])
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_policy_has_the_layers_and_positions_that_are_asked_for() -> None:
    generator = random.Random(1)
    shown = [demonstrate(generator) for _ in range(32)]
    size = {"layers": 3, "inner": 96, "max_positions": 256}
    made = make_policy(shown, seed=1, steps=1, vocabulary_size=300, **size).model.config
    assert size == {
        "layers": made.num_hidden_layers,
        "inner": made.intermediate_size,
        "max_positions": made.max_position_embeddings,
    }


def started(checkpoint: Path | None = None, steps: int | None = 100) -> dict[str, torch.Tensor]:
    """The weights of a small model after a warm start."""
    torch.set_num_threads(1)
    generator = random.Random(1)
    shown = [demonstrate(generator) for _ in range(100)]
    model = make_model(TOKENIZER, seed=1, inner=64)
    warm_start(model, TOKENIZER, shown, seed=1, steps=steps, checkpoint=checkpoint)
    return model.state_dict()


def test_a_killed_warm_start_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    process = multiprocessing.get_context("spawn").Process(target=started, args=(checkpoint,))
    process.start()
    while process.is_alive() and not checkpoint.exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = started(checkpoint)
    whole = started()
    assert all(torch.equal(resumed[name], weights) for name, weights in whole.items())
    with pytest.raises(ConfigError, match="needs a number of steps"):
        started(checkpoint, steps=None)


def test_a_warm_start_without_steps_ends_when_the_held_out_loss_falls_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half of the answers cannot be known, so that the loss ends at half of log 2 per token of
    text."""
    generator = random.Random(1)
    asked, signature = (
        {"role": "user", "content": "heads?"},
        {"function": {"name": "coin", "parameters": {}}},
    )
    coins = [{"role": "assistant", "content": side} for side in ("yes", "no")]
    shown = [
        {"messages": [asked, generator.choice(coins)], "tools": [signature]} for _ in range(200)
    ]
    policy = make_policy(shown, seed=1)
    said = re.fullmatch(
        r"warm start: (\d+) steps, held-out loss (0\.\d+) per token\n", capsys.readouterr().err
    )
    assert said and 80 + 60 <= int(said[1]) <= 300 and abs(float(said[2]) - math.log(2) / 2) < 0.05
    assert "coin" in policy.tokenizer.get_vocab()
