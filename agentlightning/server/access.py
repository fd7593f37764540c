"""Who may do what: the admin key opens everything, an attempt's key only its own attempt's spans.

This module knows keys and scopes. It does not know routes or what they do.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentlightning.errors import ForbiddenError
from agentlightning.store.base import LightningStore
from agentlightning.types import Span


class UnauthenticatedError(ForbiddenError):
    """No key, or one that nobody issued (HTTP 401)."""


@dataclass(frozen=True)
class Scope:
    """What a caller may touch: everything, or one attempt given as (rollout_id, attempt_id)."""

    attempt: tuple[str, str] | None = None

    def require_admin(self) -> None:
        """ForbiddenError unless the caller may touch everything."""
        if self.attempt is not None:
            raise ForbiddenError("an attempt's key can only add spans to its own attempt; this needs the admin key")

    def require_attempts(self, spans: Iterable[Span]) -> None:
        """ForbiddenError if a span belongs to an attempt that the caller may not touch."""
        if self.attempt is None:
            return
        for span in spans:
            if (span.rollout_id, span.attempt_id) != self.attempt:
                raise ForbiddenError(
                    f"this key is for attempt {self.attempt[1]} of rollout {self.attempt[0]}; span {span.span_id} "
                    f"names attempt {span.attempt_id} of rollout {span.rollout_id}"
                )


class Access:
    """Reads a caller's scope from the headers. Without an `admin_key` every program of this machine is trusted, except
    that an attempt's key keeps its narrow scope, and that another site's page in a browser of this machine is not."""

    def __init__(self, store: LightningStore, admin_key: str | None) -> None:
        self._store = store
        self._admin_key = admin_key

    async def scope(self, headers: Mapping[str, str]) -> Scope:
        """UnauthenticatedError if a key is needed and the caller has none that is valid, ForbiddenError if none is and
        the caller is not of this machine."""
        key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        if self._admin_key is not None and hmac.compare_digest(key.encode(), self._admin_key.encode()):
            return Scope()
        attempt = await self._store.verify_api_key(key) if key else None
        if attempt is not None:
            return Scope(attempt)
        if self._admin_key is None:
            _require_local(headers)
            return Scope()
        raise UnauthenticatedError(
            "the key is not valid here; send the server's admin key as `Authorization: Bearer …`"
            if key
            else "this server needs its admin key; send it as `Authorization: Bearer …`"
        )


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _require_local(headers: Mapping[str, str]) -> None:
    # A browser names the page that asks in `Origin`, and in `Host` the name that led it here.
    for caller in (f"//{headers.get('host', '')}", headers.get("origin") or "//localhost"):
        try:
            host = urlsplit(caller).hostname
        except ValueError:
            host = None
        if not is_loopback(host):
            raise ForbiddenError(
                f"a server without an admin key answers only this machine's own programs, not {caller!r}; set a key"
            )
