"""Whether a request is one of this machine's own programs', as far as its headers tell.

That a connection comes from this machine says little: a page of elsewhere, open in a browser here, can send requests to
any port, and a proxy brings them from anywhere. This module knows headers alone; who must be of this machine, others
know.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def why_elsewhere(headers: Mapping[str, str]) -> str | None:
    """Why a request is not taken for one of this machine's own programs', and what to do; None if it is. `headers` has
    lower-case names."""
    if "forwarded" in headers or "x-forwarded-for" in headers:
        return "this request came through a proxy, from who knows where; a server behind one needs an admin key"
    # A browser names the page that asks in `Origin`, and in `Host` the name that led it here.
    for caller in (f"//{headers.get('host', '')}", headers.get("origin") or "//localhost"):
        if not _is_here(caller):
            return (
                f"a server without an admin key answers only this machine's own programs, not {caller!r}; set one, or "
                "send a key that was issued here"
            )
    return None


@functools.lru_cache(maxsize=256)
def _is_here(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname)
    except ValueError:
        return False
