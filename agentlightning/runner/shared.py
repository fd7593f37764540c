"""The parts of a process that all of its rollouts share and agents may change: paths of ours do not
depend on the working directory, a run puts back what its agents leave changed, and whoever mixes
rollouts is told."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def absolute_path(source: T) -> T | Path:
    """An absolute path, if something is there; anything else, such as a name on a hub or an object,
    unchanged."""
    if not isinstance(source, str | Path):
        return source
    path = Path(source).expanduser().absolute()
    return path if path.exists() else source


def working_directory() -> str:
    """The working directory; empty if it has been deleted."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


@contextlib.contextmanager
def process_state_restored() -> Generator[None]:
    """Put the working directory and the standard streams back at the end of the block."""
    directory = working_directory()
    with contextlib.redirect_stdout(sys.stdout), contextlib.redirect_stderr(sys.stderr):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.chdir(directory)


_SHARED: Final[dict[str, Callable[[], Any]]] = {
    "the working directory": working_directory,
    "sys.stdout": lambda: sys.stdout,
    "sys.stderr": lambda: sys.stderr,
    "the handler of Ctrl-C": lambda: signal.getsignal(signal.SIGINT),
}


class ChangeWatch:
    """Warns once of each thing that agents have changed for all rollouts of their process."""

    def __init__(self) -> None:
        self._before = {name: read() for name, read in _SHARED.items()}

    def check(self) -> None:
        """Warn of what an agent has left changed. Called after its run."""
        changed = [name for name, before in self._before.items() if _SHARED[name]() != before]
        for name in changed:
            del self._before[name]
        if changed:
            logger.warning(
                "an agent has changed %s, for all rollouts of this process. isolation='process' "
                "gives each its own",
                " and ".join(changed),
            )
