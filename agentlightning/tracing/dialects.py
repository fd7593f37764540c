"""Reads one span in the attribute names of OpenTelemetry's gen_ai, OpenInference, Traceloop or Agent Lightning.

It sees each span alone; `tracing.steps` reads how spans belong together.
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from agentlightning import semconv
from agentlightning.tracing.attributes import listed, nested
from agentlightning.types import Span

Kind: TypeAlias = Literal["call", "tool", "agent", "other"]

_KINDS: Final[dict[str, Kind]] = {
    "chat": "call",
    "text_completion": "call",
    "generate_content": "call",
    "completion": "call",
    "LLM": "call",
    "execute_tool": "tool",
    "TOOL": "tool",
    "tool": "tool",
    "invoke_agent": "agent",
    "AGENT": "agent",
    "agent": "agent",
}
_RANK: Final[tuple[Kind, ...]] = ("other", "call", "agent", "tool")  # of a span that two vocabularies call differently
_KIND_NAMES: Final = (
    semconv.GEN_AI_OPERATION,
    "openinference.span.kind",
    "traceloop.span.kind",
    "llm.request.type",  # Traceloop's, on spans of models
)
_TOOL_NAMES: Final = ("gen_ai.tool.name", "tool.name", "tool_call.function.name")
_AGENT_NAMES: Final = (semconv.GEN_AI_AGENT_NAME, "agent.name", "graph.node.id", "traceloop.entity.name")
MODEL_NAMES: Final = (semconv.GEN_AI_RESPONSE_MODEL, semconv.GEN_AI_REQUEST_MODEL, "llm.model_name")
_NAMES: Final[dict[Kind, tuple[str, ...]]] = {
    "call": MODEL_NAMES,
    "tool": (*_TOOL_NAMES, "traceloop.entity.name"),
    "agent": _AGENT_NAMES,
    "other": (),
}
_ARGUMENTS: Final = ("gen_ai.tool.call.arguments", "input.value", "traceloop.entity.input", semconv.OPERATION_INPUT)
_RESULTS: Final = ("gen_ai.tool.call.result", "output.value", "traceloop.entity.output", semconv.OPERATION_OUTPUT)
_METHOD: Final = re.compile(r"\.(?:run|__call__|acall|forward|aforward)$")  # smolagents and DSPy name spans by it
_ARRAY: Final = re.compile(r"\s*\[\s*")
_decoder: Final = json.JSONDecoder()
_PRIVATE: Final = re.compile(r"\._[a-z]")
_DSPY: Final = "openinference.instrumentation.dspy"
# Modules of DSPy's own; those that name an agent are the program's.
_DSPY_MODULES: Final = re.compile(
    r"(BestOfN|ChainOfThought|CodeAct|Flex|Module|MultiChainComparison|Predict|ProgramOfThought|ReAct|ReActV2|Refine|RLM)\b"
)
_LONGEST_DICT: Final = 10_000  # characters, as Python writes it
_LANGCHAIN: Final = "traceloop.association.properties."
_PREBUILT_NODES: Final = ("model", "agent", "tools")  # of every agent that LangChain builds: these name nobody


def is_gateway_call(span: Span) -> bool:
    return span.tokens is not None or semconv.CALL_ENDPOINT in span.attributes


def speaks_for_gateway(span: Span) -> bool:
    """Whether it has attributes that only the gateway may write."""
    return span.tokens is not None or any(name.startswith(semconv.CALL) for name in (span.name, *span.attributes))


def kind_of(span: Span) -> Kind:
    if is_gateway_call(span):
        return "call"
    values = (span.attributes.get(name) for name in _KIND_NAMES)
    kinds: list[Kind] = [_KINDS[value] for value in values if isinstance(value, str) and value in _KINDS]
    if scope_of(span) == _DSPY and span.name.endswith("forward"):
        return "other" if _DSPY_MODULES.match(span.name) else "agent"
    if kinds == ["call"] and _PRIVATE.search(span.name):
        return "other"  # LlamaIndex reports what prepares a call like one
    if kinds:
        return max(kinds, key=_RANK.index) if len(kinds) > 1 else kinds[0]
    if text_of(span, *_TOOL_NAMES):
        return "tool"
    return "agent" if _langchain(span, "lc_agent_name") == span.name else "other"


def name_of(span: Span, kind: Kind) -> str:
    """The name of the tool, agent or model, or else of the span."""
    return text_of(span, *_NAMES[kind]) or (_plain_name(span) if kind in ("tool", "agent") else span.name)


def scope_of(span: Span) -> str | None:
    """The instrumentation that recorded it."""
    return text_of(span, "otel.scope.name")


def names_agent(span: Span, kind: Kind) -> str | None:
    """The agent that the contents of this span, of that kind, belong to, if the span names it.

    A call's own `gen_ai.agent.name` is ignored: some instrumentation writes one constant for all agents, and the
    gateway writes the harness's name, which a span around the call knows better."""
    if is_gateway_call(span):
        return None
    if kind == "agent":
        # OpenTelemetry calls the span of an agent after the operation, others after the agent.
        return text_of(span, *_AGENT_NAMES) or (
            None if semconv.GEN_AI_OPERATION in span.attributes else _plain_name(span)
        )
    if name := _langchain(span, "lc_agent_name"):
        return name
    # `writer:6f…|model:9c…` is the node of a graph within the node `writer`.
    path = _langchain(span, "langgraph_checkpoint_ns") or _langchain(span, "langgraph_node") or ""
    node = path.split("|")[0].split(":")[0]
    return node if node not in ("", *_PREBUILT_NODES) else None


def arguments_of(span: Span) -> str | None:
    return first_text(span, *_ARGUMENTS)


def result_of(span: Span) -> str | None:
    return first_text(span, *_RESULTS)


def first_text(span: Span, *names: str) -> str | None:
    """The first of these attributes that exists: text unchanged, anything else as JSON.

    An operation's input and output may be spread over attributes below their names, as in Agent Lightning 0.3."""
    value = next((found for name in names if (found := span.attributes.get(name)) is not None), None)
    if value is None and span.name == semconv.OPERATION:
        value = next((listed(found) for name in names if (found := nested(span.attributes, name))), None)
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def content_of(result: str | None) -> str | None:
    """A tool's own output, without the wrapping of LangChain, google-adk or LlamaIndex."""
    body = unwrapped(result)
    if "tool_call_id" in body and isinstance(body.get("content"), str):
        return body["content"]
    inner = body["response"] if body.keys() >= {"name", "response"} else body
    inner = inner["raw_output"] if inner is body and body.keys() >= {"raw_output", "is_error"} else inner
    inner = inner["result"] if isinstance(inner, dict) and inner.keys() == {"result"} else inner
    return result if inner is body else inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)


def unwrapped(result: object) -> dict[str, Any]:
    """A result's JSON object, or LangChain's message in it; also a dict written as Python."""
    if result is None or (isinstance(result, str) and not result.lstrip().startswith("{")):
        return {}  # most results are plain text, which an exception is a dear way to find out
    body = mapping(_json_or_dict(result) if isinstance(result, str) else result)
    for wrapper in ("output", "data", "kwargs"):  # its messages are serialised in two ways
        inner = mapping(body.get(wrapper))
        body = inner if "tool_call_id" in inner or "kwargs" in inner else body
    return body


def text_of(span: Span, *names: str) -> str | None:
    """The first of these attributes that is a non-empty text."""
    for name in names:
        value = span.attributes.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def json_of(text: str | None) -> Any:
    """Decoded JSON; None for anything else, such as texts that were cut to fit."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(text)  # slower, and takes the NaN that Python writes
    except (ValueError, RecursionError):
        return None


def first_item(array: str) -> Any:
    """The first item of a JSON array, without reading the rest. None if there is none."""
    begin = _ARRAY.match(array)
    try:
        return _decoder.raw_decode(array, begin.end())[0] if begin else None
    except (ValueError, RecursionError):
        return None


def _json_or_dict(text: str) -> Any:
    """Decoded JSON, or a dict written as Python, as some frameworks do."""
    if (value := json_of(text)) is None and len(text) <= _LONGEST_DICT:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(text.strip())
    return value


def mapping(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """`value` if it is a JSON array, else an empty one."""
    return cast(list[Any], value) if isinstance(value, list) else []


def texts(content: object, *, others: bool = False) -> list[str]:
    """The texts in a message's content, which is one text or parts; with `others`, `[image_url]` and the like too."""
    if isinstance(content, str):
        return [content]
    parts = [mapping(part) for part in items(content)]
    found = [part.get("text") or (others and f"[{part.get('type', 'part')}]") for part in parts]
    return [text for text in found if isinstance(text, str)]


def joined(content: object) -> str:
    return "".join(texts(content))


def _plain_name(span: Span) -> str:
    return _METHOD.sub("", span.name)


def _langchain(span: Span, key: str) -> str | None:
    if "metadata" in span.attributes:
        value = mapping(json_of(text_of(span, "metadata"))).get(key)
        if isinstance(value, str):
            return value
    return text_of(span, _LANGCHAIN + key)
