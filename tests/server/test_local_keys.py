"""Keys of servers on this machine: found by the user's own programs, whoever is first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from agentlightning.server.local_keys import local_key, offered_key

URL = "http://127.0.0.1:8123"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_a_key_is_made_once_and_found_by_its_port_for_its_user_alone(state: Path) -> None:
    assert local_key(URL) is None
    key = local_key(URL, make=True)
    assert key
    assert local_key("http://localhost:8123/", make=True) == key
    assert local_key("http://127.0.0.1:8124") is None
    [file] = (state / "agentlightning" / "keys").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_whoever_starts_at_once_finds_one_key(state: Path) -> None:
    together = Barrier(4)

    def ask(port: int) -> str | None:
        together.wait()
        return local_key(f"http://127.0.0.1:{port}", make=True)

    with ThreadPoolExecutor(4) as pool:
        for port in range(9000, 9100):
            assert len(set(pool.map(ask, [port] * 4))) == 1
    assert all(file.name.isdecimal() for file in (state / "agentlightning" / "keys").iterdir())


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "http://127.0.0.1"]
)
def test_of_what_is_no_address_there_is_no_key(url: str) -> None:
    assert local_key(url, make=True) is None


def test_without_a_home_a_key_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert local_key(URL, make=True) is None
    with offered_key(URL, "a key"):
        assert local_key(URL) is None


def test_an_offered_key_replaces_what_a_killed_server_left_and_goes_with_its_own() -> None:
    left = local_key(URL, make=True)
    with offered_key(URL, "a key"):
        assert local_key(URL) == "a key" != left
    assert local_key(URL) is None
