"""`agl server` as a process of its own, to be killed and started again.

This module knows the process and its port. It does not know what the store in it holds. Its calls
block; an async test hands them to a thread (`anyio.to_thread.run_sync`)."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PATIENCE_SECONDS: Final = 60.0
LONGEST_FILE: Final = resource.RLIM_INFINITY


class ServerProcess:
    """A server of the store at `address` (a file, or a `postgresql://` URL). `url` stays the same
    over restarts.

    `before` is Python that the process runs first. Leaving the `with` block kills the process."""

    def __init__(self, address: Path | str, log: Path, *, before: str = "") -> None:
        self._address = str(address)
        self._log = log
        self._before = before
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        program = f"{self._before}\nfrom agentlightning.cli.main import main; main()"
        command = [
            sys.executable,
            "-c",
            program,
            "server",
            "--port",
            str(self._port),
            "--store",
            self._address,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, env=os.environ
            )
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(
                    f"the server does not answer; the end of its log:\n{self.log()[-4000:]}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """`kill -9`: it has no chance to finish anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def proc(self) -> Path:
        """What Linux tells of the process."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}")

    def limit(self, kind: int, soft: int) -> None:
        """From now on it has at most so much of a resource (`resource.RLIMIT_…`)."""
        pid = int(self.proc.name)
        _, hard = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (soft, hard))

    def limit_files(self, size: int) -> None:
        """From now on it cannot write beyond the first `size` bytes of any file, as on a disk that
        is full."""
        self.limit(resource.RLIMIT_FSIZE, size)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def free_port() -> int:
    # Below the ports that systems give to outgoing connections: it stays free while the server is
    # down.
    for port in range(10000 + os.getpid() % 9000, 20000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port below 20000")
