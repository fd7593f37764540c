"""The folder in which a program runs. Programs such as coding agents write its path into their
prompts, so attempts that walk the same calls again find the same path, one after another."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

from agentlightning.types import Rollout

_PREFIX: Final = "agentlightning-"
_LOCK: Final = ".lock"


@contextlib.contextmanager
def own_folder(rollout: Rollout) -> Generator[Path]:
    """An empty folder for an attempt, which is deleted at the end: that of the rollout, or of the
    source that it is a fork of; while another attempt is there, one with a random name."""
    walked = rollout.rollout_id if rollout.source is None else rollout.source.rollout_id
    name = _PREFIX + hashlib.blake2b(walked.encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / name
    with contextlib.ExitStack() as stack:
        if not _take(stack, folder):
            made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
        yield folder


def _take(stack: contextlib.ExitStack, folder: Path) -> bool:
    """Make the folder, or empty that of an attempt whose process was killed. False while it is in
    use, or if it is somebody else's."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        found = folder.lstat()
        if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return False
        lock = stack.enter_context((folder / _LOCK).open("ab"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # who left meanwhile has deleted the file
        if (folder / _LOCK).stat().st_ino != os.fstat(lock.fileno()).st_ino:
            return False
    except OSError:
        return False
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name != _LOCK:
            left.unlink(missing_ok=True)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return True
