"""Shared fixtures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import wheels
from tests.postgres import PostgresServer, find_binaries

# Keys of servers are written there.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="agl-state-")

# A busy machine is no defect.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


LONGEST = ("test_docs_run", "test_environments", "test_sweep", "test_shared", "test_secrets")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs PostgreSQL runs in `make ci`, which installs it. What takes minutes goes first, so
    that no process is left with it alone at the end."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))
    for item in items:
        if "postgres" in item.nodeid or "postgres_database" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, built once for all processes that test."""
    folder = tmp_path_factory.getbasetemp()
    return wheels.build(
        (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "wheel"
    )


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL server, shared by the session's tests; one that stops it starts it
    again."""
    binaries = find_binaries()
    if binaries is None:
        reason = (
            "no PostgreSQL server binaries (initdb, postgres); scripts/system_packages.sh "
            "installs them"
        )
        if os.environ.get("AGL_REQUIRE_POSTGRES"):
            pytest.fail(f"AGL_REQUIRE_POSTGRES is set, and there are {reason}")
        pytest.skip(reason)
    with PostgresServer(binaries) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def postgres_url(postgres_server: PostgresServer) -> str:
    """The server's URL, as its superuser."""
    return postgres_server.url


@pytest.fixture
def postgres_database(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database of the test's own."""
    with postgres_server.new_database() as url:
        yield url
