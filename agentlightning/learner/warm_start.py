"""Supervised warm start: teaches a policy the form of a conversation from demonstrations, until it can copy.

Knows demonstrations (messages and, optionally, their kind) and a loss on the assistant's tokens. Does not know tasks,
rewards or how good the demonstrations are. The measure of progress is *copying*: the mean probability that the
policy gives to the names and numbers which an assistant's turn takes over from what it has read. Judged per kind of
task on demonstrations kept aside, it says when every kind can be solved now and then, which is where reinforcement
learning can begin.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import ASSISTANT, END, PAD, chat_text, make_model, make_tokenizer, token_id

COMMON = 0.25  # a token that occurs in a larger share of the demonstrations belongs to the form, not to the task


@dataclass(frozen=True)
class WarmStart:
    """How long and how hard to train. The rate rises over `warm_up` steps, stays, and falls to zero over the last
    `cool_down` steps, which begin when every kind has reached the mark `copying`, or in time to end at `max_steps`."""

    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warm_up: int = 10
    cool_down: int = 60
    min_steps: int = 40
    max_steps: int = 240
    check_every: int = 20
    checked: int = 150  # demonstrations kept aside to measure copying
    copying: float = 0.97


@dataclass(frozen=True)
class Progress:
    """What one step of the warm start saw. `copying` is the last measurement, per kind of task."""

    step: int
    loss: float
    copying: Mapping[str, float]


@dataclass(frozen=True)
class Example:
    """One tokenised demonstration: its ids [T], and for each of them whether the policy is to learn to write it and
    whether it repeats a value that was read before."""

    kind: str
    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]
    copied: tuple[bool, ...]


def make_policy(
    demonstrations: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int,
    vocabulary_size: int = 1024,
    options: WarmStart = WarmStart(),
    on_step: Callable[[Progress], None] | None = None,
) -> Policy:
    """A tiny policy made from nothing but `demonstrations`: its words are theirs, and it is warm-started on them.

    The same seed gives the same policy. Raises as `warm_start` does."""
    torch.set_num_threads(1)  # more only slow so small a model down
    tokenizer = make_tokenizer((chat_text(one["messages"], tools) for one in demonstrations), vocabulary_size)
    model = make_model(tokenizer, seed=seed)
    warm_start(model, tokenizer, demonstrations, tools=tools, seed=seed, options=options, on_step=on_step)
    return Policy(model, tokenizer)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    seed: int,
    options: WarmStart = WarmStart(),
    on_step: Callable[[Progress], None] | None = None,
) -> dict[str, float]:
    """Train `model` in place on the assistant's turns of `demonstrations` and return its `copying` per kind.

    A demonstration has `messages` as OpenAI clients write them and may have a `kind`. The tokenizer is one of
    `learner.tiny`. ConfigError if there are too few demonstrations, TrainingError if the loss is not finite."""
    if len(demonstrations) < options.checked + options.batch_size:
        raise ConfigError(
            f"{len(demonstrations)} demonstrations are too few: {options.checked} are kept aside to measure copying, "
            f"and a batch takes {options.batch_size}; make more, or lower WarmStart.checked"
        )
    examples = make_examples(tokenizer, demonstrations, tools)
    checked, trained = examples[: options.checked], examples[options.checked :]
    pad_id = token_id(tokenizer, PAD)
    batches = endless_batches(trained, options.batch_size, random.Random(f"warm start/{seed}"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=options.weight_decay
    )
    copying: dict[str, float] = {}
    last_step = options.max_steps
    step = 0
    while step < last_step:
        step += 1
        rate = min(1.0, step / options.warm_up, (last_step - step + 1) / options.cool_down)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate
        loss = train_step(model, optimizer, next(batches), pad_id=pad_id)
        if step % options.check_every == 0 and last_step == options.max_steps:
            copying = measure_copying(model, checked)
            if step >= options.min_steps and min(copying.values(), default=1.0) >= options.copying:
                last_step = min(last_step, step + options.cool_down)
        if on_step is not None:
            on_step(Progress(step, loss, copying))
    return measure_copying(model, checked)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Example],
    *,
    pad_id: int,
    micro_batch_size: int = 8,
) -> float:
    """One AdamW step on the mean cross-entropy of the learned tokens; returns that loss.

    Lengths are brought together within the batch only: batches chosen by length would differ in what they teach."""
    ordered = sorted(batch, key=lambda example: len(example.token_ids))
    total = sum(sum(example.learned) for example in batch)
    optimizer.zero_grad(set_to_none=True)
    mean = 0.0
    for start in range(0, len(ordered), micro_batch_size):
        micro = ordered[start : start + micro_batch_size]
        token_ids = padded([example.token_ids for example in micro], pad_id)
        learned = padded([example.learned for example in micro], False)[:, 1:]
        logits = logits_where(model, token_ids, learned)
        loss = F.cross_entropy(logits, token_ids[:, 1:][learned], reduction="sum") / total
        loss.backward()
        mean += loss.item()
    if not math.isfinite(mean):
        raise TrainingError(f"the warm start's loss became {mean}; try a lower learning_rate")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean


@torch.no_grad()
def measure_copying(model: PreTrainedModel, examples: Sequence[Example], batch_size: int = 50) -> dict[str, float]:
    """Per kind, the mean probability that the model gives to the copied tokens, each after all that precedes it."""
    probabilities: dict[str, list[float]] = defaultdict(list)
    ordered = sorted(examples, key=lambda example: len(example.token_ids))
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        token_ids = padded([example.token_ids for example in batch], 0)
        copied = padded([example.copied for example in batch], False)[:, 1:]
        predicted = logits_where(model, token_ids, copied).softmax(-1)
        probability = predicted.gather(1, token_ids[:, 1:][copied][:, None])[:, 0]
        for row, value in zip(torch.nonzero(copied)[:, 0].tolist(), probability.tolist(), strict=True):
            probabilities[batch[row].kind].append(value)
    return {kind: sum(values) / len(values) for kind, values in sorted(probabilities.items())}


def logits_where(model: PreTrainedModel, token_ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] for the N tokens `token_ids[:, 1:][chosen]`, each given all before it; padding is on the right,
    where causal attention does not see it. Only the chosen rows are projected onto the vocabulary."""
    hidden = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[chosen])


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """[N, longest] of the rows' type, filled with `value` on the right."""
    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def endless_batches(examples: Sequence[Example], size: int, generator: random.Random) -> Iterator[Sequence[Example]]:
    """Batches in random order, epoch after epoch."""
    while True:
        shuffled = generator.sample(examples, len(examples))
        yield from (shuffled[start : start + size] for start in range(0, len(shuffled) - size + 1, size))


def make_examples(
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> list[Example]:
    """Tokenise whole conversations and mark what the assistant wrote, and which of it are copied values."""
    begin, end = token_id(tokenizer, ASSISTANT), token_id(tokenizer, END)
    texts = [chat_text(demonstration["messages"], tools) for demonstration in demonstrations]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    occurrences = Counter(token for token_ids in encoded for token in set(token_ids))
    common = {token for token, count in occurrences.items() if count > COMMON * len(encoded)}
    examples: list[Example] = []
    for demonstration, token_ids in zip(demonstrations, encoded, strict=True):
        learned: list[bool] = []
        copied: list[bool] = []
        read: set[int] = set()
        speaking = False
        for token in token_ids:
            learned.append(speaking)
            copied.append(speaking and token in read and token not in common)
            if not speaking:
                read.add(token)
            speaking = token == begin or (speaking and token != end)
        examples.append(Example(str(demonstration.get("kind", "")), tuple(token_ids), tuple(learned), tuple(copied)))
    return examples
