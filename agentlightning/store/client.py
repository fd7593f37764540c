"""The store over HTTP: the same interface, through an `agl server`.

Calls as requests, and answers as results or typed errors, told from those of a proxy or another
server. One connection pool, created in the event loop that first uses it. Idempotent calls are
repeated with jitter while the server cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http.client import responses
from types import NoneType
from typing import Any, BinaryIO, Final, get_args
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from agentlightning.arrays import plain
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.proxies import proxy_for
from agentlightning.store import calls
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.types import FinishedRollouts, Noun

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 300.0
_chance: Final = random.Random()  # agents seed the one of the module
_FIRST_SECONDS: Final = 60.0  # for a server that has never answered: its URL may be wrong
_SILENT_SECONDS: Final = 1.0  # after which a warning says that no answer comes
_POLL_SECONDS: Final = 25.0  # one long poll; shorter than the idle limits of common proxies
_ANSWER_SECONDS: Final = 60.0  # a server that is silent for longer counts as unreachable
_QUIET_SECONDS: Final = 60.0  # a server's event stream says at least every 15 s that it lives
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
# Nothing was sent: the connection was never made.
_UNSENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# Trying again would not help. (A handshake that fails may be that of a server that is just
# starting.)
_HOPELESS: Final = (aiohttp.ClientConnectorCertificateError, aiohttp.InvalidURL)
MSGPACK: Final = "application/msgpack"
LONGEST_RETRY_AFTER: Final = 30.0  # seconds; whoever asks for more is asked again after these
_ADMIN_SECONDS: Final = 600.0  # what an audited call, such as checking a large store, may take
_TOO_MANY: Final = 429
_LONGEST_NAME: Final = 1000  # an id has 200 at most; a server refuses a longer URL without a word
_AGAIN: Final = (408, 425, _TOO_MANY, 502, 503, 504)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.\-]+")  # as nearly all ids are, for which `quote` is slow

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=plain)
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
    """A call as a request. `path` is encoded, with the query. `wait` is how many seconds the server
    may take."""

    method: str
    path: str
    body: bytes | None
    wait: float


class CallResult(Noun, frozen=True, kw_only=True):
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
        """The seconds that the server asks to wait; a date is ignored."""
        asked = self.retry_after or ""
        return min(float(asked), LONGEST_RETRY_AFTER) if asked.isdecimal() else 0.0


class Form:
    """Writes the calls of one kind, and reads their answers."""

    def __init__(self, kind: type[StoreCall]) -> None:
        self._method, _, self._path = kind.route.partition(" ")
        self._in_path = tuple(calls.path_fields(self._path))
        self._in_body = tuple(name for name in kind.__struct_fields__ if name not in self._in_path)
        self._waits = "timeout" in kind.__struct_fields__
        self._own_wait = _ADMIN_SECONDS if kind.audited else 0.0
        self._route = kind.route
        self._may_be_nothing = NoneType in get_args(kind.returns)
        self._decode = msgspec.msgpack.Decoder(kind.returns).decode

    def request(self, call: StoreCall) -> Wire:
        """The call as a request. InvalidError for a value that cannot be sent."""
        path = self._path
        if self._in_path:
            path = path.format_map(
                {name: _in_path(str(getattr(call, name))) for name in self._in_path}
            )
        wait = (getattr(call, "timeout", None) or 0.0) if self._waits else self._own_wait
        fields = {name: getattr(call, name) for name in self._in_body}
        if self._method in calls.IN_QUERY:
            query = "&".join(
                f"{name}={_in_url(str(value))}"
                for name, value in fields.items()
                if value is not None
            )
            return Wire(self._method, f"{path}?{query}" if query else path, None, wait)
        return Wire(self._method, path, encode(fields, self._route), wait)

    def result(self, answer: CallResult) -> Any:
        """The call's result. Raises the typed error."""
        if answer.status >= 300:
            reply = _reply(answer)
            if (
                answer.status == 404
                and self._may_be_nothing
                and reply is not None
                and reply.type == "not_found"
            ):
                return None
            raise error_of(answer)
        try:
            if answer.content_type == MSGPACK:
                return self._decode(answer.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{answer.url} answered {self._route} with what this version does not understand "
                f"({error}); run the same version of agentlightning on both sides"
            ) from None
        raise _stranger(answer)


@functools.cache
def form_of(kind: type[StoreCall]) -> Form:
    """The form of a kind of calls, made once."""
    return Form(kind)


def _in_path(value: str) -> str:
    if not value.strip("."):
        raise InvalidError(f"{value!r} names nothing, and would lead to another call in a URL")
    return _in_url(value)


def _in_url(value: str) -> str:
    if len(value) > _LONGEST_NAME:
        raise InvalidError(
            f"{value[:100]!r} … has {len(value)} characters, and nothing has a name so long"
        )
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


def error_of(answer: CallResult) -> AgentLightningError:
    """The typed error of an unsuccessful answer, whoever sent it."""
    reply = _reply(answer)
    if reply is None:
        return _stranger(answer)
    if answer.status == 404 and reply.type == "http":
        return ConfigError(
            f"{answer.url} does not know this call ({reply.message}); it must be the server of a "
            "store, of the same version as this client"
        )
    if answer.ends_the_call:
        return _ERRORS.get(answer.status, AgentLightningError)(reply.message)
    return _unavailable(answer, reply.message)


def _unavailable(answer: CallResult, message: str) -> UnavailableError:
    return RetryLaterError(message, answer.pause) if answer.pause else UnavailableError(message)


def _reply(answer: CallResult) -> calls.ErrorBody | None:
    """The error of one of our servers; None if it is from another."""
    try:
        return _error_replies.decode(answer.body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _stranger(answer: CallResult) -> AgentLightningError:
    """The error for an answer that is not from one of our servers."""
    url = answer.url
    status = answer.status
    excerpt = _excerpt(answer)
    if not answer.ends_the_call:
        return _unavailable(
            answer,
            f"what stands before the server at {url} answered {excerpt}; is the server running?",
        )
    if status in (401, 403):
        return ForbiddenError(
            f"what stands before the server at {url} answered {excerpt}; check the key"
        )
    moved = f" and redirects to {answer.location}" if answer.location else ""
    return ConfigError(
        f"{url} is not the server of a store: it answered {excerpt}{moved}; check the URL"
    )


def _excerpt(answer: CallResult) -> str:
    """`502 Bad Gateway (text/html: 'nginx is restarting')`."""
    text = answer.body[:20_000].decode(errors="replace")
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    excerpt = " ".join((title[1] if title else text).split())[:120]
    return (
        f"{answer.status} {responses.get(answer.status, '')} "
        f"({answer.content_type or 'no content type'}: {excerpt!r})"
    )


class LightningStoreClient(LightningStore):
    """The store of the server at `url`. `api_key` is one of its keys, or an attempt's. While the
    server cannot be reached, calls are repeated for `patience` seconds (60 at most if it has never
    answered), then raise UnavailableError."""

    def __init__(
        self, url: str, api_key: str | None = None, *, patience: float = PATIENCE_SECONDS
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the store's URL is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/api/v1")
        self._calls = f"{_checked(self.url)}/api/v1"
        self._proxy = proxy_for(self._calls)
        self._headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._patience = patience
        self._away = False
        self._met = False  # the server has answered
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    async def perform(self, call: StoreCall) -> Any:
        call = calls.named(call)
        if "timeout" not in call.__struct_fields__:
            return await self._ask(call)
        give_up = time.monotonic() + _patience_of(call)
        while True:
            remaining = max(0.0, give_up - time.monotonic())
            # The same ids in every poll: a lease whose answer was lost in one is handed out again
            # in the next.
            call = msgspec.structs.replace(call, timeout=min(_POLL_SECONDS, remaining))
            answer = await self._ask(call)
            if time.monotonic() >= give_up or _is_complete(call, answer):
                return answer
            if isinstance(answer, FinishedRollouts):
                call = msgspec.structs.replace(call, cursor=answer.cursor)

    async def _ask(self, call: StoreCall) -> Any:
        form = form_of(type(call))
        return form.result(
            await self._send_until_answered(form.request(call), call.words(), call.repeatable())
        )

    async def _send_until_answered(self, request: Wire, name: str, may_repeat: bool) -> CallResult:
        """The answer that ends the call. UnavailableError if none came in time, or repeating the
        call could do it twice; ConfigError if this URL cannot answer."""
        begin = time.monotonic()
        patience = self._patience if self._met else min(self._patience, _FIRST_SECONDS)
        backoff = _FIRST_PAUSE
        while True:
            try:
                answer = await self._send(request)
                if answer.ends_the_call:
                    self._away = False
                    self._met = True
                    return answer
                fault = error_of(answer)
                harmless = may_repeat or answer.certain
            except _HOPELESS as error:
                raise ConfigError(
                    f"{self.url} cannot be connected to: {error}; check the URL (and for a "
                    "certificate of your own authority, SSL_CERT_FILE)"
                ) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                fault = self._unreachable(error)
                harmless = may_repeat or isinstance(error, _UNSENT)
            if isinstance(fault, UnavailableError):
                self.away_at = time.monotonic()
            pause = backoff * _chance.uniform(0.5, 1.0)
            if isinstance(fault, RetryLaterError):
                pause += fault.seconds
            elapsed = time.monotonic() - begin
            if not harmless:
                raise UnavailableError(
                    f"{fault} The server may have carried it out ({name}): look before you repeat "
                    "it"
                )
            if elapsed + pause > patience:
                raise UnavailableError(f"{fault} (tried for {elapsed:.1f} s of {patience:g} s)")
            if elapsed > _SILENT_SECONDS and not self._away:
                self._away = True
                logger.warning("%s (retrying for up to %g s)", fault, patience)
            await asyncio.sleep(pause)
            backoff = min(2 * backoff, _LONGEST_PAUSE)

    def _unreachable(self, error: Exception) -> UnavailableError:
        reason = str(error) or type(error).__name__
        return UnavailableError(
            f"the server at {self.url} cannot be reached ({reason}); is it running?"
        )

    async def while_reached(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Connect to the server's events, await `begin`, and return when the connection is lost:
        the server has ended, or cannot be reached. UnavailableError if there is no connection; the
        typed error of a refusal."""
        session = self._session or self._open_session()
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=_ANSWER_SECONDS, sock_read=_QUIET_SECONDS
        )
        try:
            async with session.get(
                f"{self._calls}/events", timeout=limit, allow_redirects=False
            ) as events:
                if events.status != 200:
                    raise error_of(await self._answer(events))
                await begin()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async for _ in events.content.iter_any():
                        pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from None

    async def copy_into(self, file: BinaryIO) -> None:
        """Write a copy of the server's SQLite store, as it is at one moment, into a file.
        ConflictError if the server's store is another."""
        session = self._session or self._open_session()
        try:
            async with session.get(
                f"{self._calls}/backup", timeout=_BACKUP, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise error_of(await self._answer(answer))
                async for chunk in answer.content.iter_chunked(1 << 20):
                    file.write(chunk)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def _send(self, request: Wire) -> CallResult:
        session = self._session or self._open_session()
        url = URL(self._calls + request.path, encoded=True)
        limit = _TIMEOUT if not request.wait else _timeout(request.wait)
        response = await session.request(
            request.method, url, data=request.body, timeout=limit, allow_redirects=False
        )
        try:
            return await self._answer(response)
        finally:
            response.release()

    async def _answer(self, response: aiohttp.ClientResponse) -> CallResult:
        return CallResult(
            url=self.url,
            status=response.status,
            content_type=response.content_type,
            body=await response.read(),
            retry_after=response.headers.get("Retry-After"),
            location=response.headers.get("Location"),
        )

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=self._proxy,
        )
        return self._session


def _timeout(wait: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(
        total=None, sock_connect=_ANSWER_SECONDS, sock_read=wait + _ANSWER_SECONDS
    )


_TIMEOUT: Final = _timeout(0.0)
# a large store takes its time to copy
_BACKUP: Final = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SECONDS)


def _checked(url: str) -> str:
    """The URL, escaped. ConfigError if it names no host."""
    try:
        parsed = URL(url)
        if parsed.host:
            return str(parsed).rstrip("/")
    except ValueError:
        pass
    raise ConfigError(f"the store's URL is {url!r}; expected one such as http://127.0.0.1:8000")


def _patience_of(call: StoreCall) -> float:
    """The seconds that the caller wants to wait, however many long polls that takes."""
    timeout: float | None = getattr(call, "timeout", 0.0)
    if timeout is not None and math.isnan(timeout):
        raise InvalidError("timeout is not a number; give the seconds to wait")
    return math.inf if timeout is None else timeout


def _is_complete(call: StoreCall, answer: Any) -> bool:
    """Whether an answer ends the wait, rather than one long poll."""
    if isinstance(answer, FinishedRollouts):
        return bool(answer.rollouts)
    rollout_ids: Sequence[str] | None = getattr(call, "rollout_ids", None)
    return bool(answer) if rollout_ids is None else len(answer) == len(set(rollout_ids))
