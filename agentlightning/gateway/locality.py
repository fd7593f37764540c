"""Whether a request comes from a program on this machine, by its headers.

A local connection proves little: a web page can send requests to any port, and a proxy forwards from anywhere.
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
    """Why a request does not count as local, and what to do; None if it does. `headers` has lower-case names."""
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
