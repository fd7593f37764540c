"""Removes what must not be written of a span, or of why an attempt ended: secrets always, content
of prompts and tools if asked, and what the user's hook removes.

It knows spans and attribute names. Input and metadata of rollouts are the user's, and are stored as
given."""

from __future__ import annotations

import base64
import re
import string
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec

from agentlightning import semconv
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.types import Attributes, AttributeValue, Span, SpanStatus

Capture: TypeAlias = Literal["full", "tokens", "off"]
"""`full`: everything but secrets. `tokens`: no content, but exact token ids and logprobs. `off`:
not those either."""

Redact: TypeAlias = Callable[[Span], Span | None]
"""Sees a span before anything of it is written: returns it, changed or not, or None to drop it."""

_WHOLE: Final = {semconv.OPERATION_RESULT, semconv.OPERATION_ONCE}
_LONG: Final = 2000  # characters of messages that are worth remembering
_REMEMBERED: Final = 1 << 24  # characters of conversations that may go on


def redaction(capture: Capture = "full", hook: Redact | None = None) -> Redact:
    """A function applied to every span before it is written.

    It always removes secrets. `hook` sees the rest, last: it returns the span to store, or None to
    drop it. InvalidError if the hook raises, returns something else or changes an id; then the call
    writes nothing. ConfigError for an unknown `capture`."""
    if capture not in get_args(Capture):
        raise ConfigError(
            f"capture is {capture!r}; it must be one of {', '.join(get_args(Capture))}"
        )

    conversations = _Conversations()

    def redact(span: Span) -> Span | None:
        given = dict(span.attributes)  # a hook may change them in place
        kept: Span | None = (
            span if capture == "full" else without_content(span, tokens=capture == "tokens")
        )
        if not conversations.only_adds_harmless(kept):
            kept = without_secrets(kept)
        if hook is not None:
            kept = _hooked(hook, kept)
        if kept and given.keys() & _WHOLE and kept.attributes != given:
            kept.attributes[semconv.OPERATION_RESULT] = semconv.REDACTED
        return kept

    return redact


class _Conversations:
    """The messages of each attempt's last long call without a secret. If the next call's messages
    begin with these, only the rest is searched, with some overlap. Thread-safe."""

    def __init__(self) -> None:
        self._harmless: dict[str, str] = {}  # by attempt, without the closing bracket of the array
        self._characters = 0
        self._lock = threading.Lock()

    def only_adds_harmless(self, span: Span) -> bool:
        """Whether the span is a call without a secret; False also if only a full search can
        tell."""
        messages = span.attributes.get(semconv.GEN_AI_INPUT_MESSAGES)
        if (
            not isinstance(messages, str)
            or len(messages) < _LONG
            or semconv.CALL_ENDPOINT not in span.attributes
        ):
            return False
        with self._lock:
            before = self._harmless.pop(span.attempt_id, "")
            self._characters -= len(before)
        # No sign holds a quote but as its last character, so that none which ends in new text
        # begins before this one.
        added = messages[before.rfind('"') + 1 :] if messages.startswith(before) else messages
        if _rules_for_span(span, {**span.attributes, semconv.GEN_AI_INPUT_MESSAGES: added}):
            return False
        with self._lock:
            self._characters += len(messages) - 1 - len(self._harmless.pop(span.attempt_id, ""))
            self._harmless[span.attempt_id] = messages[:-1]
            while self._characters > _REMEMBERED:
                self._characters -= len(self._harmless.pop(next(iter(self._harmless))))
        return True


def _hooked(hook: Redact, span: Span) -> Span | None:
    name = f"the redaction hook {getattr(hook, '__qualname__', None) or repr(hook)}"
    try:
        result: Any = hook(span)
    except Exception as error:
        raise InvalidError(
            f"{name} failed on span {span.name!r}: {type(error).__name__}: {error}"
        ) from error
    if result is None:
        return None
    if not isinstance(result, Span):
        raise InvalidError(
            f"{name} returned a {type(result).__name__}; it must return a Span, or None to drop it"
        )
    for field in ("rollout_id", "attempt_id", "span_id", "parent_id", "trace_id", "sequence_id"):
        if getattr(result, field) != getattr(span, field):
            raise InvalidError(
                f"{name} changed the {field} of span {span.name!r}; ids must stay as they are"
            )
    return result


def _replaced(
    span: Span,
    attributes: Callable[[Attributes], Attributes],
    text: Callable[[str], str],
    description: str | None,
) -> Span:
    """The span, with `attributes` applied to all its attributes and `text` to its names."""
    replace = msgspec.structs.replace
    return replace(
        span,
        name=text(span.name),
        status=SpanStatus(status_code=span.status.status_code, description=description),
        attributes=attributes(span.attributes),
        events=tuple(
            replace(event, name=text(event.name), attributes=attributes(event.attributes))
            for event in span.events
        ),
        links=tuple(replace(link, attributes=attributes(link.attributes)) for link in span.links),
        resource=attributes(span.resource),
    )


# Whoever has a key of an attempt chooses what is read here: everything takes linear time.
# Quantifiers are possessive (`++`), so that nothing is read twice, and each pattern is tried only
# where one of its marks is in the text.

_OF_KEYS: Final = ("api", "access", "secret", "private")
_OF_TOKENS: Final = (
    *("access", "refresh", "auth", "oauth", "session", "security", "bearer", "csrf", "api", "bot"),
    *("github", "gitlab", "hf", "slack"),
)
_ENDINGS: Final = (
    *("authorization", "cookie", "password", "passwd", "secret"),
    *(f"{of}{dash}key" for of in _OF_KEYS for dash in ("", "_", "-")),
    *(f"{of}{dash}token" for of in _OF_TOKENS for dash in ("", "_", "-")),
)


def is_credential(name: str) -> bool:
    """Whether a name is that of a secret: `authorization`, `http.request.header.x-api-key`,
    `config.db_password`. Plain `token` is not: most tokens here are those of language models."""
    return name.lower().rstrip(".0123456789").endswith(_ENDINGS)


def without_secrets(span: Span) -> Span:
    """The span with `[redacted]` for values of secret names, and for what looks like a key within
    any text."""
    rules = _rules_for_span(span, span.attributes)
    if not rules:
        return span

    def clean(text: str) -> str:
        for rule in rules:
            text = rule(text)
        return text

    def cleaned(attributes: Attributes) -> Attributes:
        return {name: _without_secrets(name, value, clean) for name, value in attributes.items()}

    description = span.status.description
    return _replaced(span, cleaned, clean, description and clean(description))


def _rules_for_span(span: Span, attributes: Attributes) -> Collection[Rule]:
    open_parts = (
        span.name,
        span.status.description,
        attributes,
        span.events,
        span.links,
        span.resource,
    )
    try:
        return _rules_for(msgspec.json.encode(open_parts))
    except (TypeError, ValueError, RecursionError):
        return ()  # it cannot be stored, and is refused when that is tried


def _without_secrets(
    name: str, value: AttributeValue, clean: Callable[[str], str]
) -> AttributeValue:
    if isinstance(value, bool):
        return value
    if is_credential(name):
        return semconv.REDACTED
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int | float):
        return value
    return [clean(item) if isinstance(item, str) else item for item in value]


def text_without_secrets(text: str) -> str:
    """`Error 401: Bearer 8kd0…` → `Error 401: Bearer [redacted]`. Text that only resembles a key
    stays."""
    for rule in _rules_for(text.encode(errors="replace")):
        text = rule(text)
    return text


def metadata_without_secrets(
    redact: Redact, ids: tuple[str, str], status: str, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of the attempt of these ids, with `reason`, why it ended, as `redact` leaves the
    message of an exception's span: `ValueError: no key sk-8f…` → `ValueError: no key [redacted]`.
    Without content that is `ValueError`, or the status where no type is named."""
    reason = metadata.get("reason")
    if not isinstance(reason, str):
        return dict(metadata)
    named = _TYPE.match(reason)
    kind = status if named is None else text_without_secrets(named[0])
    span = Span(
        rollout_id=ids[0],
        attempt_id=ids[1],
        sequence_id=0,
        trace_id="",
        span_id="reason",
        name=semconv.EXCEPTION,
        start_time=0.0,
        end_time=0.0,
        attributes={semconv.EXCEPTION_TYPE: kind, semconv.EXCEPTION_MESSAGE: reason},
    )
    message = None
    with suppress(InvalidError):  # of the hook; the attempt has ended all the same
        kept = redact(span)
        message = kept and kept.attributes.get(semconv.EXCEPTION_MESSAGE)
    return {**metadata, "reason": message if isinstance(message, str) else kind}


_TYPE: Final = re.compile(r"[A-Za-z_][\w.]*(?=: )")  # at the beginning of a reason


def settings_without_secrets(value: Any) -> Any:
    """Settings or a command line without the values of secret names, at any depth, and without what
    looks like a key in other texts."""
    if isinstance(value, list):  # perhaps flags: the value after a credential's flag is secret
        items = cast("list[Any]", value)
        flags = [
            is_credential(item) if isinstance(item, str) and item[:2] == "--" else False
            for item in items
        ]
        return [
            settings_without_secrets(item)
            for item, flag in zip(items, [False, *flags], strict=False)
            if not flag
        ]
    if isinstance(value, str):
        flag = value.partition("=")[0]
        return (
            flag if value.startswith("--") and is_credential(flag) else text_without_secrets(value)
        )
    if not isinstance(value, dict):
        return value
    named = cast("dict[str, Any]", value)
    return {
        name: settings_without_secrets(setting)
        for name, setting in named.items()
        if not is_credential(name)
    }


_LONGEST_NAME: Final = 120  # of what is looked at of a name, from its end
_KEY_END: Final = re.compile(
    r"[\"'](?<=[\w\\][\"'])\s*+:\s*+(?P<list>\[\s*+)?+(?P<row>\\*+)(?P<quote>[\"'])"
)
"""The quote after a name, and what leads from there to its value."""


def _value(row: int, quote: str, *, several: bool) -> re.Pattern[str]:
    """A value up to its closing quote, or the end of a truncated text. In JSON in JSON in JSON,
    each quote follows one or three backslashes: a `row`. Rows of twice as many and one are escaped
    by the value."""
    closing = rf"\\{{{row}}}{quote}"
    period = rf"\\{{{2 * row + 2}}}"
    escaped = rf"(?:{period})*+\\{{{2 * row + 1}}}{quote}"
    value = rf"(?:[^{quote}\\]++|\\++(?!{quote})|{escaped})*+(?:{period})*+"
    return re.compile(rf"(?:{value}{closing}\s*+,\s*+{closing})*+{value}" if several else value)


_VALUES: Final = {
    ("\\" * row, quote, several): _value(row, quote, several=several)
    for row in (0, 1, 3)
    for quote in "\"'"
    for several in (False, True)
}


def _without_named(text: str) -> str:
    """The text without the values in `"password": "…"` and `"set-cookie": ["…", "…"]`, also in JSON
    in JSON in JSON."""
    pieces: list[str] = []
    done = 0
    match = _KEY_END.search(text)
    while match is not None:
        row = match["row"]
        next_search = match.end() - 1
        name = text[max(0, match.start() - _LONGEST_NAME) : match.start()]
        value = _VALUES.get((row, match["quote"], match["list"] is not None))
        if value is not None and name.endswith(row) and is_credential(name.removesuffix(row)):
            found = value.match(text, match.end())
            assert found is not None, "a value may be empty"
            pieces += (text[done : match.end()], semconv.REDACTED)
            done = next_search = found.end()
        match = _KEY_END.search(text, next_search)
    return "".join((*pieces, text[done:]))


def _basic(match: re.Match[str]) -> str:
    """`Basic` followed by base64 of `user:password`. Other words after "basic" stay."""
    try:
        decoded = base64.b64decode(
            match["key"] + "=" * (-len(match["key"]) % 4), validate=True
        ).decode()
    except ValueError:
        return match[0]
    return f"{match['scheme']}{semconv.REDACTED}" if ":" in decoded else match[0]


Rule: TypeAlias = Callable[[str], str]


def _rule(
    pattern: str, replacement: str | Callable[[re.Match[str]], str] = semconv.REDACTED
) -> Rule:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(replacement, text)


_W: Final = "[A-Za-z0-9_-]"
_END: Final = r"[\"'\\.]"
# Sign → the rules that apply where it is in the text in small letters. A sign begins with one
# letter, which is found at the speed of memory: most texts hold no sign, and this search is all
# they cost. In the pattern of a rule the mark comes first and what must not stand before it second,
# so that the search is for a fixed text.
_RULES: Final[Mapping[str, Sequence[Rule]]] = {
    r"-(?:(?<=agl-)|(?<=aglk-)|(?<=sk-)|(?<=glpat-))[a-z0-9_-]{5}": (
        _rule(rf"agl-(?<!{_W}agl-){_W}{{5,}}+\.{_W}{{20,}}+"),
        _rule(rf"aglk-(?<!{_W}aglk-){_W}{{20,}}+"),
        _rule(rf"sk-(?<!{_W}sk-)(?=(?:[A-Za-z_-]*+\d){{2}}){_W}{{16,}}+"),
        _rule(rf"glpat-{_W}{{16,}}+"),
    ),
    r"_(?:(?<=k_live_)|(?<=k_test_)|(?<=gh[pousr]_)|(?<=github_pat_)|(?<=hf_))[a-z0-9_]{16}": (
        _rule(r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}+"),
        _rule(r"gh[pousr]_(?<![A-Za-z0-9_]gh._)[A-Za-z0-9]{30,}+"),
        _rule(r"github_pat_[A-Za-z0-9_]{30,}+"),
        _rule(r"hf_(?<![A-Za-z0-9_]hf_)[A-Za-z0-9]{30,}+"),
    ),
    r"ia(?<=a[ks]ia)[a-z0-9]{16}": (
        _rule(r"A[KS]IA(?<![A-Za-z0-9]A.IA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ),
    # a header as text: what follows the scheme is the secret, whatever it looks like
    r":(?<=authorization:)": (
        _rule(
            r"(?P<scheme>\b[Aa](?i:uthorization: ?(?:bearer|basic|token) ))[\w.~+/-]{8,}+=*+",
            rf"\g<scheme>{semconv.REDACTED}",
        ),
    ),
    r"b(?:earer|asic )": (
        _rule(
            r"(?P<scheme>\b[Bb](?i:earer)(?: |\\[nrt])++)"
            r"(?:(?=[A-Za-z._~+/-]*+\d)[\w.~+/-]{8,}+|[\w.~+/-]{24,}+)=*+",
            rf"\g<scheme>{semconv.REDACTED}",
        ),
        _rule(r"(?P<scheme>\b[Bb](?i:asic) ++)(?P<key>[A-Za-z0-9+/]{8,}+)=*+", _basic),
    ),
    r"://[^\s/:@\"']*+:[^\s/@\"']++@": (
        _rule(r"(?P<user>://[^\s/:@\"']*+:)[^\s/@\"']++@", rf"\g<user>{semconv.REDACTED}@"),
    ),
    **dict.fromkeys(
        (  # the ends of names of credentials
            rf"zation(?<=authorization){_END}",
            rf"w(?<=passw)(?:or)?d{_END}",
            rf"cret(?<=secret){_END}",
            # In one sign, and what follows the letter first: each search, and each look back, costs
            # much of a span.
            rf"k(?:ie(?<=cookie)|ey(?:(?<=[iste]key)|(?<=[iste][_-]key))"
            rf"|en(?:(?<=[shnyrfitbk]token)|(?<=[shnyrfitbk][_-]token))){_END}",
        ),
        (_without_named,),
    ),
}
_SIGNS: Final = [(re.compile(sign.encode()).search, rules) for sign, rules in _RULES.items()]


_FILE: Final = b";base64,"
_BASE64: Final = f"{string.ascii_letters}{string.digits}+/=".encode()
_MARGIN: Final = 64  # characters of a file at each end that are searched: no sign is longer


def _without_files(data: bytes) -> bytes:
    """A text without the middle of the base64 of images and other files. They are long, and no sign
    is in base64."""
    pieces: list[bytes] = []
    done = 0
    start = data.find(_FILE)
    while start >= 0:
        end = data.find(b'"', start)
        end = len(data) if end < 0 else end
        first = start + len(_FILE) + _MARGIN
        last = end - _MARGIN
        if last - first > _MARGIN and not data[first:last].translate(None, _BASE64):
            pieces.append(data[done:first])
            done = last
        start = data.find(_FILE, end)
    return b"".join((*pieces, data[done:]))


def _rules_for(data: bytes) -> Collection[Rule]:
    """The rules whose signs are in a text, each once."""
    small = _without_files(data).lower()
    return dict.fromkeys(rule for search, rules in _SIGNS if search(small) for rule in rules)


_HARMLESS: Final = frozenset(
    (
        *(semconv.ROLLOUT_ID, semconv.ATTEMPT_ID, semconv.OPERATION_NAME, semconv.EXCEPTION_TYPE),
        *(
            semconv.CALL_ENDPOINT,
            semconv.CALL_SAMPLING,
            semconv.CALL_FLAG,
            semconv.CALL_HOUSEKEEPING,
        ),
        *(semconv.CALL_PARENT_AGENT, semconv.CALL_BACKEND),
        *(semconv.CALL_REPLAYED_ROLLOUT, semconv.CALL_REPLAYED_ATTEMPT),
        *(
            "error.type",
            "gen_ai.operation.name",
            "gen_ai.system",
            "gen_ai.provider.name",
            "gen_ai.agent.id",
        ),
        *(
            "gen_ai.agent.name",
            "gen_ai.conversation.id",
            "gen_ai.request.model",
            "gen_ai.response.model",
        ),
        *(
            "gen_ai.response.id",
            "gen_ai.response.finish_reasons",
            "gen_ai.output.type",
            "gen_ai.token.type",
        ),
        *("gen_ai.tool.name", "gen_ai.tool.type", "gen_ai.tool.call.id", "openinference.span.kind"),
        *("llm.model_name", "llm.provider", "llm.system", "tool.name", "traceloop.span.kind"),
        *("traceloop.entity.name", "traceloop.workflow.name", "http.request.method", "rpc.system"),
        *("otel.kind", "otel.scope.name", "otel.scope.version"),
    )
)
"""The text attributes that are no content. Known ones stay and all others go, so that what an agent
or a library newly invents is not written by oversight."""
_HARMLESS_PREFIXES: Final = (f"{semconv.REWARD}.", "service.", "telemetry.")
# their numbers and their names too
_CONTENT_PREFIXES: Final = (semconv.OPERATION_INPUT, semconv.OPERATION_OUTPUT)


def without_content(span: Span, *, tokens: bool) -> Span:
    """The span without texts that are not known to be harmless: names, numbers, times and codes
    stay, except input and output of operations. Without `tokens`, token ids and all lists of
    numbers go too."""

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
