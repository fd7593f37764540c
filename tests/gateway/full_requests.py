"""A request to each endpoint that says nearly all its protocol has, and requests that differ from
it anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from hypothesis import strategies as st

from tests.gateway.talker import SEARCH_TOOL

Path: TypeAlias = tuple[str | int, ...]

_SCHEMA = SEARCH_TOOL["function"]["parameters"]
_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"q": "sun"}'},
}
_CHAT = [
    {"role": "system", "content": "be"},
    {"role": "developer", "content": [{"type": "text", "text": "brief"}]},
    {"role": "user", "content": [{"type": "text", "text": "weather"}], "name": "n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [_CALL],
        "reasoning_content": "hm",
        "refusal": None,
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "weather"}]},
    {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    },
    {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}", "id": "f"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes", "annotations": []}],
    },
    {"role": "user", "content": "more"},
]
_SAID = [
    {"type": "thinking", "thinking": "t", "signature": ""},
    {"type": "text", "text": "Let me"},
    {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "sun"}},
]
_RESULT = {
    "type": "tool_result",
    "tool_use_id": "c1",
    "content": [{"type": "text", "text": "sunny"}],
    "is_error": False,
}
_TURNS = [
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": _SAID},
    {"role": "user", "content": [_RESULT, {"type": "text", "text": "ok"}]},
]
_SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 4, "seed": 1, "stream": False}
_MESSAGES = {
    "model": "policy",
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": _TURNS,
    "tools": [{"name": "search", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": None},
}
FULL_REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "policy",
        "messages": _CHAT,
        "tools": [SEARCH_TOOL],
        "tool_choice": "auto",
        **_SAMPLING,
        "n": 2,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 0,
        "presence_penalty": 0.0,
        "return_token_ids": True,
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "max_tokens": 1,
        "max_completion_tokens": 1,
    },
    "completions": {
        "model": "policy",
        "prompt": [[5, 6, 7]],
        **_SAMPLING,
        "n": 2,
        "best_of": 2,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "logprobs": 0,
        "echo": False,
        "return_token_ids": True,
        "suffix": None,
        "max_tokens": 1,
    },
    "responses": {
        "model": "policy",
        "instructions": "be",
        "input": _ITEMS,
        "tools": [
            {
                "type": "function",
                "name": "search",
                "description": "d",
                "parameters": _SCHEMA,
                "strict": False,
            }
        ],
        "tool_choice": "auto",
        **_SAMPLING,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None},
        "include": ["message.output_text.logprobs"],
        "store": True,
        "metadata": {"a": "b"},
        "truncation": "disabled",
        "previous_response_id": None,
        "max_output_tokens": 1,
    },
    "messages": {
        **_MESSAGES,
        **_SAMPLING,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "max_tokens": 1,
    },
    "messages/count_tokens": _MESSAGES,
    "embeddings": {
        "model": "hosted",
        "input": ["a", "b"],
        "encoding_format": "float",
        "dimensions": 2,
        "user": "u",
    },
}
REQUIRED = frozenset({"model", "messages", "input", "prompt", "max_tokens", "max_output_tokens"})

_WORDS = sorted(
    {
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "parameters",
        "input",
        "id",
        "q",
    }
    | {
        "user",
        "assistant",
        "system",
        "tool",
        "tool_use",
        "tool_result",
        "image_url",
        "json_schema",
        "message",
        "none",
    }
    | {"", "a\x00b", "👩‍👩‍👧‍👦", "{}", "\u2028"}
)
_NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.sampled_from(_WORDS) | st.text(max_size=8)
ANY_JSON = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(_WORDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)


@st.composite
def requests(draw: st.DrawFn, endpoint: str, model: str | None = None) -> dict[str, Any]:
    """The full request, or a part of it, with any JSON value in one or two places of it, however
    deep."""
    full = FULL_REQUESTS[endpoint]
    if draw(st.booleans()):
        full = {
            name: value for name, value in full.items() if name in REQUIRED or draw(st.booleans())
        }
    places = list(_places(full))
    for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True)):
        full = _replaced(full, place, draw(ANY_JSON))
    return full if model is None else {**full, "model": model}


def _places(value: Any, place: Path = ()) -> Iterator[Path]:
    if place:
        yield place
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield from _places(one, (*place, key))


def _replaced(value: Any, place: Path, new: Any) -> Any:
    """The value with `new` at a place; as it was where an earlier replacement took that place
    away."""
    if not place:
        return new
    key, *rest = place
    if isinstance(value, dict) and key in value:
        return value | {key: _replaced(value[key], tuple(rest), new)}
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return [*value[:key], _replaced(value[key], tuple(rest), new), *value[key + 1 :]]
    return value
