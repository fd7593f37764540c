"""Sessions of browsers: a key is sent once, and a cookie that no script can read stands for it afterwards.

This module knows cookies and which page a browser says that it asks for. It does not know what keys may do; a key that
is revoked ends its sessions, as it is looked at anew in every request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import cookie_parser

from agentlightning.errors import ForbiddenError

_LIFETIME: Final = 7 * 24 * 3600  # seconds
_MOST: Final = 1000  # the oldest end before there are more


class Sessions:
    """The sessions of one server, in memory: they end when it does."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, float]] = {}  # by token, with when it ends; oldest first

    def begin(self, headers: Mapping[str, str], key: str, *, secure: bool) -> str:
        """The value of Set-Cookie that begins a session of `key`."""
        if len(self._keys) >= _MOST:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(32)
        self._keys[token] = key, time.monotonic() + _LIFETIME
        return _cookie(headers, token, _LIFETIME, secure=secure)

    def end(self, headers: Mapping[str, str], *, secure: bool) -> str:
        """The value of Set-Cookie that ends the session of a request, if it has one."""
        self._keys.pop(_token(headers), None)
        return _cookie(headers, "", 0, secure=secure)

    def key_of(self, headers: Mapping[str, str]) -> str | None:
        """The key that a request's cookie stands for. ForbiddenError if another site's page sent it."""
        key, ends = self._keys.get(_token(headers), (None, 0.0))
        if key is None or time.monotonic() >= ends:
            return None
        require_same_origin(headers)
        return key


def require_same_origin(headers: Mapping[str, str]) -> None:
    """ForbiddenError if a browser says that a page from elsewhere asks. `SameSite` does not tell ports apart, and
    browsers send `Origin` with whatever can change something, and with what a script of another origin could read."""
    origin = headers.get("origin")
    elsewhere = origin is not None and urlsplit(origin).netloc != headers.get("host")
    if elsewhere or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ForbiddenError(f"a page of {origin or 'another site'} may not use this session; open the server's own")


def _name(headers: Mapping[str, str]) -> str:
    """Cookies are shared by all ports of a host: each server has one of its own name."""
    return f"agl_session_{headers.get('host', '').rpartition(':')[2]}".replace(".", "_")


def _token(headers: Mapping[str, str]) -> str:
    return cookie_parser(headers.get("cookie", "")).get(_name(headers), "")


def _cookie(headers: Mapping[str, str], token: str, seconds: int, *, secure: bool) -> str:
    value = f"{_name(headers)}={token}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict"
    return f"{value}; Secure" if secure else value
