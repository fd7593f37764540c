"""A run's directory: `run.json`, the store, checkpoints and pictures of one run, held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from agentlightning.errors import ConfigError, InUseError

MARK = "run.json"
START = "start"  # folder of the policy that training starts from, where the run made it itself


class RunMark(msgspec.Struct):
    """What `run.json` says: which run of the store lives here."""

    run_id: str
    kind: str
    seed: int = 0


class RunDirectory:
    """Use as a context manager: opening creates or finds the directory and locks it against a second process.

    Args:
        root: the directory of this run, or, with `named=False`, the folder in which runs get directories of their own.
        resume: continue the run found here (the newest one, with `named=False`) instead of starting one.
        seed: that of the run; a run is resumed with the seed it was started with.

    Raises ConfigError where the directory cannot be written, holds a run that was not asked for, holds none to
    resume or one of another seed, or is in use."""

    def __init__(self, root: str | Path, kind: str, *, named: bool, resume: bool, seed: int = 0) -> None:
        self.kind = kind
        self.seed = seed
        self.path = _choose(Path(root).expanduser(), kind, named=named, resume=resume)
        self.resumed = resume
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror}. Choose another directory") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise InUseError(
                f"another process is using {self.path}; wait for it, or choose another directory"
            ) from None
        mark = self.path / MARK
        if self.resumed:
            self.mark = read_mark(self.path)
            if self.mark.seed != self.seed:
                self.close()
                raise ConfigError(
                    f"the run in {self.path} was started with seed {self.mark.seed}, not {self.seed}; resume with that"
                )
        else:
            name = self.path.name if self.path.name.isidentifier() else "run"
            self.mark = RunMark(run_id=f"{name}-{time.time_ns():x}", kind=self.kind, seed=self.seed)
            mark.write_bytes(msgspec.json.encode(self.mark))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forget(self) -> None:
        """The run did not come to begin: leave the directory to the next one."""
        if not self.resumed:
            (self.path / MARK).unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _choose(root: Path, kind: str, *, named: bool, resume: bool) -> Path:
    if named:
        if resume and not (root / MARK).is_file():
            raise ConfigError(f"{root} holds no run to resume; start it without resume")
        if not resume and (root / MARK).is_file():
            raise ConfigError(f"{root} holds a run already; resume it, or choose another directory")
        return root
    if not resume:
        return root / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    found = sorted(root.glob(f"*/{MARK}"), key=lambda mark: mark.stat().st_mtime)
    matching = [mark.parent for mark in found if read_mark(mark.parent).kind == kind]
    if not matching:
        raise ConfigError(f"no {kind} run to resume below {root}; start one without resume")
    return matching[-1]


def read_mark(directory: Path) -> RunMark:
    """What the run in `directory` says of itself. ConfigError where it cannot be read."""
    mark = directory / MARK
    try:
        return msgspec.json.decode(mark.read_bytes(), type=RunMark)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{mark} cannot be read: {error}; delete the directory or choose another") from None
