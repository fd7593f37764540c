"""The proxy that leads to a server, and the hosts that are this machine, which none leads to.

aiohttp can read the environment itself (`trust_env`), but starts two threads for each request, and
sends what is for this machine through the proxy as well."""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, getproxies_environment, proxy_bypass

from agentlightning.errors import ConfigError

_HERE: Final = ("localhost", "127.0.0.1", "::1")


def proxy_for(url: str) -> str | None:
    """The URL of the proxy that `HTTP_PROXY` or `HTTPS_PROXY` names for `url`; None for this
    machine and for the hosts in `NO_PROXY`. ConfigError for a proxy that does not speak HTTP, or
    whose URL cannot be read."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname) or proxy_bypass(parts.netloc):
        return None
    proxy = getproxies().get(parts.scheme)
    if not proxy:
        return None
    scheme, separator, _ = proxy.partition("://")
    if separator and scheme not in ("http", "https"):
        raise ConfigError(
            f"{parts.scheme.upper()}_PROXY names a proxy of the kind {scheme}; name one that "
            f"speaks HTTP, such as http://proxy:3128, or add {parts.hostname} to NO_PROXY"
        )
    proxy = proxy if separator else f"http://{proxy}"
    try:
        named = urlsplit(proxy)
        has_host = bool(named.hostname) and named.port != 0
    except ValueError:  # of a port that is no number, as part of a password is
        has_host = False
    if not has_host:
        raise ConfigError(
            f"{parts.scheme.upper()}_PROXY names no proxy: write it as http://proxy:3128, and a "
            "user or password before it with %23 for # and the like"
        )
    return proxy


def spare_this_machine() -> None:
    """Add this machine to `NO_PROXY`: agents and libraries find the gateway on it by the
    environment alone."""
    named = getproxies_environment()
    if not named.keys().isdisjoint(("http", "https", "all")) and not proxy_bypass(_HERE[1]):
        hosts = ",".join(filter(None, (named.get("no"), *_HERE)))
        os.environ.update(NO_PROXY=hosts, no_proxy=hosts)


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
