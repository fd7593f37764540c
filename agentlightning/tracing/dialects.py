"""Reads one span in the attribute names of OpenTelemetry's gen_ai, Agent Lightning and other tools:
what it is, the messages and tokens of a call, and whether a tool failed.

It sees each span alone; `tracing.steps` reads how spans belong together. Messages come out in the
form of chat completions: `{"role": …, "content": …, "tool_calls": […]}` (`tracing.message_forms`).

| dialect | messages | tokens |
|---|---|---|
| ours, OpenTelemetry | `gen_ai.input.messages` as JSON: `content` or `parts` | `gen_ai.usage.*` |
| OpenInference | `llm.input_messages.0.message.role` … | `llm.token_count.*` |
| Traceloop | `gen_ai.prompt.0.role`, `gen_ai.completion.0.role` … | `gen_ai.usage.*` |
| Langfuse | `langfuse.observation.input`, `….output` | `….usage_details` |
| Vercel AI SDK | `ai.prompt.messages`, `ai.response.text`, `….toolCalls` | `ai.usage.*` |
| LangSmith | `gen_ai.prompt`, `gen_ai.completion` as JSON | `gen_ai.usage.*` |
| MLflow | `mlflow.spanInputs`, `mlflow.spanOutputs` as JSON | `mlflow.chat.tokenUsage` |
| Logfire | `events` as JSON | `gen_ai.usage.*` |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

from agentlightning import semconv
from agentlightning.tracing.attributes import listed, nested
from agentlightning.tracing.message_forms import (
    Said,
    as_text,
    decoded,
    entries,
    items,
    json_of,
    mapping,
    messages_in,
    of_entries,
    of_parts,
    said_in_events,
)
from agentlightning.types import Attributes, Span

Kind: TypeAlias = Literal["call", "tool", "agent", "other"]

_KINDS: Final[dict[str, Kind]] = {
    "chat": "call",
    "text_completion": "call",
    "generate_content": "call",
    "completion": "call",
    "LLM": "call",
    "llm": "call",
    "CHAT_MODEL": "call",
    "generation": "call",
    "ai.generateText.doGenerate": "call",
    "ai.streamText.doStream": "call",
    "ai.generateObject.doGenerate": "call",
    "ai.streamObject.doStream": "call",
    "execute_tool": "tool",
    "TOOL": "tool",
    "tool": "tool",
    "ai.toolCall": "tool",
    "invoke_agent": "agent",
    "AGENT": "agent",
    "agent": "agent",
}
# of a span that two vocabularies call differently
_RANK: Final[tuple[Kind, ...]] = ("other", "call", "agent", "tool")
_KIND_NAMES: Final = (
    semconv.GEN_AI_OPERATION,
    "openinference.span.kind",
    "traceloop.span.kind",
    "llm.request.type",  # Traceloop's, on spans of models
    "langfuse.observation.type",
    "ai.operationId",
    "langsmith.span.kind",
    "mlflow.spanType",
)
_TOOL_NAMES: Final = (
    "gen_ai.tool.name",
    "tool.name",
    "tool_call.function.name",
    "ai.toolCall.name",
)
_AGENT_NAMES: Final = (
    semconv.GEN_AI_AGENT_NAME,
    "agent.name",
    "graph.node.id",
    "traceloop.entity.name",
)
MODEL_NAMES: Final = (
    semconv.GEN_AI_RESPONSE_MODEL,
    semconv.GEN_AI_REQUEST_MODEL,
    "llm.model_name",
    "langfuse.observation.model.name",
    "ai.response.model",
    "ai.model.id",
    "langsmith.metadata.ls_model_name",
    "mlflow.llm.model",
)
# The input and output of a span of any kind, as JSON or text; those of a call hold its messages.
_WHOLE_INPUTS: Final = (
    "langfuse.observation.input",
    "ai.prompt.messages",
    "ai.prompt",
    "gen_ai.prompt",
    "mlflow.spanInputs",
)
_WHOLE_OUTPUTS: Final = ("langfuse.observation.output", "gen_ai.completion", "mlflow.spanOutputs")
_NAMES: Final[dict[Kind, tuple[str, ...]]] = {
    "call": MODEL_NAMES,
    "tool": (*_TOOL_NAMES, "traceloop.entity.name"),
    "agent": _AGENT_NAMES,
    "other": (),
}
INPUTS: Final = ("input.value", "traceloop.entity.input", semconv.OPERATION_INPUT, *_WHOLE_INPUTS)
_ARGUMENTS: Final = ("gen_ai.tool.call.arguments", "ai.toolCall.args", *INPUTS)
_RESULTS: Final = (
    "gen_ai.tool.call.result",
    "ai.toolCall.result",
    "output.value",
    "traceloop.entity.output",
    semconv.OPERATION_OUTPUT,
    *_WHOLE_OUTPUTS,
)
# smolagents and DSPy name spans by it
_METHOD: Final = re.compile(r"\.(?:run|__call__|acall|forward|aforward)$")
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
# of every agent that LangChain builds: these name nobody
_PREBUILT_NODES: Final = ("model", "agent", "tools")


def is_gateway_call(span: Span) -> bool:
    return span.tokens is not None or semconv.CALL_ENDPOINT in span.attributes


def speaks_for_gateway(span: Span) -> bool:
    """Whether it has attributes that only the gateway may write."""
    return span.tokens is not None or any(
        name.startswith(semconv.CALL) for name in (span.name, *span.attributes)
    )


def kind_of(span: Span) -> Kind:
    if is_gateway_call(span):
        return "call"
    kinds = _named_kinds(span.attributes)
    if scope_of(span) == _DSPY and span.name.endswith("forward"):
        return "other" if _DSPY_MODULES.match(span.name) else "agent"
    if kinds == ["call"] and _PRIVATE.search(span.name):
        return "other"  # LlamaIndex reports what prepares a call like one
    if kinds:
        return max(kinds, key=_RANK.index) if len(kinds) > 1 else kinds[0]
    if text_of(span, *_TOOL_NAMES):
        return "tool"
    return "agent" if _langchain(span, "lc_agent_name") == span.name else "other"


def _named_kinds(attributes: Attributes) -> list[Kind]:
    """The kinds that each vocabulary names; MLflow's texts are JSON."""
    values = (attributes.get(name) for name in _KIND_NAMES)
    words = (value.strip('"') for value in values if isinstance(value, str))
    return [_KINDS[word] for word in words if word in _KINDS]


def name_of(span: Span, kind: Kind) -> str:
    """The name of the tool, agent or model, or else of the span."""
    return text_of(span, *_NAMES[kind]) or (
        _plain_name(span) if kind in ("tool", "agent") else span.name
    )


def scope_of(span: Span) -> str | None:
    """The instrumentation that recorded it."""
    return text_of(span, "otel.scope.name")


def names_agent(span: Span, kind: Kind) -> str | None:
    """The agent that the contents of this span, of that kind, belong to, if the span names it.

    A call's own `gen_ai.agent.name` is ignored: some instrumentation writes one constant for all
    agents, and the gateway writes the harness's name, which a span around the call knows better."""
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

    An operation's input and output may be spread over attributes below their names, as in Agent
    Lightning 0.3."""
    value = next(
        (found for name in names if (found := span.attributes.get(name)) is not None), None
    )
    if value is None and span.name == semconv.OPERATION:
        value = next(
            (listed(found) for name in names if (found := nested(span.attributes, name))), None
        )
    return (
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def content_of(result: str | None) -> str | None:
    """A tool's own output, without the wrapping of LangChain, google-adk or LlamaIndex."""
    body = unwrapped(result)
    if "tool_call_id" in body and isinstance(body.get("content"), str):
        return body["content"]
    inner = body["response"] if body.keys() >= {"name", "response"} else body
    inner = (
        inner["raw_output"]
        if inner is body and body.keys() >= {"raw_output", "is_error"}
        else inner
    )
    inner = inner["result"] if isinstance(inner, dict) and inner.keys() == {"result"} else inner
    if inner is body:
        return result
    return inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)


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


def texts(content: object, *, others: bool = False) -> list[str]:
    """The texts in a message's content, which is one text or parts; with `others`, `[image_url]`
    and the like too."""
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


# --- messages and tokens of a call ----------------------------------------------------------------

_INPUT_TOKENS: Final = (
    semconv.GEN_AI_INPUT_TOKENS,
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
    "ai.usage.inputTokens",
    "ai.usage.promptTokens",
)
_OUTPUT_TOKENS: Final = (
    semconv.GEN_AI_OUTPUT_TOKENS,
    "gen_ai.usage.completion_tokens",
    "llm.token_count.completion",
    "ai.usage.outputTokens",
    "ai.usage.completionTokens",
)
_USAGES: Final = ("langfuse.observation.usage_details", "mlflow.chat.tokenUsage")  # as JSON


def input_messages(attributes: Attributes) -> list[dict[str, Any]]:
    """The messages sent to the model; empty if the span has none."""
    found = _messages(
        attributes, semconv.GEN_AI_INPUT_MESSAGES, "llm.input_messages", "gen_ai.prompt"
    )
    if found or "call" not in _named_kinds(attributes):
        return found
    whole = (messages_in(decoded(attributes.get(name)), "user") for name in _WHOLE_INPUTS)
    return next(filter(None, whole), None) or _said_in_logfire(attributes).sent


def output_messages(attributes: Attributes) -> list[dict[str, Any]]:
    """The model's answer, one message per choice; empty if the span has none."""
    found = _messages(
        attributes, semconv.GEN_AI_OUTPUT_MESSAGES, "llm.output_messages", "gen_ai.completion"
    )
    if found or "call" not in _named_kinds(attributes):
        return found
    whole = (messages_in(decoded(attributes.get(name)), "assistant") for name in _WHOLE_OUTPUTS)
    answer = {
        name: attributes.get(f"ai.response.{name}") for name in ("text", "object", "toolCalls")
    }
    if any(answer.values()):
        content = answer["text"] or answer["object"]
        return messages_in(
            {"role": "assistant", "content": content, "tool_calls": answer["toolCalls"]},
            "assistant",
        )
    return next(filter(None, whole), None) or _said_in_logfire(attributes).answered


def event_messages(span: Span) -> Attributes:
    """The messages that a call's span has in its events, under the names of attributes; empty if
    its attributes have messages, or its events none."""
    if not span.events or semconv.GEN_AI_INPUT_MESSAGES in span.attributes:
        return {}
    said = said_in_events((event.name, event.attributes) for event in span.events)
    names = (semconv.GEN_AI_INPUT_MESSAGES, semconv.GEN_AI_OUTPUT_MESSAGES)
    return {name: as_text(messages) for name, messages in zip(names, said, strict=True) if messages}


def _said_in_logfire(attributes: Attributes) -> Said:
    events = [mapping(event) for event in items(json_of(attributes.get("events")))]
    return said_in_events((str(event.get("event.name")), event) for event in events)


def model_name(attributes: Attributes) -> str | None:
    """The model that answered, or else the requested one."""
    for key in MODEL_NAMES:
        if isinstance(name := attributes.get(key), str) and name:
            return name.strip('"') if key.startswith("mlflow.") else name
    for key in ("mlflow.spanOutputs", "mlflow.spanInputs"):
        if isinstance(name := mapping(json_of(attributes.get(key))).get("model"), str):
            return name
    return None


def token_counts(attributes: Attributes) -> tuple[int, int] | None:
    """(tokens read, tokens written); None if the span has neither."""
    read, written = (_first_integer(attributes, names) for names in (_INPUT_TOKENS, _OUTPUT_TOKENS))
    if read is None and written is None:
        usage = next(
            (found for key in _USAGES if (found := mapping(json_of(attributes.get(key))))), {}
        )
        read = _first_integer(usage, ("input", "input_tokens", "prompt_tokens"))
        written = _first_integer(usage, ("output", "output_tokens", "completion_tokens"))
    return None if read is None and written is None else (read or 0, written or 0)


def finish_reasons(attributes: Attributes) -> list[str]:
    value = attributes.get(semconv.GEN_AI_FINISH_REASONS, ())
    if isinstance(value, str):  # some write the list as JSON
        return [str(reason) for reason in items(json_of(value))] or [value]
    return [str(reason) for reason in value] if isinstance(value, Sequence) else []


def content_text(content: object) -> str:
    """The text of a message's content, with the type of each part that has none (images); other
    values as JSON."""
    return (
        " ".join(texts(content, others=True))
        if isinstance(content, str | list)
        else as_text(content)
    )


def _first_integer(attributes: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((value for name in names if type(value := attributes.get(name)) is int), None)


def _messages(
    attributes: Attributes, as_json: str, openinference: str, traceloop: str
) -> list[dict[str, Any]]:
    text = attributes.get(as_json)
    if isinstance(text, str):
        value = json_of(text)
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else items(value)
        return [
            chat
            for message in messages
            if isinstance(message, dict)
            for chat in of_parts(mapping(message))
        ]
    numbered = [
        mapping(entry.get("message")) for entry in entries(nested(attributes, openinference))
    ]
    return [
        of_entries(entry) for entry in numbered or entries(nested(attributes, traceloop)) if entry
    ]
