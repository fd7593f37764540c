"""The warm start: what is learned from a demonstration, when it stops, and what it refuses."""

from __future__ import annotations

import random

import torch

from agentlightning.learner.tiny import chat_text, make_model, make_tokenizer
from agentlightning.learner.warm_start import Progress, WarmStart, make_examples, warm_start

NAMES = ["Anna", "Ben", "Carla", "Dov", "Elsa", "Finn", "Greta", "Hugo", "Ines", "Jon", "Kim", "Lars"]
QUICK = WarmStart(batch_size=16, warm_up=5, cool_down=5, min_steps=5, max_steps=60, check_every=5, checked=30)


def demonstrate(generator: random.Random) -> dict:
    name, number = generator.choice(NAMES), generator.randrange(10, 99)
    return {
        "kind": "short" if number < 50 else "long",
        "messages": [
            {"role": "user", "content": f"name: {name}, number: {number}."},
            {"role": "assistant", "content": f"number: {number}, name: {name}"},
        ],
    }


DEMONSTRATIONS = [demonstrate(generator) for generator in [random.Random(1)] for _ in range(300)]
TOKENIZER = make_tokenizer(chat_text(one["messages"]) for one in DEMONSTRATIONS)


def test_only_the_assistants_turn_is_learned_and_only_its_values_count_as_copied() -> None:
    example = make_examples(TOKENIZER, DEMONSTRATIONS, [])[0]
    written = example.sequence.token_ids[example.sequence.positions]
    text = TOKENIZER.decode(written)
    copied = [TOKENIZER.decode([token]) for token in written[example.copied]]
    answer = DEMONSTRATIONS[0]["messages"][1]["content"]
    assert text == answer + "<|end|>"
    assert copied == [answer.split()[1].strip(","), answer.split()[3]]


def test_training_stops_when_every_kind_is_copied() -> None:
    model = make_model(TOKENIZER, seed=1)
    seen: list[Progress] = []
    copying = warm_start(model, TOKENIZER, DEMONSTRATIONS, tools=[], seed=1, options=QUICK, on_step=seen.append)
    assert set(copying) == {"short", "long"}
    assert min(copying.values()) > 0.95
    assert len(seen) < QUICK.max_steps
    assert seen[-1].loss < 0.3 * seen[0].loss


def test_the_same_seed_trains_the_same_policy() -> None:
    options = WarmStart(batch_size=8, warm_up=1, cool_down=1, max_steps=2, checked=30)
    trained = []
    for seed in (1, 1, 2):
        model = make_model(TOKENIZER, seed=1)
        warm_start(model, TOKENIZER, DEMONSTRATIONS, tools=[], seed=seed, options=options)
        trained.append(model.model.embed_tokens.weight.detach().clone())
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])
