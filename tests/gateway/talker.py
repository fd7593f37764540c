"""A real policy that knows a handful of answers by heart, so that tests know what it says at
temperature 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.learner.tiny import make_model, make_tokenizer

SEARCH_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
        },
    },
}
CALL = '<tool_call>{"name": "search", "arguments": {"q": "sun"}}</tool_call>'
OTHER_CALL = '<tool_call>{"name": "search", "arguments": {"q": "rain"}}</tool_call>'
BROKEN_CALL = '<tool_call>{"name": "search", "arguments": {"q": }}</tool_call>'

# What the user says, and what the policy answers.
PLAIN = {
    "hello": "Hi there, friend!",
    "count": "1 2 3 4 5 6 7 8 9",
    "signs": "naïve 漢字 🙂 end",
}
WITH_TOOLS = {
    "weather": f"Let me look.{CALL}",
    "both": CALL + OTHER_CALL,
    "broken": BROKEN_CALL,
}
FOUND = "It is sunny."  # after the tool's result

SHIPPED = Path(__file__).parent / "talker_model"


@dataclass(frozen=True)
class Talker:
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@cache
def make_talker() -> Talker:
    """The shipped policy: its answers do not depend on how this machine's processor would have
    trained it."""
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    model = Qwen3ForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    return Talker(tokenizer, model.eval())


def train_talker() -> Talker:
    """Learned in a few seconds, until no token of an answer is less than nearly certain."""
    torch.set_num_threads(1)
    lines = {**PLAIN, **WITH_TOOLS}
    del lines["signs"]  # unseen, so that each of its characters takes several tokens
    tokenizer = make_tokenizer([*lines.keys(), *lines.values(), FOUND] * 4, 512)
    model = make_model(tokenizer, seed=0, max_positions=1024)
    chat = ChatTemplate.from_pretrained(tokenizer)
    pairs = [(chat.render(user(text)), answer) for text, answer in PLAIN.items()]
    pairs += [
        (chat.render(user(text), [SEARCH_TOOL]), answer) for text, answer in WITH_TOOLS.items()
    ]
    pairs.append((chat.render(looked_up(), [SEARCH_TOOL]), FOUND))
    rows = [
        (chat.encode(prompt), chat.encode(answer + tokenizer.eos_token)) for prompt, answer in pairs
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(2000):
        logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
        losses = cross_entropy(logits, labels[:, 1:], reduction="none")
        if losses.max() < 0.001:
            return Talker(tokenizer, model.eval())
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    raise AssertionError("the talker did not learn its lines")


def looked_up() -> list[dict[str, Any]]:
    """The conversation about the weather, up to the result of its tool."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"q": "sun"}'},
    }
    return [
        *user("weather"),
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


if __name__ == "__main__":  # python -m tests.gateway.talker: after a change of its lines
    talker = train_talker()
    talker.tokenizer.save_pretrained(SHIPPED)
    talker.model.half().save_pretrained(SHIPPED)
