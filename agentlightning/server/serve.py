"""An application on a port: uvicorn inside the caller's event loop, without signal handlers of its
own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any, Final, TypeVar

import uvicorn
from starlette.applications import Starlette

from agentlightning import shortages
from agentlightning.errors import ConfigError
from agentlightning.proxies import is_loopback
from agentlightning.runner.signals import run_in_loop_thread, run_to_end
from agentlightning.server.guards import GuardedProtocol

T = TypeVar("T")

_GRACE_SECONDS: Final = 5
_IDLE_SECONDS: Final = 75


class HttpServer:
    """Serves `app` at `host` and `port` (0: any free port) between `start` and `stop`; also
    `async with`.

    A host that other machines can reach needs an app with an admin key: ConfigError otherwise. With
    `tls_cert` (PEM: the server's certificate, then the chain) and `tls_key` it speaks HTTPS
    alone."""

    def __init__(
        self,
        app: Starlette,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls_cert: Path | str | None = None,
        tls_key: Path | str | None = None,
    ) -> None:
        if not is_loopback(host) and not getattr(app.state, "protected", False):
            raise ConfigError(
                "without an admin key the server is only for this machine; set one (AGL_KEY) to "
                f"serve on {host}, or serve on 127.0.0.1"
            )
        self._app = app
        self._host = host
        self.port = port  # the real one once the server has started
        self._tls = _tls_context(tls_cert, tls_key)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where the server can be reached, such as `http://127.0.0.1:8000`; the real port once it
        has started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    async def start(self) -> None:
        """Listen. ConfigError if the port is taken or the host is not one of this machine's."""
        _allow_many_connections()
        listening = _listen(self._host, self.port)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_context_factory=(lambda config, default: tls) if (tls := self._tls) else None,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(
            self._server.serve([listening]), name=f"http server on {self.url}"
        )
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait([self._serving, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            await self._serving
        self._watching = asyncio.create_task(shortages.watch(), name="shortages")

    async def stop(self) -> None:
        """Take no more requests, answer long polls at once, give running requests a few seconds,
        then close."""
        if self._server is None or self._serving is None:
            return
        for stop_waiting in getattr(self._app.state, "stop_waiting", ()):
            stop_waiting()
        self._server.should_exit = True
        await self._serving
        if self._watching is not None:
            self._watching.cancel()
        self._server = None
        self._serving = None

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals belong to the program that embeds the server

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _tls_context(certificate: Path | str | None, key: Path | str | None) -> ssl.SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError(
            "TLS needs both a certificate and its private key: --tls-cert and --tls-key"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # With the empty password a key that needs one is refused, instead of asked for at the
        # terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{str(certificate)!r} and {str(key)!r} cannot be used for TLS: {error}; give a "
            "certificate chain and the unencrypted private key of its first certificate, in PEM"
        ) from None
    return context


def run_on_fastest_loop(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where it is installed (a tenth less CPU per call). Where an event
    loop runs already, as in a notebook, it waits for one in a thread of its own."""
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    return (run_in_loop_thread if is_loop_running() else run_to_end)(work, factory)


def is_loop_running() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _allow_many_connections() -> None:
    """Raise the soft limit on open files, often 1,024, to the hard one: each connection is one."""
    # Windows; macOS, whose kernel allows fewer
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(host: str, port: int) -> socket.socket:
    try:
        # Families in the order the resolver gives; create_server sets SO_REUSEADDR, so that a
        # restart need not wait.
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
        # Inherited by each connection. Without it the end of an answer waits up to 40 ms for the
        # caller's ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken by another program; stop that program, or pass "
                "--port 0 for any free port"
            ) from None
        raise ConfigError(
            f"cannot serve on {host} port {port}: {error.strerror or error}"
        ) from None
    except OverflowError:
        raise ConfigError(f"port {port} does not exist; it must be between 0 and 65535") from None
