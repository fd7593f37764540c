"""Tells the log when this process runs out of memory, file descriptors or disk space, and when that
is over: one line each, however many requests fail in between."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from typing import Any, Final

_DESCRIPTORS: Final = "file descriptors"
_RESOURCES: Final = {
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
    errno.ENOMEM: "memory",
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk space",
}
_OVER_SECONDS: Final = 5.0  # without another error
_LOOK_SECONDS: Final = 1.0
_log: Final = logging.getLogger(__name__)
_last: Final[dict[str, float]] = {}
"""When each resource that this process lacks was last seen to be lacking."""


def lacking(error: BaseException | None) -> str | None:
    """The resource of this process whose shortage the error is, which the log is told of; None for
    other errors."""
    resource = None
    if isinstance(error, MemoryError):
        resource = "memory"
    elif isinstance(error, OSError):
        resource = _RESOURCES.get(error.errno or 0)
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        resource = "threads"
    if resource is not None:
        if resource not in _last:
            _log.error("this process has no more %s; what needs some fails until it has", resource)
        _last[resource] = time.monotonic()
    return resource


async def watch() -> None:
    """Look for file descriptors, which an event loop may lack without a word, and tell the log when
    a shortage is over; until cancelled. Shortages are no business of the loop's own log."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if lacking(context.get("exception")) is None:
            (before or type(loop).default_exception_handler)(loop, context)

    loop.set_exception_handler(handle)
    try:
        while True:
            try:
                os.close(os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                lacking(error)
            for resource, last in list(_last.items()):
                if time.monotonic() - last > _OVER_SECONDS:
                    del _last[resource]
                    _log.warning("this process has %s again", resource)
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        loop.set_exception_handler(before)
