"""A server process that runs out of what the system gives it: it says so once, refuses, and goes on
by itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.store.server_process import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="limits of another process can be set on Linux"
    ),
]
LOOPS = {"uvloop": "", "asyncio": "import sys; sys.modules['uvloop'] = None"}


def check_told(server: ServerProcess, resource_name: str) -> None:
    """Within some seconds the log has the two lines about a shortage, and no other, and the server
    is ready."""
    give_up = time.monotonic() + 30
    while f"this process has {resource_name} again" not in server.log():
        assert time.monotonic() < give_up, server.log()[-2000:]
        time.sleep(0.1)
    told = [line for line in server.log().splitlines() if "this process has" in line]
    assert len(told) == 2 and f"has no more {resource_name}" in told[0], server.log()[-2000:]
    assert "Traceback" not in server.log() and len(server.log().splitlines()) < 10
    with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_without_file_descriptors_says_so_once_and_goes_on_when_it_has_some(
    tmp_path: Path, loop: str
) -> None:
    with ServerProcess(tmp_path / "store.db", tmp_path / "log", before=LOOPS[loop]) as server:
        server.limit(resource.RLIMIT_NOFILE, len(list((server.proc / "fd").iterdir())) + 5)
        address = urlsplit(server.url)
        with contextlib.ExitStack() as stack:
            held = [
                stack.enter_context(socket.create_connection((address.hostname, address.port)))
                for _ in range(50)
            ]
            time.sleep(3)
            held[0].settimeout(10)
            held[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert held[0].recv(15) == b"HTTP/1.1 200 OK", "those it has are answered"
        check_told(server, "file descriptors")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_without_memory_refuses_says_so_once_and_goes_on(
    tmp_path: Path, loop: str
) -> None:
    message = {"role": "user", "content": "x" * 50_000_000}
    body = json.dumps({"model": "policy", "messages": [message]}).encode()
    with ServerProcess(tmp_path / "store.db", tmp_path / "log", before=LOOPS[loop]) as server:
        found = re.search(r"VmSize:\s+(\d+) kB", (server.proc / "status").read_text())
        assert found
        server.limit(resource.RLIMIT_AS, int(found[1]) * 1024 + 100_000_000)

        def post(path: str) -> int | None:
            address = urlsplit(server.url)
            connection = http.client.HTTPConnection(
                address.hostname or "", address.port, timeout=60
            )
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
                return connection.getresponse().status
            except OSError:  # it closed the connection before it had read all
                return None
            finally:
                connection.close()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(post, ["/v1/chat/completions", "/api/v1/rollouts/query"] * 4))
        assert set(answers) <= {503, None}
        check_told(server, "memory")
