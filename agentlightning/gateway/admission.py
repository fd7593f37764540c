"""Admits fields of an agent's request to our own engines: an allow-list.

Agents are not trusted, and constrained sampling would be trained as if the policy had chosen it.
Hints are dropped and noted in the span; in training, the form of an answer is a hint too. Elsewhere
it is sent, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agentlightning.gateway.request import NEUTRAL_PENALTIES, CallRefused, CallRequest

_PROMPT: Final = frozenset(
    {
        "chat_template_kwargs",
        "reasoning_effort",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""They change the prompt, which is recorded as it was rendered."""
_MEANT: Final = frozenset({"response_format", "structured_outputs"})
"""They constrain what is sampled, and an answer without them would be another."""
# bytes as JSON; a server compiles it between the tokens of others
LARGEST_GRAMMAR: Final = 64 * 1024
_UNTRAINED: Final = frozenset(
    {"allowed_token_ids", "bad_words", "ignore_eos", "include_reasoning"}
    | {"min_tokens", "stop_token_ids", "thinking_token_budget"}
)
"""What else a model that is not trained is sent."""
_TEMPLATE_VARIABLES: Final = frozenset(
    {"clear_thinking", "custom_instructions", "date_string", "enable_thinking", "preserve_thinking"}
    | {"reasoning_effort", "thinking", "thinking_budget", "thinking_mode"}
)
"""Of `chat_template_kwargs`, which servers also hand to the function that renders."""
_FUNCTION: Final = frozenset({"name", "description", "parameters"})
_EMBEDDED: Final = frozenset({"model", "input", "dimensions", "encoding_format"})
_REFUSED: Final[Mapping[str, tuple[Any, str]]] = {
    "functions": ([], "send tools"),
    "function_call": ("none", "send tool_choice"),
    "modalities": (["text"], "answers are text"),
    "audio": (None, "answers are text"),
    "web_search_options": (None, "nothing is searched here; offer a tool"),
    "suffix": ("", "a prompt is continued at its end"),
}
"""What cannot be honoured: the value that asks for nothing, and what to do."""
_GUIDED: Final = "guided_"  # vLLM knew such fields until 0.12
_FREE: Final[Mapping[str, Any]] = {
    **NEUTRAL_PENALTIES,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
"""Values that ask for nothing."""
_INERT: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "thinking",
    }
)


def admit(request: CallRequest, *, trained: bool, training: bool) -> tuple[CallRequest, list[str]]:
    """(the fields that an engine gets of a request, the names of those it does not get). The model
    is `trained` or not; in `training` it learns from the answer.

    CallRefused (400) names a field that cannot be honoured and would change the meaning of the
    answer."""
    sent = (
        _PROMPT | (frozenset() if training else _MEANT) | (frozenset() if trained else _UNTRAINED)
    )
    extra: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in request.extra.items():
        nothing, instead = _REFUSED.get(name, (value, ""))
        if value != nothing or name.startswith(_GUIDED):
            instead = instead or "send response_format"
            raise CallRefused(
                f"{name} is not supported: {instead}", code="unsupported_parameter", param=name
            )
        if name == "chat_template_kwargs" and isinstance(value, dict):
            extra[name] = {key: item for key, item in value.items() if key in _TEMPLATE_VARIABLES}
            dropped += [f"{name}.{key}" for key in value if key not in _TEMPLATE_VARIABLES]
        elif name in sent & _MEANT and len(msgspec.json.encode(value)) > LARGEST_GRAMMAR:
            limit = f"{name} may have {LARGEST_GRAMMAR:,} bytes"
            raise CallRefused(
                f"{limit}: larger ones hold up every other call", code="invalid_request", param=name
            )
        elif name in sent and value != _FREE.get(name):
            extra[name] = value
        elif name not in _REFUSED and (
            name not in _FREE or (name in _MEANT and value != _FREE[name])
        ):
            dropped.append(name)
    tools = request.tools
    if trained and tools:
        tools = [
            {"type": "function", "function": _function(tool["function"], dropped)} for tool in tools
        ]
    tool_choice = request.tool_choice
    if training and forces_a_call(tool_choice):
        tool_choice = None
        dropped.append("tool_choice")
    # Where calls are sampled freely, the agent gets the first alone.
    one_tool_call = request.extra.get("parallel_tool_calls") is False
    if one_tool_call and (forces_a_call(tool_choice) or not _MEANT.isdisjoint(extra)):
        extra["parallel_tool_calls"] = False
    admitted = msgspec.structs.replace(request, extra=extra, tools=tools, tool_choice=tool_choice)
    return admitted, sorted(set(dropped))


def _function(function: Mapping[str, Any], dropped: list[str]) -> dict[str, Any]:
    """The function without `strict`, which makes servers constrain the arguments."""
    dropped += [f"tools.{name}" for name in function if name not in _FUNCTION]
    return {name: value for name, value in function.items() if name in _FUNCTION}


def admit_relayed(fields: dict[str, msgspec.Raw]) -> tuple[dict[str, msgspec.Raw], list[str]]:
    """The fields of a request for embeddings that an engine gets, and the names of the others."""
    embedded = {name: value for name, value in fields.items() if name in _EMBEDDED}
    return embedded, [name for name in fields if name not in embedded]


def forces_a_call(tool_choice: Any) -> bool:
    return tool_choice not in (None, "none", "auto")


def leaves_sampling_free(
    extra: Mapping[str, Any], tools: list[dict[str, Any]], tool_choice: Any
) -> bool:
    """Whether an answer with these fields comes from the policy's own distribution. Unknown fields
    count as no."""
    if forces_a_call(tool_choice):
        return False
    free = all(name in _PROMPT or asks_for_nothing(name, value) for name, value in extra.items())
    return free and not any(tool["function"].get("strict") for tool in tools)


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether the answer is the same with and without this field."""
    return name in _INERT or (name in _FREE and value == _FREE[name])
