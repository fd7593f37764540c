"""Running one program of whatever language to its end: its output bounded, and nothing of it left behind.

The program leads a session of its own, so that it can be ended with all it started. This module knows POSIX processes;
it knows neither agents nor rewards. There is no Windows behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.tracing.logs import Excerpt

GRACE_SECONDS: Final = 3.0  # between SIGTERM and SIGKILL; less than a runner waits for a cancelled agent
_DRAIN_SECONDS: Final = 1.0  # for what is still in the pipes of a program that has ended


class _Collector(asyncio.SubprocessProtocol):
    """Takes a program's output as it comes, and knows when the program has exited and when its pipes are closed."""

    def __init__(self, stdout: Excerpt, stderr: Excerpt) -> None:
        loop = asyncio.get_running_loop()
        self._streams = {1: stdout, 2: stderr}
        self._open = set(self._streams)
        self.exited: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._streams[fd].write(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open and not self.drained.done():
            self.drained.set_result(None)

    def process_exited(self) -> None:
        self.exited.set_result(None)


async def execute(
    arguments: Sequence[str],
    *,
    stdin: bytes,
    environment: Mapping[str, str],
    directory: Path | None,
    stdout: Excerpt,
    stderr: Excerpt,
) -> int:
    """Run a program and return its exit code, negative for the signal that ended it. ConfigError if it cannot start.

    When it has exited, whatever is left of its process group is killed. When the awaiting task is cancelled, the group
    gets SIGTERM and, `GRACE_SECONDS` later, SIGKILL. Only a grandchild in a session of its own escapes both."""
    # Not a pipe: programs may open /dev/stdin, seek in it, or leave it unread.
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        try:
            transport, collector = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Collector(stdout, stderr),
                *arguments,
                stdin=given,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # no such program, too long an argument, a NUL in one
            raise ConfigError(f"the program {arguments[0]!r} cannot be started: {error}") from None
    group = transport.get_pid()
    with contextlib.closing(transport):
        try:
            await asyncio.wait({collector.exited})
        except asyncio.CancelledError:
            _signal_group(group, signal.SIGTERM)
            await asyncio.wait({collector.exited}, timeout=GRACE_SECONDS)
            raise
        finally:
            _signal_group(group, signal.SIGKILL)
            await asyncio.wait({collector.exited, collector.drained}, timeout=_DRAIN_SECONDS)
        exit_code = transport.get_returncode()
    assert exit_code is not None  # it has exited
    return exit_code


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so of zombies
        os.killpg(group, number)
