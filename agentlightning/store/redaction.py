"""What of a span may be written: never a secret, the content of prompts and tools only if it is wanted, and in the end
whatever the user's own hook leaves.

This module knows spans and names of attributes. It does not know who sent a span or how it is stored. The input and
the metadata of rollouts are the user's, and are not looked at.
"""

from __future__ import annotations

import base64
import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec

from agentlightning import semconv
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.store.spans import Redact
from agentlightning.types import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanStatus

Capture: TypeAlias = Literal["full", "tokens", "off"]
"""`full`: everything but secrets. `tokens`: no content, but exact token ids and logprobs. `off`: not those either."""

REDACTED: Final = "[redacted]"
_LONG: Final = 2000  # characters
_REMEMBERED: Final = 1 << 24  # characters of conversations that may go on


def redaction(capture: Capture = "full", hook: Redact | None = None) -> Redact:
    """What is to be done to every span before anything of it is written.

    Secrets are removed in any case. `hook` sees what is left, last of all: it returns the span as it is to be stored,
    or None to drop it. An InvalidError names a hook that raises, returns something else or changes an id; nothing of
    the call is written then. ConfigError for another `capture`."""
    if capture not in get_args(Capture):
        raise ConfigError(f"capture is {capture!r}; it must be one of {', '.join(get_args(Capture))}")

    conversations = _Conversations()

    def redact(span: Span) -> Span | None:
        kept = span if capture == "full" else without_content(span, tokens=capture == "tokens")
        messages = kept.attributes.get(semconv.GEN_AI_INPUT_MESSAGES)
        # A JSON array where the gateway says so; a short one is looked at faster than it is compared.
        if isinstance(messages, str) and len(messages) >= _LONG and semconv.CALL_ENDPOINT in kept.attributes:
            clean = conversations.without_secrets(span.attempt_id, messages)
            rest = without_secrets(_with_messages(kept, ""))
            kept = _with_messages(rest, clean)
        else:
            kept = without_secrets(kept)
        return kept if hook is None else _hooked(hook, kept)

    return redact


def _with_messages(span: Span, messages: str) -> Span:
    attributes = {**span.attributes, semconv.GEN_AI_INPUT_MESSAGES: messages}
    return msgspec.structs.replace(span, attributes=attributes)


class _Conversations:
    """Removes secrets from the messages of calls, from each message once: where the messages of an attempt's last call
    are followed by others, only those are looked at."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, str]] = {}  # by attempt: messages as they came and as kept, both without `]`
        self._characters = 0
        self._lock = threading.Lock()  # large spans are prepared in threads

    def without_secrets(self, attempt_id: str, messages: str) -> str:
        came, kept = self._take(attempt_id)
        if came and messages.startswith(came + ","):
            kept += text_without_secrets(messages[len(came) :])
        else:
            kept = text_without_secrets(messages)
        self._take(attempt_id)  # of another call that was stored meanwhile
        with self._lock:
            self._latest[attempt_id] = messages[:-1], kept[:-1]
            self._characters += len(messages) - 1
            while self._characters > _REMEMBERED:
                self._characters -= len(self._latest.pop(next(iter(self._latest)))[0])
        return kept

    def _take(self, attempt_id: str) -> tuple[str, str]:
        with self._lock:
            came, kept = self._latest.pop(attempt_id, ("", ""))
            self._characters -= len(came)
        return came, kept


def _hooked(hook: Redact, span: Span) -> Span | None:
    name = f"the redaction hook {getattr(hook, '__qualname__', None) or repr(hook)}"
    try:
        result: Any = hook(span)
    except Exception as error:
        raise InvalidError(f"{name} failed on span {span.name!r}: {type(error).__name__}: {error}") from error
    if result is None:
        return None
    if not isinstance(result, Span):
        raise InvalidError(f"{name} returned a {type(result).__name__}; it must return a Span, or None to drop it")
    for field in ("rollout_id", "attempt_id", "span_id", "parent_id", "trace_id", "sequence_id"):
        if getattr(result, field) != getattr(span, field):
            raise InvalidError(f"{name} changed the {field} of span {span.name!r}; ids must stay as they are")
    return result


def _replaced(
    span: Span, attributes: Callable[[Attributes], Attributes], text: Callable[[str], str], description: str | None
) -> Span:
    """The span with `attributes` applied to all its attributes, and `text` to its names."""
    return msgspec.structs.replace(
        span,
        name=text(span.name),
        status=SpanStatus(status_code=span.status.status_code, description=description),
        attributes=attributes(span.attributes),
        events=tuple(
            SpanEvent(name=text(event.name), attributes=attributes(event.attributes), timestamp=event.timestamp)
            for event in span.events
        ),
        links=tuple(
            SpanLink(trace_id=link.trace_id, span_id=link.span_id, attributes=attributes(link.attributes))
            for link in span.links
        ),
        resource=attributes(span.resource),
    )


# --- secrets -----------------------------------------------------------------------------------------------------
#
# Whoever has a key of an attempt chooses what is read here: everything takes linear time. Each rule has a sign, a cheap
# pattern that any secret of its kind contains; a rule is applied only where its sign was seen. Quantifiers are
# possessive (`++`), so that nothing is read twice.

Rule: TypeAlias = Callable[[str], str]
Sign: TypeAlias = tuple[bytes, bool, Callable[[bytes], object]]
_CREDENTIAL: Final = (
    r"(?:authorization|cookie|(?:api|access|secret|private)[_-]?key|password|passwd|secret"
    r"|(?:access|refresh|auth|oauth|session|security|bearer|csrf|api|bot|github|gitlab|hf|slack)[_-]?token)"
)
_CREDENTIAL_NAME: Final = re.compile(rf"{_CREDENTIAL}(?:\.\d++)*+\Z", re.IGNORECASE)
_LONGEST_NAME: Final = 120  # of what is looked at of a name, from its end


def is_credential(name: str) -> bool:
    """Whether what has this name is secret by its name: `authorization`, `http.request.header.x-api-key`,
    `config.db_password`. Plain `token` is not: most tokens here are those of language models."""
    return _ends_as_credential(name[-_LONGEST_NAME:])


@functools.lru_cache(maxsize=1024)
def _ends_as_credential(name: str) -> bool:
    return _CREDENTIAL_NAME.search(name) is not None


def without_secrets(span: Span) -> Span:
    """The span with `[redacted]` for whatever a name says is a credential, and for whatever looks like a key within a
    text, JSON or not."""
    rules = _rules_for_span(span)
    if not rules:
        return span

    def clean(text: str) -> str:
        for rule in rules:
            text = rule(text)
        return text

    def cleaned(attributes: Attributes) -> Attributes:
        return {name: _value_without_secrets(name, value, clean) for name, value in attributes.items()}

    description = span.status.description
    return _replaced(span, cleaned, clean, description and clean(description))


def settings_without_secrets(value: Any) -> Any:
    """Settings or a command line without what is secret by its name, however deep."""
    if isinstance(value, list):  # of flags, perhaps: what follows one that names a credential is one
        items = cast("list[Any]", value)
        flags = [is_credential(one.lstrip("-")) if isinstance(one, str) and one[:2] == "--" else False for one in items]
        return [settings_without_secrets(one) for one, flag in zip(items, [False, *flags], strict=False) if not flag]
    if isinstance(value, str) and value.startswith("--") and is_credential(value.partition("=")[0].lstrip("-")):
        return value.partition("=")[0]
    if not isinstance(value, dict):
        return value
    named = cast("dict[str, Any]", value)
    return {name: settings_without_secrets(one) for name, one in named.items() if not is_credential(name)}


def text_without_secrets(text: str) -> str:
    """`Error 401: Bearer 8kd0…` → `Error 401: Bearer [redacted]`. Text that only resembles a key stays."""
    for rule in _rules_for(text.encode(errors="replace")):
        text = rule(text)
    return text


def _value_without_secrets(name: str, value: AttributeValue, clean: Callable[[str], str]) -> AttributeValue:
    if isinstance(value, bool):
        return value
    if is_credential(name):
        return REDACTED
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int | float):
        return value
    return [clean(item) if isinstance(item, str) else item for item in value]


_encoder: Final = msgspec.json.Encoder()


def _rules_for_span(span: Span) -> Sequence[Rule]:
    open_parts = (span.name, span.status.description, span.attributes, span.events, span.links, span.resource)
    try:
        return _rules_for(_encoder.encode(open_parts))
    except (TypeError, ValueError, RecursionError):
        return ()  # it cannot be stored, and is refused when that is tried


def _rules_for(data: bytes) -> Sequence[Rule]:
    """The rules whose signs are in a text. A sign is in small letters, or in capitals that are meant as such; it begins
    with one character, which is looked for at the speed of memory: most spans hold none, and this is all they cost."""
    small = data.lower()

    def holds(signs: Sequence[Sign]) -> bool:
        for first, capital, search in signs:
            text = data if capital else small
            if first in text and search(text) is not None:
                return True
        return False

    if not holds(_ANY_SIGN):
        return ()
    return [rule for signs, rule in _SIGNS_OF if holds(signs)]


def _basic(match: re.Match[str]) -> str:
    """`Basic` with something in base64 that is `user:password`; other words after "basic" are words."""
    try:
        decoded = base64.b64decode(match["key"] + "=" * (-len(match["key"]) % 4), validate=True).decode()
    except ValueError:
        return match[0]
    return f"{match['scheme']}{REDACTED}" if ":" in decoded else match[0]


# --- what is named a credential within a text ---

_NAME_ENDS: Final = {
    quote: re.compile(rf"{quote}(?<=[yYnNeEdDtT\\]{quote})\s*+:\s*+(?P<list>\[\s*+)?+(?P<row>\\*+)(?P<quote>[\"'])")
    for quote in "\"'"
}
"""The quote after a name, and what leads from there to its value."""
_NEXT_ITEM: Final = re.compile(r"\s*+,\s*+(?P<row>\\*+)(?P<quote>[\"'])")
_NAME: Final = re.compile(r"[\w.\-]++")
_ROWS: Final = (0, 1, 3)  # backslashes before each quote of JSON within JSON within JSON


def _without_named(text: str) -> str:
    """The text without the values in `"password": "…"` and `"set-cookie": ["…", "…"]`, also where it is JSON in JSON in
    JSON: there each quote has one or three backslashes before it."""
    for quote in _NAME_ENDS:
        text = _without_quoted(quote, text)
    return text


def _without_quoted(quote: str, text: str) -> str:
    pieces: list[str] = []
    done = 0
    find = _NAME_ENDS[quote].search
    match = find(text)
    while match is not None:
        row = _backslashes(text, match.start())
        if row != len(match["row"]) or row not in _ROWS or not _is_named(text, match.start() - row, row, quote):
            match = find(text, match.end() - 1)
            continue
        item: re.Match[str] | None = match
        end = match.end()
        while item is not None and len(item["row"]) == row:
            end = _end_of_value(text, item.end(), row, item["quote"])
            closing = "" if end < len(text) else "\\" * row + item["quote"]  # of what was cut off
            pieces += (text[done : item.end()], REDACTED, closing)
            done = end
            end = min(len(text), end + row + 1)
            item = _NEXT_ITEM.match(text, end) if match["list"] else None
        match = find(text, end)
    return "".join((*pieces, text[done:])) if pieces else text


def _is_named(text: str, end: int, row: int, quote: str) -> bool:
    """Whether a name of a credential ends at `end` that begins after as many backslashes and the quote."""
    begin = text.rfind(quote, max(0, end - _LONGEST_NAME), end)
    if begin < 0 or _backslashes(text, begin) != row:
        return False
    name = text[begin + 1 : end]
    return _NAME.fullmatch(name) is not None and _ends_as_credential(name)


def _backslashes(text: str, end: int) -> int:
    """How many there are before `end`; more than any name has before it count as one more."""
    return next((row for row in range(_ROWS[-1] + 1) if text[end - row - 1 : end - row] != "\\"), _ROWS[-1] + 1)


def _end_of_value(text: str, begin: int, row: int, quote: str) -> int:
    """Where a value ends: before its closing quote, with its backslashes, or where an outer text ends. Longer rows of
    backslashes, up to twice as many and one, are what the value escapes."""
    at = begin
    while (found := text.find(quote, at)) >= 0:
        length = found - at - len(text[at:found].rstrip("\\"))
        if length % (2 * row + 2) != 2 * row + 1:
            return found - min(length, row)
        at = found + 1
    return len(text)


# --- the rules ---

_WORD: Final = "[A-Za-z0-9_-]"


def _pattern(pattern: str, replacement: str | Callable[[re.Match[str]], str] = REDACTED) -> Rule:
    return functools.partial(re.compile(pattern).sub, replacement)


_MARKED: Final[Sequence[tuple[Sequence[str], Rule]]] = (
    # The mark comes first and what must not stand before it second: that way the search is for a fixed text.
    ((r"-(?<=agl-)[a-z0-9_-]",), _pattern(rf"agl-(?<!{_WORD}agl-){_WORD}{{8,}}+\.{_WORD}{{20,}}+")),
    ((r"-(?<=aglk-)[a-z0-9_-]",), _pattern(rf"aglk-(?<!{_WORD}aglk-){_WORD}{{20,}}+")),
    ((r"-(?<=sk-)[a-z0-9_-]",), _pattern(rf"sk-(?<!{_WORD}sk-)(?=(?:[A-Za-z_-]*+\d){{2}}){_WORD}{{16,}}+")),
    (
        (r"_(?<=[rs]k_live_)[a-z0-9]", r"_(?<=[rs]k_test_)[a-z0-9]"),
        _pattern(r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}+"),
    ),
    ((r"_(?<=gh[pousr]_)[a-z0-9]",), _pattern(r"gh[pousr]_(?<![A-Za-z0-9_]gh._)[A-Za-z0-9]{30,}+")),
    ((r"_(?<=github_pat_)[a-z0-9]",), _pattern(r"github_pat_[A-Za-z0-9_]{30,}+")),
    ((r"-(?<=glpat-)[a-z0-9_-]",), _pattern(rf"glpat-{_WORD}{{16,}}+")),
    ((r"_(?<=hf_)[a-z0-9]",), _pattern(r"hf_(?<![A-Za-z0-9_]hf_)[A-Za-z0-9]{30,}+")),
    ((r"K(?<=AK)IA", r"S(?<=AS)IA"), _pattern(r"A[KS]IA(?<![A-Za-z0-9]A.IA)[A-Z0-9]{16}(?![A-Za-z0-9])")),
    (
        (r"b(?:earer)[ \\]",),
        _pattern(
            r"(?P<scheme>\b[Bb](?i:earer)(?: |\\[nrt])++)"
            r"(?:(?=[A-Za-z._~+/-]*+\d)[\w.~+/-]{8,}+|[\w.~+/-]{24,}+)=*+",
            rf"\g<scheme>{REDACTED}",
        ),
    ),
    (  # a header as text: what follows the scheme is the secret, whatever it looks like
        (r"zation:(?<=authorization:)",),
        _pattern(
            r"(?P<scheme>\b[Aa](?i:uthorization: ?(?:bearer|basic|token) ))[\w.~+/-]{8,}+=*+",
            rf"\g<scheme>{REDACTED}",
        ),
    ),
    ((r"b(?:asic) ",), _pattern(r"(?P<scheme>\b[Bb](?i:asic) ++)(?P<key>[A-Za-z0-9+/]{8,}+)=*+", _basic)),
    (
        (r":(?=//[^\s/:@\"']*+:[^\s/@\"']++@)",),
        _pattern(r"(?P<user>://[^\s/:@\"']*+:)[^\s/@\"']++@", rf"\g<user>{REDACTED}@"),
    ),
)
_END: Final = r"[\"'\\.]"
_NAMED_SIGNS: Final = (
    rf"zation(?<=authorization){_END}",
    rf"kie(?<=cookie){_END}",
    rf"word(?<=password){_END}",
    rf"wd(?<=passwd){_END}",
    rf"cret(?<=secret){_END}",
    rf"key(?:(?<=[iste]key)|(?<=[iste][_-]key)){_END}",
    rf"ken(?:(?<=[shnyrfitbk]token)|(?<=[shnyrfitbk][_-]token)){_END}",
)
_RULES: Final = (*_MARKED, (_NAMED_SIGNS, _without_named))


def _searches(signs: Iterable[str]) -> Sequence[Sign]:
    """What finds any of the signs: by each character that some begin with, and whether it is a capital."""
    tails: dict[str, list[str]] = {}
    for sign in signs:
        tails.setdefault(sign[0], []).append(sign[1:])
    return [
        (first.encode(), first.isupper(), re.compile(f"{first}(?:{'|'.join(rest)})".encode()).search)
        for first, rest in tails.items()
    ]


_ANY_SIGN: Final = _searches(sign for signs, _ in _RULES for sign in signs)
_SIGNS_OF: Final = [(_searches(signs), rule) for signs, rule in _RULES]


# --- content -----------------------------------------------------------------------------------------------------

_HARMLESS: Final = frozenset(
    {
        semconv.ROLLOUT_ID,
        semconv.ATTEMPT_ID,
        semconv.CALL_ENDPOINT,
        semconv.CALL_SAMPLING,
        semconv.CALL_FLAG,
        semconv.CALL_HOUSEKEEPING,
        semconv.CALL_PARENT_AGENT,
        semconv.CALL_BACKEND,
        semconv.OPERATION_NAME,
        semconv.EXCEPTION_TYPE,
        "error.type",
        "gen_ai.operation.name",
        "gen_ai.system",
        "gen_ai.provider.name",
        "gen_ai.agent.id",
        "gen_ai.agent.name",
        "gen_ai.conversation.id",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "gen_ai.response.id",
        "gen_ai.response.finish_reasons",
        "gen_ai.output.type",
        "gen_ai.token.type",
        "gen_ai.tool.name",
        "gen_ai.tool.type",
        "gen_ai.tool.call.id",
        "openinference.span.kind",
        "llm.model_name",
        "llm.provider",
        "llm.system",
        "tool.name",
        "traceloop.span.kind",
        "traceloop.entity.name",
        "traceloop.workflow.name",
        "http.request.method",
        "rpc.system",
        "otel.kind",
        "otel.scope.name",
        "otel.scope.version",
    }
)
"""The text attributes that are no content. Known ones stay and all others go, so that what an agent or a library newly
invents is not written by oversight."""
_HARMLESS_PREFIXES: Final = (f"{semconv.REWARD}.", "service.", "telemetry.")
_CONTENT_PREFIXES: Final = (semconv.OPERATION_INPUT, semconv.OPERATION_OUTPUT)  # their numbers and their names too


def without_content(span: Span, *, tokens: bool) -> Span:
    """The span without texts that are not known to be harmless; names, numbers, times and codes stay, but for what an
    operation was given and gave. Without `tokens` it loses its token ids, and all lists of numbers, too."""

    def stays(name: str, value: AttributeValue) -> bool:
        if name.startswith(_CONTENT_PREFIXES):
            return False
        if isinstance(value, bool | int | float):
            return True
        if isinstance(value, str) or any(isinstance(item, str) for item in value):
            return name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES)
        return tokens

    def harmless(attributes: Mapping[str, AttributeValue]) -> Attributes:
        return {name: value for name, value in attributes.items() if stays(name, value)}

    kept = _replaced(span, harmless, str, None)
    return kept if tokens else msgspec.structs.replace(kept, tokens=None)
