"""A private PostgreSQL server for tests: its own cluster in a temporary directory, on a free
loopback port.

This module knows the server's programs, processes and databases. It does not know what a store
keeps in them. Its calls block; an async test hands them to a thread (`anyio.to_thread.run_sync`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, Literal

import psycopg
from psycopg import sql

SUPERUSER: Final = "agentlightning"
# Below the ports that systems give to outgoing connections: the port stays free while the server is
# down.
PORTS: Final = range(20000, 30000)
PATIENCE_SECONDS: Final = 60.0
LAUNCHES: Final = 3
SIGNALS: Final = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

StopMode = Literal["smart", "fast", "immediate"]


def find_binaries() -> Path | None:
    """The directory with `initdb` and `postgres`: the newest of Debian's, else that on the PATH;
    None without one."""
    installed = [
        path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal()
    ]
    on_path = shutil.which("initdb")
    candidates = sorted(installed, key=lambda path: int(path.parent.name), reverse=True)
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)
    return next(
        (
            path
            for path in candidates
            if (path / "initdb").exists() and (path / "postgres").exists()
        ),
        None,
    )


class PostgresServer:
    """One cluster and, between `start` and `stop`, the server on it. `url` stays the same over
    restarts.

    Commits are as durable as in production (fsync on) and text sorts by a language's rules, as in
    most installations. Leaving the `with` block ends the server and removes the cluster."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._process: subprocess.Popen[Any] | None = None
        self._user = _unprivileged_user()
        self._directory = Path(tempfile.mkdtemp(prefix="agl-postgres-"))
        self._log = self._directory / "log"
        self._password = secrets.token_hex(16)
        self._port = _free_port()
        try:
            self._make_cluster()
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop("immediate")
        shutil.rmtree(self._directory)

    @property
    def url(self) -> str:
        """Of the database `postgres`, as the superuser."""
        return self._url_of("postgres")

    def start(self) -> None:
        """Start unless it runs, and wait until it answers."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        launches = 0
        while not self._answers():
            if self._process is None or self._process.poll() is not None:
                # A killed server's children can hold its shared memory for a moment.
                if launches == LAUNCHES and "still in use" not in self.log()[-1000:]:
                    raise AssertionError(
                        f"PostgreSQL ended; the end of its log:\n{self.log()[-2000:]}"
                    )
                launches = min(launches + 1, LAUNCHES)
                self._launch()
            if time.monotonic() > give_up:
                raise AssertionError(
                    f"PostgreSQL does not answer; the end of its log:\n{self.log()[-2000:]}"
                )
            time.sleep(0.05)

    def stop(self, mode: StopMode = "fast") -> None:
        """Shut down and wait for it: "smart" waits for clients to leave, "fast" ends their
        connections, "immediate" does so without a checkpoint. Nothing happens if it does not
        run."""
        if self._process is not None:
            self._process.send_signal(SIGNALS[mode])
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def kill(self) -> None:
        """Kill it without warning. Its children end by themselves, at the latest with the statement
        they execute."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @contextlib.contextmanager
    def new_database(self) -> Generator[str]:
        """The URL of a fresh, empty database, which is dropped afterwards, whoever is still
        connected. Starts the server if a test left it stopped."""
        self.start()
        name = f"test_{secrets.token_hex(6)}"
        self._administer(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield self._url_of(name)
        finally:
            self.start()
            self._administer(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def _url_of(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self._port}/{database}"

    def _administer(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        try:
            psycopg.connect(self.url, connect_timeout=10).close()
        except psycopg.OperationalError:
            return False
        return True

    def _make_cluster(self) -> None:
        password = self._directory / "password"
        password.write_text(self._password)
        for path in (self._directory, password):
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        version = subprocess.run(
            [self._binaries / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        major = int(re.findall(r"\d+", version.stdout)[0])
        collation = ["--locale-provider=icu", "--icu-locale=en-US"] if major >= 15 else []
        command = [
            *(
                self._binaries / "initdb",
                "--pgdata",
                self._directory / "data",
                "--no-sync",
                "--no-instructions",
            ),
            *("--username", SUPERUSER, "--pwfile", password, "--auth", "scram-sha-256"),
            *("--encoding", "UTF8", "--locale", "C", *collation),
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **self._as_user()
        )
        assert done.returncode == 0, f"initdb failed:\n{done.stdout}"

    def _launch(self) -> None:
        command = [
            *(self._binaries / "postgres", "-D", self._directory / "data"),
            *("-p", str(self._port), "-k", self._directory, "-c", "listen_addresses=127.0.0.1"),
        ]
        with self._log.open("ab") as log:
            # In a session of its own, so that Ctrl-C reaches the tests and not the server below
            # them.
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **self._as_user(),
            )

    def _as_user(self) -> dict[str, Any]:
        # Nothing of the caller's settings: PG* variables and locales would change what the server
        # does and says.
        options: dict[str, Any] = {
            "cwd": self._directory,
            "env": {"PATH": os.defpath, "LC_ALL": "C"},
        }
        if os.geteuid() == 0:
            options |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return options


def _unprivileged_user() -> pwd.struct_passwd:
    """Who the server runs as: the caller, or, as PostgreSQL refuses root, a user made for such
    purposes."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError(f"no free port among 100 of {PORTS.start} to {PORTS.stop}")
