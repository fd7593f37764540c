"""The store over HTTP: the same interface, through an `agl server`.

One connection pool, created in the event loop that first uses it. Idempotent calls are repeated with jitter while the
server cannot be reached. `store.wire` writes and reads calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from agentlightning.errors import ConfigError, InvalidError, UnavailableError
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call
from agentlightning.store.codec import new_id
from agentlightning.store.wire import MSGPACK, Answer, RetryLaterError, Wire, error_of, form_of
from agentlightning.types import EnqueueRolloutRequest, FinishedRollouts

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 60.0
_SILENT_SECONDS: Final = 1.0  # after which a warning says that no answer comes
_POLL_SECONDS: Final = 25.0  # one long poll; shorter than the idle limits of common proxies
_ANSWER_SECONDS: Final = 60.0  # a server that is silent for longer counts as unreachable
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
# Nothing was sent: the connection was never made.
_UNSENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# Trying again would not help. (A handshake that fails may be that of a server that is just starting.)
_HOPELESS: Final = (aiohttp.ClientConnectorCertificateError, aiohttp.InvalidURL)


class LightningStoreClient(LightningStore):
    """The store of the server at `url`. `api_key` is one of its keys, or an attempt's. While the server cannot be
    reached, calls are repeated for `patience` seconds, then raise UnavailableError."""

    def __init__(self, url: str, api_key: str | None = None, *, patience: float = PATIENCE_SECONDS) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the store's URL is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/api/v1")
        self._calls = f"{_checked(self.url)}/api/v1"
        self._headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._patience, self._away = patience, False
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def perform(self, call: Call) -> Any:
        call = _named(call)
        if "timeout" not in call.__struct_fields__:
            return await self._ask(call)
        give_up = time.monotonic() + _patience_of(call)
        while True:
            remaining = max(0.0, give_up - time.monotonic())
            # The same ids in every poll: a lease whose answer was lost in one is handed out again in the next.
            call = msgspec.structs.replace(call, timeout=min(_POLL_SECONDS, remaining))
            answer = await self._ask(call)
            if time.monotonic() >= give_up or _is_complete(call, answer):
                return answer
            if isinstance(answer, FinishedRollouts):
                call = msgspec.structs.replace(call, cursor=answer.cursor)

    async def _ask(self, call: Call) -> Any:
        form = form_of(type(call))
        return form.result(await self._send_until_answered(form.request(call), call.method, call.repeatable()))

    async def _send_until_answered(self, request: Wire, name: str, may_repeat: bool) -> Answer:
        """The answer that ends the call. UnavailableError if none came in time, or repeating the call could do it
        twice; ConfigError if this URL cannot answer."""
        begin = time.monotonic()
        backoff = _FIRST_PAUSE
        while True:
            try:
                answer = await self._send(request)
                if answer.ends_the_call:
                    self._away = False
                    return answer
                fault, harmless = error_of(answer), may_repeat or answer.certain
            except _HOPELESS as error:
                raise ConfigError(
                    f"{self.url} cannot be connected to: {error}; check the URL (and for a certificate of your own "
                    "authority, SSL_CERT_FILE)"
                ) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                fault = UnavailableError(f"the server at {self.url} cannot be reached ({reason}); is it running?")
                harmless = may_repeat or isinstance(error, _UNSENT)
            pause = backoff * random.uniform(0.5, 1.0)
            if isinstance(fault, RetryLaterError):
                pause += fault.seconds
            elapsed = time.monotonic() - begin
            if not harmless:
                raise UnavailableError(f"{fault} {name} may have been carried out: look before you repeat it")
            if elapsed + pause > self._patience:
                raise UnavailableError(f"{fault} (tried for {elapsed:.1f} s of {self._patience:g} s)")
            if elapsed > _SILENT_SECONDS and not self._away:
                self._away = True
                logger.warning("%s (retrying for up to %g s)", fault, self._patience)
            await asyncio.sleep(pause)
            backoff = min(2 * backoff, _LONGEST_PAUSE)

    async def _send(self, request: Wire) -> Answer:
        session = self._session or self._open_session()
        url = URL(self._calls + request.path, encoded=True)
        limit = _TIMEOUT if not request.wait else _timeout(request.wait)
        response = await session.request(request.method, url, data=request.body, timeout=limit, allow_redirects=False)
        try:
            body = await response.read()
        finally:
            response.release()
        return Answer(
            url=self.url,
            status=response.status,
            content_type=response.content_type,
            body=body,
            retry_after=response.headers.get("Retry-After"),
            location=response.headers.get("Location"),
        )

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        return self._session


def _timeout(wait: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SECONDS, sock_read=wait + _ANSWER_SECONDS)


_TIMEOUT: Final = _timeout(0.0)


def _checked(url: str) -> str:
    """The URL, escaped. ConfigError if it names no host."""
    try:
        parsed = URL(url)
        if parsed.host:
            return str(parsed).rstrip("/")
    except ValueError:
        pass
    raise ConfigError(f"the store's URL is {url!r}; expected one such as http://127.0.0.1:8000")


def _named(call: Call) -> Call:
    """The call with all ids that the server would generate, so that it can be repeated without doing it twice."""
    given: dict[str, Any] = {
        field: new_id(prefix) for field, prefix in call.ids.items() if getattr(call, field) is None
    }
    if call.method == "enqueue_many_rollouts":
        requests: Sequence[EnqueueRolloutRequest] = getattr(call, "requests")  # noqa: B009 - it has this field
        given["requests"] = [
            request if request.rollout_id is not None else msgspec.structs.replace(request, rollout_id=new_id("ro"))
            for request in requests
        ]
    return msgspec.structs.replace(call, **given) if given else call


def _patience_of(call: Call) -> float:
    """How many seconds the caller wants to wait, however many long polls that takes."""
    timeout: float | None = getattr(call, "timeout", 0.0)
    if timeout is not None and math.isnan(timeout):
        raise InvalidError("timeout is not a number; give the seconds to wait")
    return math.inf if timeout is None else timeout


def _is_complete(call: Call, answer: Any) -> bool:
    """Whether an answer ends the wait, rather than one long poll."""
    if isinstance(answer, FinishedRollouts):
        return bool(answer.rollouts)
    rollout_ids: Sequence[str] | None = getattr(call, "rollout_ids", None)
    return bool(answer) if rollout_ids is None else len(answer) == len(set(rollout_ids))
