"""Calls as HTTP requests, and HTTP answers as results or typed errors.

It knows the formats, and how to tell a store's answer from that of a proxy or another server. It does not know sockets
or when to repeat a call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from http.client import responses
from types import NoneType
from typing import Any, Final, get_args
from urllib.parse import quote

import msgspec

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.store import calls, codec
from agentlightning.store.calls import Call
from agentlightning.types import Noun

MSGPACK: Final = "application/msgpack"
LONGEST_RETRY_AFTER: Final = 30.0  # seconds; whoever asks for more is asked again after these
_ADMIN_SECONDS: Final = 600.0  # what an audited call, such as checking a large store, may take
_TOO_MANY: Final = 429
_LONGEST_NAME: Final = 1000  # an id has 200 at most; a server refuses a longer URL without a word
_AGAIN: Final = (408, 425, _TOO_MANY, 502, 503, 504)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.\-]+")  # as nearly all ids are, for which `quote` is slow

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=codec.plain)
_error_replies: Final = msgspec.json.Decoder(calls.ErrorReply)


class RetryLaterError(UnavailableError):
    """The server asks to wait `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


_ERRORS: Final[Mapping[int, type[AgentLightningError]]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidError,
    422: InvalidError,
}


class Wire(msgspec.Struct, frozen=True):
    """A call as a request. `path` is encoded, with the query. `wait` is how many seconds the server may take."""

    method: str
    path: str
    body: bytes | None
    wait: float


class Answer(Noun, frozen=True, kw_only=True):
    """An answer from `url`."""

    url: str
    status: int
    content_type: str
    body: bytes
    retry_after: str | None = None
    location: str | None = None

    @property
    def ends_the_call(self) -> bool:
        """Whether repeating is useless: the server has done it, or refused it."""
        if self.status in _AGAIN:
            return False
        return self.status < 500 or _reply(self) is not None

    @property
    def certain(self) -> bool:
        """Whether an answer that does not end the call means that nothing was done."""
        return self.status == _TOO_MANY

    @property
    def pause(self) -> float:
        """How many seconds the server asks to wait; a date is ignored."""
        asked = self.retry_after or ""
        return min(float(asked), LONGEST_RETRY_AFTER) if asked.isdecimal() else 0.0


class Form:
    """Writes the calls of one kind, and reads their answers."""

    def __init__(self, kind: type[Call]) -> None:
        self._method, _, self._path = kind.route.partition(" ")
        self._in_path = tuple(calls.path_fields(self._path))
        self._in_body = tuple(name for name in kind.__struct_fields__ if name not in self._in_path)
        self._waits = "timeout" in kind.__struct_fields__
        self._own_wait = _ADMIN_SECONDS if kind.audited else 0.0
        self._route = kind.route
        self._may_be_nothing = NoneType in get_args(kind.returns)
        self._decode = msgspec.msgpack.Decoder(kind.returns).decode

    def request(self, call: Call) -> Wire:
        """The call as a request. InvalidError for a value that cannot be sent."""
        path = self._path
        if self._in_path:
            path = path.format_map({name: _in_url(str(getattr(call, name))) for name in self._in_path})
        wait = (getattr(call, "timeout", None) or 0.0) if self._waits else self._own_wait
        fields = {name: getattr(call, name) for name in self._in_body}
        if self._method in calls.IN_QUERY:
            query = "&".join(f"{name}={_in_url(str(value))}" for name, value in fields.items() if value is not None)
            return Wire(self._method, f"{path}?{query}" if query else path, None, wait)
        return Wire(self._method, path, encode(fields, self._route), wait)

    def result(self, answer: Answer) -> Any:
        """The call's result. Raises the typed error."""
        if answer.status >= 300:
            reply = _reply(answer)
            if answer.status == 404 and self._may_be_nothing and reply is not None and reply.type == "not_found":
                return None
            raise error_of(answer)
        try:
            if answer.content_type == MSGPACK:
                return self._decode(answer.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{answer.url} answered {self._route} with what this version does not understand ({error}); run the "
                "same version of agentlightning on both sides"
            ) from None
        raise _stranger(answer)


@functools.cache
def form_of(kind: type[Call]) -> Form:
    """The form of a kind of calls, made once."""
    return Form(kind)


def _in_url(value: str) -> str:
    if len(value) > _LONGEST_NAME:
        raise InvalidError(f"{value[:100]!r} … has {len(value)} characters, and nothing has a name so long")
    try:
        return value if _PLAIN.fullmatch(value) else quote(value, safe="")
    except UnicodeEncodeError as error:
        raise InvalidError(f"{value[:200]!r} cannot be sent: {error}") from None


def encode(value: Any, what: str) -> bytes:
    """The value as msgpack. InvalidError if it has no such form."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidError(f"{what} cannot be sent: {error}") from None


def error_of(answer: Answer) -> AgentLightningError:
    """The typed error of an unsuccessful answer, whoever sent it."""
    reply = _reply(answer)
    if reply is None:
        return _stranger(answer)
    if answer.status == 404 and reply.type == "http":
        return ConfigError(
            f"{answer.url} does not know this call ({reply.message}); it must be the server of a store, of the same "
            "version as this client"
        )
    if answer.ends_the_call:
        return _ERRORS.get(answer.status, AgentLightningError)(reply.message)
    return _unavailable(answer, reply.message)


def _unavailable(answer: Answer, message: str) -> UnavailableError:
    return RetryLaterError(message, answer.pause) if answer.pause else UnavailableError(message)


def _reply(answer: Answer) -> calls.ErrorBody | None:
    """The error of one of our servers; None if it is from another."""
    try:
        return _error_replies.decode(answer.body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _stranger(answer: Answer) -> AgentLightningError:
    """The error for an answer that is not from one of our servers."""
    url, status, excerpt = answer.url, answer.status, _excerpt(answer)
    if not answer.ends_the_call:
        return _unavailable(
            answer, f"what stands before the server at {url} answered {excerpt}; is the server running?"
        )
    if status in (401, 403):
        return ForbiddenError(f"what stands before the server at {url} answered {excerpt}; check the key")
    moved = f" and redirects to {answer.location}" if answer.location else ""
    return ConfigError(f"{url} is not the server of a store: it answered {excerpt}{moved}; check the URL")


def _excerpt(answer: Answer) -> str:
    """`502 Bad Gateway (text/html: 'nginx is restarting')`."""
    text = answer.body[:20_000].decode(errors="replace")
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    excerpt = " ".join((title[1] if title else text).split())[:120]
    return (
        f"{answer.status} {responses.get(answer.status, '')} ({answer.content_type or 'no content type'}: {excerpt!r})"
    )
