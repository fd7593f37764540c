"""The files of the page, which `npm run build` in `dashboard/` writes into this package.

Knows package files; does not know HTTP.
"""

from __future__ import annotations

import functools
import importlib.resources
import mimetypes
import re
from importlib.resources.abc import Traversable

from agentlightning.errors import NotFoundError, UnavailableError

_STATIC: Traversable = importlib.resources.files("agentlightning.dashboard") / "static"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@functools.cache
def index() -> bytes:
    """The page itself. UnavailableError where this installation lacks it."""
    try:
        return (_STATIC / "index.html").read_bytes()
    except FileNotFoundError:
        raise UnavailableError(
            "this installation lacks the dashboard's page: build it (`npm ci && npm run build` in dashboard/ of the "
            "source), or install a released wheel; everything else of this server works without it"
        ) from None


@functools.lru_cache(maxsize=256)
def asset(name: str) -> tuple[bytes, str]:
    """A file that the page refers to, and its media type. NotFoundError where there is none of this name."""
    file = _STATIC / "assets" / name
    if not _NAME.fullmatch(name) or not file.is_file():
        raise NotFoundError(f"the dashboard has no file {name!r}; reload the page")
    return file.read_bytes(), mimetypes.guess_type(name)[0] or "application/octet-stream"
