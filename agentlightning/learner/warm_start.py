"""Supervised warm start: teaches a policy the form of a conversation from demonstrations, until it can copy.

Does not know tasks, rewards or how good the demonstrations are. Progress is measured as *copying*: the mean probability
of the names and numbers that an assistant's turn repeats from earlier turns. Measured per kind of task on held-out
demonstrations, it shows when every kind is solved sometimes, so that reinforcement learning can start.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import ConfigError
from agentlightning.learner.base import AdamW
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import ASSISTANT, END, chat_text, make_model, make_tokenizer, token_id
from agentlightning.learner.torch import TorchLearner

COMMON = 0.25  # a token in a larger share of the demonstrations belongs to the form, not to the task


@dataclass(frozen=True)
class WarmStart:
    """How long and how hard to train. The rate rises over `warm_up` steps, stays, and falls to zero over the last
    `cool_down` steps. These start when every kind has reached `copying`, or in time to end at `max_steps`."""

    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warm_up: int = 10
    cool_down: int = 60
    min_steps: int = 40
    max_steps: int = 240
    check_every: int = 20
    checked: int = 150  # held-out demonstrations to measure copying
    copying: float = 0.97


@dataclass(frozen=True)
class Progress:
    """One step of the warm start. `copying` is the last measurement, per kind of task."""

    step: int
    loss: float
    copying: Mapping[str, float]


@dataclass(frozen=True)
class Example:
    """One demonstration: a sequence in which the assistant's tokens are learned, and, bool[N], which of them repeat an
    earlier value."""

    kind: str
    sequence: TrainingSequence
    copied: np.ndarray


def make_policy(
    demonstrations: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int,
    vocabulary_size: int = 1024,
    options: WarmStart = WarmStart(),
    on_step: Callable[[Progress], None] | None = None,
) -> Policy:
    """A tiny policy made only from `demonstrations`: they give the vocabulary, and it is warm-started on them.

    The same seed gives the same policy. Raises what `warm_start` raises."""
    torch.set_num_threads(1)  # more would slow down so small a model
    tokenizer = make_tokenizer((chat_text(shown["messages"], tools) for shown in demonstrations), vocabulary_size)
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
    batches = endless_batches(trained, options.batch_size, random.Random(f"warm start/{seed}"))
    config = AdamW(options.learning_rate, (0.9, 0.98), options.weight_decay, micro_batch_tokens=2048)
    learner = TorchLearner(Policy(model, tokenizer), config)
    copying: dict[str, float] = {}
    last_step = options.max_steps
    step = 0
    while step < last_step:
        step += 1
        share = min(1.0, step / options.warm_up, (last_step - step + 1) / options.cool_down)
        learner.config = replace(config, learning_rate=options.learning_rate * share)
        metrics = learner.step([example.sequence for example in next(batches)], Loss("policy_gradient"))
        if step % options.check_every == 0 and last_step == options.max_steps:
            copying = measure_copying(learner, checked)
            if step >= options.min_steps and min(copying.values(), default=1.0) >= options.copying:
                last_step = min(last_step, step + options.cool_down)
        if on_step is not None:
            on_step(Progress(step, metrics["loss"], copying))
    return measure_copying(learner, checked)


def measure_copying(learner: TorchLearner, examples: Sequence[Example]) -> dict[str, float]:
    """Per kind, the mean probability of the copied tokens, each given all that precedes it."""
    probabilities: dict[str, list[float]] = defaultdict(list)
    for example, logprobs in zip(examples, learner.logprobs([example.sequence for example in examples]), strict=True):
        probabilities[example.kind] += logprobs.exp().numpy()[example.copied].tolist()
    return {kind: sum(values) / len(values) for kind, values in sorted(probabilities.items()) if values}


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
    """Tokenise whole conversations and mark the assistant's tokens and the copied values among them."""
    begin, end = token_id(tokenizer, ASSISTANT), token_id(tokenizer, END)
    texts = [chat_text(demonstration["messages"], tools) for demonstration in demonstrations]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    occurrences = Counter(token for token_ids in encoded for token in set(token_ids))
    common = {token for token, count in occurrences.items() if count > COMMON * len(encoded)}
    examples: list[Example] = []
    for demonstration, token_ids in zip(demonstrations, encoded, strict=True):
        positions: list[int] = []
        copied: list[bool] = []
        read: set[int] = set()
        speaking = False
        for position, token in enumerate(token_ids):
            if speaking:
                positions.append(position)
                copied.append(token in read and token not in common)
            else:
                read.add(token)
            speaking = token == begin or (speaking and token != end)
        # All start with the same instructions.
        sequence = TrainingSequence.of("demonstration", token_ids, positions, advantage=1.0, tree=True)
        examples.append(Example(str(demonstration.get("kind", "")), sequence, np.array(copied, bool)))
    return examples
