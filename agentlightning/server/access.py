"""Who may do what: the admin key opens everything, an issued key what its scopes say, an attempt's
key only its own attempt's spans. A browser sends a key once, and a cookie that no script can read
stands for it afterwards.

This module knows keys, scopes and cookies. It does not know routes or what they do.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec
from starlette.requests import cookie_parser

from agentlightning.errors import ConflictError, ForbiddenError, UnavailableError
from agentlightning.gateway.attribution import api_key_of, why_elsewhere
from agentlightning.semconv import CALL, REWARD
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.records import audit
from agentlightning.tracing.dialects import speaks_for_gateway
from agentlightning.types import Credential, KeyScope, Span

_SCOPES: Final[tuple[KeyScope, ...]] = ("read", "grader", "worker", "trainer", "admin")
"""A key of each may call what those before it may. A grader reads, and writes spans with
rewards."""


class UnauthenticatedError(ForbiddenError):
    """No key, or a key that nobody issued (HTTP 401)."""


_ATTEMPT_TOTAL: Final = 256 << 20  # bytes of spans from an attempt's key
_COUNTED: Final = 100_000  # attempts, the latest
# that a span counts for besides, as it takes no less to store and to read
_SPAN_BYTES: Final = 2048
# of spans in a request; one of many small parts takes a hundred times that to read
ATTEMPT_BYTES: Final = 16 << 20
_SESSION_SECONDS: Final = 7 * 24 * 3600
_SESSIONS: Final = 1000  # the oldest end before there are more


@dataclass(frozen=True)
class Principal:
    """The rights of a caller. `attempt` is (rollout_id, attempt_id) of an attempt's own key."""

    name: str = "this machine"
    opens: frozenset[KeyScope] = frozenset(_SCOPES)
    attempt: tuple[str, str] | None = None
    rewards: bool = True

    @classmethod
    def of(cls, credential: Credential) -> Principal:
        opens = frozenset(
            _SCOPES[: 1 + max((_SCOPES.index(scope) for scope in credential.scopes), default=-1)]
        )
        rewards = credential.attempt is None or credential.rewards
        return cls(credential.name, opens, credential.attempt, rewards)

    def require(self, kind: type[StoreCall]) -> None:
        """ForbiddenError unless the caller may make calls of this kind."""
        if self.attempt is not None:
            if kind.method != "store_spans":
                raise ForbiddenError(
                    "an attempt's key can only add spans to its own attempt; this needs another key"
                )
        elif kind.scope not in self.opens:
            own = next((scope for scope in reversed(_SCOPES) if scope in self.opens), "no scope")
            article = "an" if kind.scope == "admin" else "a"
            raise ForbiddenError(
                f"this key ({self.name}, {own}) may not {kind.words()}; use {article} "
                f"{kind.scope} key"
            )

    def body_limit(self, limit: int, least_trusted: int = ATTEMPT_BYTES) -> int:
        """The bytes that this caller may send, at most `limit`: less from an agent, who is not
        trusted, and from who only reads."""
        return (
            limit if self.attempt is None and "grader" in self.opens else min(limit, least_trusted)
        )

    def refuses(self, span: Span) -> str | None:
        """Why the caller may not add a span with this content, or None: neither an attempt's key
        nor a grader's speaks for the gateway, and an attempt's gives rewards only if it was issued
        to."""
        if (self.attempt is not None or "worker" not in self.opens) and speaks_for_gateway(span):
            return (
                f"span {span.span_id} holds what only the gateway records; leave out `tokens` "
                f"(token ids) and names that begin with {CALL}"
            )
        if not self.rewards and (
            span.name == REWARD or any(name.startswith(_REWARDS) for name in span.attributes)
        ):
            return (
                f"span {span.span_id} holds a reward, which an agent's own key cannot give; use a "
                "grader's key, or one issued for the attempt with rewards=True"
            )
        return None

    def check(self, call: StoreCall) -> None:
        """Note an administrator's call in the log. ForbiddenError if it adds a span that the caller
        may not add."""
        if call.audited:
            audit(call.method, self.name, msgspec.structs.asdict(call))
        elif call.method == "store_spans":
            self.check_spans(getattr(call, "spans"))  # noqa: B009

    def check_spans(self, spans: Sequence[Span]) -> None:
        """ForbiddenError if one is of an attempt that the caller may not touch, or says what the
        caller may not."""
        for span in spans:
            if self.attempt is not None and (span.rollout_id, span.attempt_id) != self.attempt:
                raise ForbiddenError(
                    f"this key is for attempt {self.attempt[1]} of rollout {self.attempt[0]}; "
                    f"span {span.span_id} names attempt {span.attempt_id} of rollout "
                    f"{span.rollout_id}"
                )
            if reason := self.refuses(span):
                raise ForbiddenError(reason)


_REWARDS: Final = f"{REWARD}."


class Sessions:
    """The sessions of one server, in memory: they end when it does."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, float]] = {}  # by token, with when it ends; oldest first

    def begin(self, headers: Mapping[str, str], key: str, *, secure: bool) -> str:
        """The value of Set-Cookie that begins a session of `key`."""
        if len(self._keys) >= _SESSIONS:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(32)
        self._keys[token] = key, time.monotonic() + _SESSION_SECONDS
        return _cookie(headers, token, _SESSION_SECONDS, secure=secure)

    def end(self, headers: Mapping[str, str], *, secure: bool) -> str:
        """The value of Set-Cookie that ends the session of a request, if it has one."""
        self._keys.pop(_token(headers), None)
        return _cookie(headers, "", 0, secure=secure)

    def key_of(self, headers: Mapping[str, str]) -> str | None:
        """The key that a request's cookie stands for. ForbiddenError if another site's page sent
        it."""
        key, ends = self._keys.get(_token(headers), (None, 0.0))
        if key is None or time.monotonic() >= ends:
            return None
        require_same_origin(headers)
        return key


def require_same_origin(headers: Mapping[str, str]) -> None:
    """ForbiddenError if a browser says that a page from elsewhere asks. `SameSite` does not tell
    ports apart, and browsers send `Origin` with whatever can change something, and with what a
    script of another origin could read."""
    origin = headers.get("origin")
    elsewhere = origin is not None and urlsplit(origin).netloc != headers.get("host")
    if elsewhere or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ForbiddenError(
            f"a page of {origin or 'another site'} may not use this session; open the server's own"
        )


def _name(headers: Mapping[str, str]) -> str:
    """Cookies are shared by all ports of a host: each server has one of its own name."""
    return f"agl_session_{headers.get('host', '').rpartition(':')[2]}".replace(".", "_")


def _token(headers: Mapping[str, str]) -> str:
    return cookie_parser(headers.get("cookie", "")).get(_name(headers), "")


def _cookie(headers: Mapping[str, str], token: str, seconds: int, *, secure: bool) -> str:
    value = f"{_name(headers)}={token}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict"
    return f"{value}; Secure" if secure else value


class Access:
    """Reads a caller's scope from the headers. Without an `admin_key` every program of this machine
    is trusted, except that an issued or an attempt's key keeps its narrow scope, and that another
    site's page in a browser of this machine is not."""

    def __init__(self, store: LightningStore, admin_key: str | None) -> None:
        self._store = store
        self._admin_key = None if admin_key is None else _digest(admin_key)
        self._sent: dict[str, int] = {}  # bytes of spans, by attempt
        self.sessions = Sessions()

    def count_sent(self, scope: Principal, size: int = 0, spans: int = 0) -> None:
        """ForbiddenError once an attempt's key has sent more spans, by bytes and number, than an
        agent may since the server began."""
        if scope.attempt is None:
            return
        attempt_id = scope.attempt[1]
        self._sent[attempt_id] = sent = self._sent.pop(attempt_id, 0) + size + _SPAN_BYTES * spans
        if len(self._sent) > _COUNTED:
            del self._sent[next(iter(self._sent))]
        if sent > _ATTEMPT_TOTAL:
            raise ForbiddenError(
                f"attempt {attempt_id} has sent {sent:,} bytes of spans; {_ATTEMPT_TOTAL:,} are "
                "the most"
            )

    async def scope(self, headers: Mapping[str, str]) -> Principal:
        """UnauthenticatedError if a key is needed and the caller has none that is valid,
        ForbiddenError if none is and the caller is not of this machine."""
        key = api_key_of(headers) or self.sessions.key_of(headers)
        # Digests are compared: they are of one length, so that not even the key's length shows in
        # the time it takes.
        if (
            key
            and self._admin_key is not None
            and hmac.compare_digest(_digest(key), self._admin_key)
        ):
            return Principal("the admin key")
        credential = await self._store.find_key(key) if key else None
        if credential is not None:
            return Principal.of(credential)
        if self._admin_key is None:
            if (reason := why_elsewhere(headers)) is not None:
                raise ForbiddenError(reason)
            return Principal()
        raise UnauthenticatedError(
            "the key is not valid here; send one of this server's keys as `Authorization: Bearer "
            "…` (`agl`: AGL_KEY)"
            if key
            else "this server needs a key; send it as `Authorization: Bearer …` (`agl` takes it "
            "from AGL_KEY)"
        )

    async def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Who the caller is, if their key is valid; nobody else's name can be had by inventing
        keys."""
        try:
            scope = await self.scope(headers)
        except ConflictError:  # of a worker that holds no attempt, or several
            return _digest(api_key_of(headers) or self.sessions.key_of(headers) or "").hex()
        except (ForbiddenError, UnavailableError):
            return None
        return None if scope == Principal() else scope.name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
