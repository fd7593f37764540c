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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.tracing.logs import KEPT_BYTES, Excerpt, LogStream

GRACE_SECONDS: Final = 3.0  # between SIGTERM and SIGKILL; less than a runner waits for a cancelled agent
_PIPE_BYTES: Final = 65536


class Output:
    """One of a program's streams: taken whenever there is some, so that a flood blocks nobody, and kept in part."""

    def __init__(self, name: LogStream, kept_bytes: int = KEPT_BYTES) -> None:
        self.name: LogStream = name
        self._kept_bytes = kept_bytes
        self._excerpt = Excerpt(kept_bytes)
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._open = self._write_end_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._take)

    def taken(self) -> str:
        """What was written since the last time, with all that is in the pipe at this moment."""
        self._take()
        excerpt, self._excerpt = self._excerpt, Excerpt(self._kept_bytes)
        return excerpt.text()

    def close_write_end(self) -> None:
        """From here on only the program has that end."""
        if self._write_end_open:
            self._write_end_open = False
            os.close(self.write_end)

    def close(self) -> None:
        """Take what is in the pipe at this moment, and nothing after it."""
        self.close_write_end()
        self._take()
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)

    def _take(self) -> None:
        if self._open:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._read_end, _PIPE_BYTES)
                self._excerpt.write(data)
                if not data:  # nobody has the other end any more
                    self._loop.remove_reader(self._read_end)


@dataclass
class Executable:
    """A program that runs. `exited` has its exit code, negative for the signal that ended it."""

    process: asyncio.subprocess.Process
    outputs: Sequence[Output]
    exited: asyncio.Future[int]

    @classmethod
    async def start(cls, arguments: Sequence[str], outputs: Sequence[Output], **options: Any) -> Executable:
        """Start it with stdout and stderr for `outputs`, which are closed where it cannot start, and further `options`
        of `asyncio.create_subprocess_exec`. Raises what that raises."""
        stdout, stderr = (output.write_end for output in outputs)
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdout=stdout, stderr=stderr, start_new_session=True, **options
            )
        except BaseException:  # cancelled, too
            for output in outputs:
                output.close()
            raise
        for output in outputs:
            output.close_write_end()
        return cls(process, outputs, asyncio.ensure_future(process.wait()))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, and all of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so of zombies
            os.killpg(self.process.pid, number)

    async def end(self, grace_seconds: float) -> None:
        """End it and all of its group: SIGTERM if it runs, and after `grace_seconds` SIGKILL for whatever is left."""
        try:
            if not self.exited.done():
                self.signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=grace_seconds)
        finally:
            self.signal(signal.SIGKILL)
            for output in self.outputs:
                output.close()
        await asyncio.wait({self.exited})


async def execute(
    arguments: Sequence[str],
    outputs: Sequence[Output],
    *,
    stdin: bytes,
    environment: Mapping[str, str],
    directory: Path | None,
) -> int:
    """Run a program and return its exit code, negative for the signal that ended it. ConfigError if it cannot start.

    When it has exited, whatever is left of its process group is killed. When the awaiting task is cancelled, the group
    gets SIGTERM and, `GRACE_SECONDS` later, SIGKILL. Only a grandchild in a session of its own escapes both. Where it
    could not start, `outputs` may still be open: whoever made them closes them."""
    # Not a pipe: programs may open /dev/stdin, seek in it, or leave it unread.
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        try:
            program = await Executable.start(arguments, outputs, stdin=given, env=environment, cwd=directory)
        except (OSError, ValueError) as error:  # no such program, too long an argument, a NUL in one
            raise ConfigError(f"the program {arguments[0]!r} cannot be started: {error}") from None
    try:
        return await asyncio.shield(program.exited)
    finally:
        await program.end(GRACE_SECONDS)
