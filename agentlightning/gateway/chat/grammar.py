"""What an answer must be where a call insists: a JSON value, or calls of its tools in the model's
own format.

Knows schemas, formats of calls and tokenizers; which tokens may come next is llguidance's to say.
No sampling, no HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakValueDictionary

import msgspec

from agentlightning.data.token_bytes import TokenBytes
from agentlightning.gateway.admission import LARGEST_GRAMMAR, forces_a_call
from agentlightning.gateway.backend import UNSUPPORTED, ModelCall
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.text import BEGIN, END, TOOL_FORMATS, ToolFormat
from agentlightning.gateway.generation import Masks
from agentlightning.gateway.request import CallRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# between the parts of a JSON value: unbounded, some small models write nothing else
_SPACE: Final = "[ \\n]{0,24}"
# 5 MB a choice; what else the library bounds keeps a mask to tens of milliseconds
_LEXER_STATES: Final = 10_000
# for one value together: with each the library takes twice as long, with 12 over a second
_MOST_PATTERNS: Final = 8
_NOT_BINDING: Final = frozenset(
    {"$ref", "$defs", "definitions", "default", "deprecated", "description", "examples", "title"}
)
_AT_ONCE: Final = 4  # grammars, each of another session


@dataclass(frozen=True)
class Form:
    """An answer of the JSON `schema`, or calls of `tools` (name, schema of the arguments) in a
    `format`; either, where both are given. There is more than one call only with `many`. `field` is
    the request field that asks for it."""

    field: str
    schema: Any = None
    tools: tuple[tuple[str, Any], ...] = ()
    format: ToolFormat | None = None
    many: bool = True

    def structural_tag(self) -> dict[str, Any]:
        """As servers read it (xgrammar's structural tags)."""
        ways = [] if self.schema is None else [_tagged(self.schema)]
        if (form := self.format) is not None:
            calls: dict[str, Any] = {
                "type": "tags_with_separator",
                "separator": form.between,
                "at_least_one": True,
            }
            calls["stop_after_first"] = not (self.many and form.between)
            calls["tags"] = [
                {
                    "type": "tag",
                    "begin": form.begin(name),
                    "content": _tagged(schema),
                    "end": form.back,
                }
                for name, schema in self.tools
            ]
            ways.append(calls)
        return {
            "type": "structural_tag",
            "format": {"type": "or", "elements": ways} if len(ways) > 1 else ways[0],
        }

    def lark(self, thinks: str) -> str:
        """As llguidance reads it. A model that `may` or `must` think does so before it answers."""
        rules = [] if self.schema is None else [f"json: {_json(self.schema)}"]
        answer = "json"
        if (form := self.format) is not None:
            answer = "calls" if self.schema is None else "(json | calls)"
            more = f"({json.dumps(form.between)} call)*" if self.many and form.between else ""
            rules.append(f"calls: call {more}")
            rules.append(
                "call: " + " | ".join(f"call{number}" for number in range(len(self.tools)))
            )
            for number, (name, schema) in enumerate(self.tools):
                # tools promise no more, unless they are strict
                content = _json(schema, lenient=True)
                rules.append(
                    f"call{number}: {json.dumps(form.begin(name))} {content} "
                    f"{json.dumps(form.back)}"
                )
        if thinks != "no":
            rules += [f"thought[suffix={json.dumps(END)}]: /(?s:.*)/", "space: /\\n{0,2}/"]
            answer = (
                f"thought space {answer}"
                if thinks == "must"
                else f"({json.dumps(BEGIN)} thought space)? {answer}"
            )
        return "\n".join([f"start: {answer}", *rules])


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any]


class _JsonFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: _JsonSchema


def form_of(call: ModelCall, tool_format: str | None) -> Form | None:
    """What the call insists on, None where it is free. CallRefused (400) for what is no form, or of
    another format."""
    response_format = call.extra.get("response_format") or {"type": "text"}
    schema = None
    if response_format == {"type": "json_object"}:
        schema = {"type": "object"}
    elif response_format != {"type": "text"}:
        try:
            schema = msgspec.convert(response_format, _JsonFormat).json_schema.schema
        except msgspec.ValidationError as error:
            _refuse("response_format", f"it is not that of OpenAI's chat completions: {error}")
    choice = call.tool_choice
    forced = forces_a_call(call.tool_choice)
    if schema is None and not forced:
        return None
    functions = (
        []
        if choice == "none" or call.prompt is not None
        else [tool["function"] for tool in call.tools]
    )
    if forced and choice != "required":
        functions = [
            tool
            for tool in functions
            if choice == {"type": "function", "function": {"name": tool["name"]}}
        ]
    if forced and not functions:
        _refuse("tool_choice", "it names none of the tools")
    return Form(
        field="tool_choice" if forced else "response_format",
        schema=None if forced else schema,
        tools=tuple(
            (tool["name"], {"type": "object", **(tool.get("parameters") or {})})
            for tool in functions
        ),
        format=TOOL_FORMATS[tool_format] if functions and tool_format else None,
        many=not isinstance(choice, dict) and call.extra.get("parallel_tool_calls") is not False,
    )


class Grammars:
    """Makes forms into grammars of one model, in threads. A hostile one takes most of a second, so
    that each session has one made at a time and does not hold up the others."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grammars")
        self._turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()

    async def masks(self, form: Form, thinks: str, session: str | None = None) -> Masks:
        """Of a new answer. CallRefused (400) says what cannot be enforced."""
        turn = self._turns.setdefault(session, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._masks, form, thinks
            )

    def _masks(self, form: Form, thinks: str) -> Masks:
        from llguidance import LLMatcher, LLParserLimits

        several = max(
            map(_conjoined_patterns, (form.schema, *(schema for _, schema in form.tools)))
        )
        if several > _MOST_PATTERNS:
            _refuse(
                form.field,
                f"one value must match {several} patterns, and {_MOST_PATTERNS} are the limit",
            )
        try:
            grammar = form.lark(thinks)
        except RecursionError:
            _refuse(form.field, "it is nested too deeply")
        if len(grammar) > LARGEST_GRAMMAR:
            _refuse(
                form.field,
                f"its grammar has {len(grammar):,} bytes, and {LARGEST_GRAMMAR:,} are the limit",
            )
        limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        return _Masks(matcher, form.field)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        vocabulary: Any = _Vocabulary(self._chat)
        return LLTokenizer(vocabulary, eos_token=sorted(self._chat.stop_token_ids))


class _Masks:
    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._look()

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._look()

    def _look(self) -> None:
        self.allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            reason = "no value fits the schema" if reason.startswith("NoExtension") else reason
            _refuse(self._field, re.sub(r"^at \d+\(\d+\): ", "", reason))


class _Vocabulary:
    """A tokenizer as llguidance wants it; it also encodes the text that a grammar leaves no choice
    about."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, chat: ChatTemplate) -> None:
        self._tokenizer = tokenizer = chat.tokenizer
        self.eos_token_id = min(chat.stop_token_ids)
        hidden = chat.token_bytes.hidden_ids.difference(map(tokenizer.token_to_id, (BEGIN, END)))
        self.special_token_ids = sorted(hidden | chat.stop_token_ids)
        self.tokens = [
            _written(chat.token_bytes, number) for number in range(tokenizer.get_vocab_size())
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _written(token_bytes: TokenBytes, token_id: int) -> bytes:
    """What a token adds to a text, anywhere but at its beginning."""
    if token_bytes.exact:
        return token_bytes[token_id]
    piece = token_bytes.tokenizer.id_to_token(token_id) or ""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()


def _conjoined_patterns(schema: Any) -> int:
    """How many patterns and formats one value may have to match at once, at most: all different
    ones, where `allOf` or something beside a `$ref` joins any."""
    nodes = [schema]
    patterns = set[str]()
    joined = False
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            patterns.update(
                node[key] for key in ("pattern", "format") if isinstance(node.get(key), str)
            )
            joined |= "allOf" in node or ("$ref" in node and bool(node.keys() - _NOT_BINDING))
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return len(patterns) if joined else 0


def _json(schema: Any, *, lenient: bool = False) -> str:
    """`lenient`, keywords that llguidance does not know are left out."""
    guidance = {"whitespace_pattern": _SPACE, "lenient": lenient}
    return "%json " + msgspec.json.encode({**schema, "x-guidance": guidance}).decode()


def _tagged(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _refuse(field: str, why: str) -> NoReturn:
    raise CallRefused(f"{field} cannot be enforced: {why}", code=UNSUPPORTED, param=field)
