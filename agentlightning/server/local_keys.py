"""Keys of servers on this machine, each in a file that its user alone can read, by which `agl`
finds them. The first to need the key of a port makes it, so that a runner may be started before its
trainer, and either again."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

from agentlightning.proxies import is_loopback


def local_key(url: str, *, make: bool = False) -> str | None:
    """The key of the server at `url`, if that is on this machine and there is one, or if it is to
    `make`. None where there is no port, or no home to keep it in: the key has to be given there."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        parts = urlsplit(url)
        if is_loopback(parts.hostname) and parts.port:
            path = _path(parts.port)
            if make and not path.exists():
                _write(path, secrets.token_urlsafe(32), anew=False)
            return path.read_text() or None
    return None


@contextlib.contextmanager
def offered_key(url: str, key: str) -> Generator[None]:
    """Let this user's programs find the key of the server at `url` as long as the block lasts."""
    with contextlib.suppress(OSError, RuntimeError):
        _write(_path(urlsplit(url).port or 0), key)
    yield
    with contextlib.suppress(OSError, RuntimeError):
        _path(urlsplit(url).port or 0).unlink(missing_ok=True)


def _write(path: Path, key: str, *, anew: bool = True) -> None:
    """In one go, so that nobody reads half a key; unless `anew`, whoever comes first wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        if anew:
            partial.replace(path)
        else:
            path.hardlink_to(partial)
    except FileExistsError:
        pass  # another was first
    finally:
        partial.unlink(missing_ok=True)


def _path(port: int) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "agentlightning", "keys", str(port))
