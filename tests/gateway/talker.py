"""A real policy that knows a handful of answers by heart, so that tests know what it says at temperature 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.learner.tiny import make_model, make_tokenizer

SEARCH_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
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


@dataclass(frozen=True)
class Talker:
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@cache
def make_talker() -> Talker:
    """Learned in a few seconds, once per test session."""
    torch.set_num_threads(1)
    lines = {**PLAIN, **WITH_TOOLS}
    del lines["signs"]  # unseen, so that each of its characters takes several tokens
    tokenizer = make_tokenizer([*lines.keys(), *lines.values()] * 4, 512)
    model = make_model(tokenizer, seed=0, max_positions=1024)
    chat = ChatTemplate.from_pretrained(tokenizer)
    pairs = [(chat.render(user(text)), answer) for text, answer in PLAIN.items()]
    pairs += [(chat.render(user(text), [SEARCH_TOOL]), answer) for text, answer in WITH_TOOLS.items()]
    rows = [(chat.encode(prompt), chat.encode(answer + tokenizer.eos_token)) for prompt, answer in pairs]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < 0.002:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01, "the talker did not learn its lines"
    return Talker(tokenizer, model.eval())
