"""An error of another server, in any of the shapes that servers give it, as words, a code and a
status.

{"error": {"message": M, "code": C}}  {"error": M}  {"message": M}  [{"error": {"message": M}}]
{"detail": M}    {"detail": [{"loc": ["body", "n"], "msg": M}]}    "M"    M    <html>…M…</html>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from agentlightning.errors import BackendError
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.dialects import items, json_of, mapping

_NAMES: Final = (
    "message",
    "detail",
    "msg",
    "error",
    "errors",
    "error_message",
    "error_description",
    "title",
    "reason",
)
_LONGEST: Final = 2000  # characters of what is passed on
_READ: Final = 20_000  # characters of a text that is no JSON, such as a page of HTML
_DEPTH: Final = 6
_UNSEEN: Final = re.compile(r"<(style|script)\b[^<]*</\1>|<[^<>]*>", re.IGNORECASE)


class Words(NamedTuple):
    """`message` is empty where the server said nothing. `status` is that of an error within an
    answer of status 200."""

    message: str
    code: str | None = None
    param: str | None = None
    status: int | None = None


def words_of(body: bytes | str | Any) -> Words:
    """The words of an error: a body, or what was decoded of it."""
    said: Any = body.decode(errors="replace") if isinstance(body, bytes) else body
    decoded = json_of(said) if isinstance(said, str) else said
    if decoded is None:
        text = said if isinstance(said, str) else ""
        return Words(_passed_on(" ".join(_UNSEEN.sub(" ", text[:_READ]).split())))
    outer = _first_object(decoded)
    inner = outer
    for _ in range(_DEPTH):
        inner = _first_object(inner.get("error")) or inner
    fields = outer | inner
    statuses = [
        _status(fields.get(name)) for name in ("code", "status", "status_code", "statusCode")
    ]
    try:
        message = _passed_on(_message(decoded, _DEPTH))
    except RecursionError:  # what it says is nested too deeply to be written
        message = ""
    return Words(
        message.encode(errors="replace").decode(),
        _text(fields.get("code")),
        _text(fields.get("param")),
        next((status for status in statuses if status is not None), None),
    )


def _passed_on(message: str) -> str:
    """A message as agents, spans and logs may have it: servers repeat keys that they do not
    like."""
    return text_without_secrets(message)[:_LONGEST]


def failed_in_answer(error: Any) -> BackendError:
    """The error that came where an answer was to come. One that names itself the caller's fault
    stays that."""
    words = words_of(error)
    message = f"the backend failed in mid-answer: {words.message or 'no message'}"
    status = words.status if words.status is not None and words.status not in (401, 403) else 502
    return BackendError(
        message, status=status if status < 500 else 502, code=words.code or "backend_error"
    )


def _message(value: Any, depth: int) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return "; ".join(_messages(items(value)[:10], depth))
    fields = mapping(value)
    if depth == 0 or not fields:
        return "" if value in (None, {}) else str(value)
    if "loc" in fields and "msg" in fields:  # of FastAPI
        place = ".".join(map(str, items(fields["loc"])))
        return f"{place}: {fields['msg']}" if place else str(fields["msg"])
    names = ("error", *_NAMES) if isinstance(fields.get("error"), dict | list) else _NAMES
    found = _messages((fields[name] for name in names if fields.get(name)), depth)
    return next(iter(found), "") or msgspec.json.encode(value).decode()


def _messages(values: Iterable[Any], depth: int) -> list[str]:
    return [message for value in values if (message := _message(value, depth - 1))]


def _first_object(value: Any) -> dict[str, Any]:
    return mapping(next(iter(items(value)), value))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _status(value: Any) -> int | None:
    """A status of HTTP, as a number or as its digits."""
    number = (
        int(value) if isinstance(value, str) and value.isdecimal() and len(value) == 3 else value
    )
    return number if isinstance(number, int) and 400 <= number < 600 else None
