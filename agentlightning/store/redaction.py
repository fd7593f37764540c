"""What of a span may be written: never a secret, the content of prompts and tools only if it is wanted, and in the end
whatever the user's own hook leaves.

This module knows spans and names of attributes. It does not know who sent a span or how it is stored. The input and
the metadata of rollouts are the user's, and are not looked at.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from agentlightning import semconv
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.store.spans import Redact
from agentlightning.types import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanStatus

Capture: TypeAlias = Literal["full", "tokens", "off"]
"""`full`: everything but secrets. `tokens`: no content, but exact token ids and logprobs. `off`: not those either."""

REDACTED: Final = "[redacted]"


def redaction(capture: Capture = "full", hook: Redact | None = None) -> Redact:
    """What is to be done to every span before anything of it is written.

    Secrets are removed in any case. `hook` sees what is left, last of all: it returns the span as it is to be stored,
    or None to drop it. An InvalidError names a hook that raises, returns something else or changes an id; nothing of
    the call is written then. ConfigError for another `capture`."""
    if capture not in get_args(Capture):
        raise ConfigError(f"capture is {capture!r}; it must be one of {', '.join(get_args(Capture))}")

    def redact(span: Span) -> Span | None:
        kept = without_secrets(span if capture == "full" else without_content(span, tokens=capture == "tokens"))
        return kept if hook is None else _hooked(hook, kept)

    return redact


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

_CREDENTIAL: Final = (
    r"(?:authorization|cookie|(?:api|access|secret|private)[_-]?key|password|passwd|secret"
    r"|(?:access|refresh|auth|oauth|session|security|bearer|csrf|api|bot|github|gitlab|hf|slack)[_-]?token)"
)
_CREDENTIAL_NAME: Final = re.compile(rf"{_CREDENTIAL}(?:\.\d+)*\Z", re.IGNORECASE)


@functools.lru_cache(maxsize=1024)
def is_credential(name: str) -> bool:
    """Whether what has this name is secret by its name: `authorization`, `http.request.header.x-api-key`,
    `config.db_password`. Plain `token` is not: most tokens here are those of language models."""
    return _CREDENTIAL_NAME.search(name) is not None


def without_secrets(span: Span) -> Span:
    """The span with `[redacted]` for whatever a name says is a credential, and for whatever looks like a key within a
    text, JSON or not."""
    if not _may_hold_secret(span):
        return span
    description = span.status.description
    return _replaced(
        span, _attributes_without_secrets, text_without_secrets, description and text_without_secrets(description)
    )


_encoder: Final = msgspec.json.Encoder()
_SIGNS: Final = tuple(
    (pattern[:1].encode(), re.compile(pattern.encode()).search)
    for pattern in (
        r"-(?:(?<=sk-)|(?<=agl-)|(?<=aglk-)|(?<=glpat-))[A-Za-z0-9_-]",
        r"_(?:(?<=gh[pousr]_)|(?<=github_pat_)|(?<=hf_)|(?<=[rs]k_live_)|(?<=[rs]k_test_))[A-Za-z0-9]",
        r"B(?:earer|EARER|asic|ASIC)[ \\]",
        r"b(?:earer|asic)[ \\]",
        r"K(?:(?<=AK)IA|(?:[Ee][Yy]|(?<=OOK)IE|(?<=TOK)EN)[\"'\\.])",
        r"S(?:(?<=AS)IA|ECRET)",
        r"k(?:(?<=[Cc]ook)ie|(?<=[Tt]ok)en|ey)[\"'\\.]",
        r"z(?<=uthoriz)ation",
        r"Z(?<=UTHORIZ)ATION",
        r"w(?<=assw)(?:or)?d",
        r"W(?<=ASSW)(?:OR)?D",
        r"@[^\s@]",
    )
)
"""What any text with a secret in it contains. Each begins with one character, which is looked for at the speed of
memory: nearly all spans hold no secret, and this is all that they cost."""


def _may_hold_secret(span: Span) -> bool:
    open_parts = (span.name, span.status.description, span.attributes, span.events, span.links, span.resource)
    try:
        data = _encoder.encode(open_parts)
    except (TypeError, ValueError, RecursionError):
        return True  # it cannot be stored either, and is refused when that is tried
    for first, search in _SIGNS:
        if first in data and search(data):
            return True
    return b"ecret" in data


def _attributes_without_secrets(attributes: Attributes) -> Attributes:
    return {name: _value_without_secrets(name, value) for name, value in attributes.items()}


def _value_without_secrets(name: str, value: AttributeValue) -> AttributeValue:
    if isinstance(value, bool):
        return value
    if is_credential(name):
        return REDACTED
    if isinstance(value, str):
        return text_without_secrets(value)
    if isinstance(value, int | float):
        return value
    return [text_without_secrets(item) if isinstance(item, str) else item for item in value]


def text_without_secrets(text: str) -> str:
    """`Error 401: Bearer 8kd0…` → `Error 401: Bearer [redacted]`. Text that only resembles a key stays."""
    for marks, pattern, replacement in _KEYS:
        if any(mark in text for mark in marks):
            text = pattern.sub(replacement, text)
    for mark, named in _NAMED:
        if mark in text:
            text = named.sub(rf"\g<head>\g<quote>{REDACTED}\g<quote>", text)
    return text


def _basic(match: re.Match[str]) -> str:
    """`Basic` with something in base64 that is `user:password`; other words after "basic" are words."""
    try:
        decoded = base64.b64decode(match["key"] + "=" * (-len(match["key"]) % 4), validate=True).decode()
    except ValueError:
        return match[0]
    return f"{match['scheme']}{REDACTED}" if ":" in decoded else match[0]


_WORD: Final = "[A-Za-z0-9_-]"
_KEYS: Final[tuple[tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = tuple(
    (marks, re.compile(pattern), replacement)
    for marks, pattern, replacement in (
        # The mark comes first and what must not stand before it second: that way the search is for a fixed text.
        (("agl-",), rf"agl-(?<!{_WORD}agl-){_WORD}{{8,}}\.{_WORD}{{20,}}", REDACTED),
        (("aglk-",), rf"aglk-(?<!{_WORD}aglk-){_WORD}{{20,}}", REDACTED),
        (("sk-",), rf"sk-(?<!{_WORD}sk-)(?=(?:[A-Za-z_-]*\d){{2}}){_WORD}{{16,}}", REDACTED),
        (("_live_", "_test_"), r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}", REDACTED),
        (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_(?<![A-Za-z0-9_]gh._)[A-Za-z0-9]{30,}", REDACTED),
        (("github_pat_",), r"github_pat_[A-Za-z0-9_]{30,}", REDACTED),
        (("glpat-",), rf"glpat-{_WORD}{{16,}}", REDACTED),
        (("hf_",), r"hf_(?<![A-Za-z0-9_]hf_)[A-Za-z0-9]{30,}", REDACTED),
        (("AKIA", "ASIA"), r"A[KS]IA(?<![A-Za-z0-9]A.IA)[A-Z0-9]{16}(?![A-Za-z0-9])", REDACTED),
        (
            ("earer", "EARER"),
            r"(?i:(?P<scheme>\bbearer(?: |\\[nrt])+))(?:(?=[A-Za-z._~+/-]*\d)[\w.~+/-]{8,}|[\w.~+/-]{24,})=*",
            rf"\g<scheme>{REDACTED}",
        ),
        (  # a header as text: what follows the scheme is the secret, whatever it looks like
            ("uthorization:", "UTHORIZATION:"),
            r"(?i:(?P<scheme>\bauthorization: ?(?:bearer|basic|token) ))[\w.~+/-]{8,}=*",
            rf"\g<scheme>{REDACTED}",
        ),
        (("asic", "ASIC"), r"(?i:(?P<scheme>\bbasic +))(?P<key>[A-Za-z0-9+/]{8,})=*", _basic),
        (("@",), r"(?P<user>://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,200}@", rf"\g<user>{REDACTED}@"),
    )
)


def _named(quote: str, level: int) -> re.Pattern[str]:
    """`"password": "…"` in a text that is JSON within JSON within … `level` times: there each quote has 2**level - 1
    backslashes before it, and whatever the value escapes comes in longer rows of them."""
    period, own = 2 ** (level + 1), 2**level - 1
    inner = rf"[^{quote}\\]|\\{{{period}}}|\\{{{period - 1}}}{quote}|\\{{1,{period - 1}}}(?=[^{quote}\\])"
    mark = rf"\\{{{own}}}{quote}" if own else quote
    return re.compile(
        rf"(?P<head>(?<!\\){mark}[\w.\-]{{0,80}}?{_CREDENTIAL}{mark}\s*:\s*\[?\s*)"
        rf"(?P<quote>{mark})(?:{inner})*+(?:{mark}|$)",
        re.IGNORECASE,
    )


_NAMED: Final = (
    ('"', _named('"', 0)),
    ("'", _named("'", 0)),
    ('\\"', _named('"', 1)),
    ('\\\\\\"', _named('"', 2)),
)


# --- content -----------------------------------------------------------------------------------------------------

_HARMLESS: Final = frozenset(
    {
        semconv.ROLLOUT_ID,
        semconv.ATTEMPT_ID,
        semconv.CALL_ENDPOINT,
        semconv.CALL_SAMPLING,
        semconv.CALL_FLAG,
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
