"""`agl keys`: a secret is shown once, to whoever asked; afterwards a key can only be ended or replaced."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from agentlightning.cli.main import run
from agentlightning.store.sql import SqlStore
from agentlightning.types import ApiKey, Credential


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    asyncio.run(_make(path))
    return path


async def _make(path: Path) -> None:
    await (await SqlStore.open(path)).close()


@pytest.fixture
def agl(path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs one `agl keys` command on the store; its exit code, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code = run(["keys", *arguments, "--store", str(path)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return command


def opens(path: Path, secret: str, later: float = 0.0) -> Credential | None:
    """What the holder of a key may do some seconds later."""

    async def work() -> Credential | None:
        store = await SqlStore.open(path, clock=lambda: time.time() + later)
        credential = await store.find_key(api_key=secret)
        await store.close()
        return credential

    return asyncio.run(work())


def keys_of(agl) -> list[ApiKey]:
    code, out, _ = agl("list", "--json")
    assert code == 0
    return [ApiKey(**{**json.loads(line), "scopes": tuple(json.loads(line)["scopes"])}) for line in out.splitlines()]


def issue(agl, *options: str) -> tuple[str, str]:
    """(secret, key_id) of a new key."""
    known = {key.key_id for key in keys_of(agl)}
    code, out, _ = agl("issue", "ci", "--scope", "worker", *options)
    assert code == 0
    (new,) = (key.key_id for key in keys_of(agl) if key.key_id not in known)
    return out.strip(), new


def test_the_secret_is_alone_on_stdout_and_nowhere_else(agl, path: Path) -> None:
    code, out, err = agl("issue", "ci", "--scope", "read", "--scope", "grader", "--lifetime", "30d")
    secret = out.strip()
    assert code == 0 and out == f"{secret}\n" and secret.startswith("aglk-")
    assert secret not in err and "not shown again" in err
    credential = opens(path, secret)
    assert credential is not None and credential.scopes == ("read", "grader")
    assert opens(path, secret, later=31 * 86400) is None
    code, listed, _ = agl("list")
    assert "ci" in listed and "valid until" in listed and secret not in listed
    assert secret.encode() not in path.read_bytes()


def test_a_revoked_key_opens_nothing(agl, path: Path) -> None:
    secret, key_id = issue(agl)
    code, out, _ = agl("revoke", key_id)
    assert code == 0 and "revoked" in out
    assert opens(path, secret) is None
    assert agl("revoke", key_id)[0] == 0


def test_a_key_that_is_not_there_is_named(agl) -> None:
    code, _, err = agl("revoke", "key-none")
    assert code == 1 and "no key 'key-none'" in err
