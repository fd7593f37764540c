"""A run's directory, held by one process at a time: `run.json`, the run file that repeats it,
store, checkpoints and pictures; and the run's manifest."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import yaml

from agentlightning.errors import ConfigError, InUseError
from agentlightning.store.base import LightningStore
from agentlightning.store.redaction import settings_without_secrets

try:
    import fcntl
except ImportError:
    raise ConfigError(
        "training needs Linux or macOS; on Windows, install and run agentlightning in WSL2"
    ) from None

MARK = "run.json"
RUN_FILE = "run.yaml"
START = "start"  # folder of the policy that training starts from, where the run made it itself
# held by the run's process; its text is the URL of the server that has the run's store
_LOCK = ".lock"
_OF_THE_START = {
    _LOCK,
    RUN_FILE,
    START,
    *(f"store.sqlite{ending}" for ending in ("", "-owner", "-shm", "-wal")),
}

_OF_THE_RUN = {
    *(
        *_OF_THE_START,
        MARK,
        "result.json",
        "metrics.jsonl",
        "batches.jsonl",
        "fsdp.log",
        "vllm.log",
    ),
    *("checkpoints", "published", "prompts", "tensorboard", "model", "vllm-model"),
}


class RunMark(msgspec.Struct):
    """The contents of `run.json`: which run of the store is here."""

    run_id: str
    kind: str
    seed: int = 0


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, held by this process."""

    path: Path
    mark: RunMark
    resumed: bool

    def keep(self, run_file: Mapping[str, Any]) -> None:
        """Write the run file that repeats this run, if it is not there yet."""
        if not (self.path / RUN_FILE).exists():
            (self.path / RUN_FILE).write_text(
                yaml.safe_dump(dict(run_file), sort_keys=False), encoding="utf-8"
            )

    @contextmanager
    def served_at(self, url: str) -> Generator[None]:
        """Let other processes find the server that has the run's store, as long as the block
        lasts."""
        (self.path / _LOCK).write_text(url, encoding="utf-8")
        try:
            yield
        finally:
            (self.path / _LOCK).write_text("", encoding="utf-8")

    def forget(self) -> None:
        """The run did not start: leave the directory to the next one."""
        if not self.resumed:
            (self.path / MARK).unlink(missing_ok=True)


@contextmanager
def run_directory(
    root: str | Path, kind: str, *, named: bool, resume: bool, seed: int = 0
) -> Generator[RunDirectory]:
    """Create or find the directory of a run, and lock it against other processes.

    Args: root: the directory of this run or, with `named=False`, the folder in which each run gets
        a directory. resume: continue the run found here (with `named=False`, the newest) instead of
        starting one. seed: of the run; a run is resumed with its own seed.

    ConfigError if the directory cannot be written, is in use, has a run although none was asked
    for, or has none to resume, or one with another seed."""
    path = _choose(Path(root).expanduser(), kind, named=named, resume=resume)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("ab")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {path}: {error.strerror}. Choose another directory"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUseError(
                f"another process is using {path}; wait for it, or choose another directory"
            ) from None
        if resume:
            mark = read_mark(path)
            if mark.seed != seed:
                raise ConfigError(
                    f"the run in {path} was started with seed {mark.seed}, not {seed}; resume "
                    "with that"
                )
        else:
            name = path.name if path.name.isidentifier() else "run"
            mark = RunMark(run_id=f"{name}-{time.time_ns():x}", kind=kind, seed=seed)
            (path / MARK).write_bytes(msgspec.json.encode(mark))
        try:
            yield RunDirectory(path, mark, resume)
        finally:
            if (
                made
                and not (path / MARK).exists()
                and {file.name for file in path.iterdir()} <= _OF_THE_START
            ):
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):  # a folder of runs with other runs in it stays
                    for folder in made[1:]:
                        folder.rmdir()


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


def url_of_holder(directory: Path) -> str | None:
    """The URL of the server that has the store of the run in `directory`, while a process runs
    it."""
    with suppress(FileNotFoundError), (directory / _LOCK).open(encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return lock.read() or None
    return None


def read_mark(directory: Path) -> RunMark:
    """The mark of the run in `directory`. ConfigError if it cannot be read."""
    mark = directory / MARK
    try:
        return msgspec.json.decode(mark.read_bytes(), type=RunMark)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{mark} cannot be read: {error}; delete the directory or choose another"
        ) from None


def not_the_runs(directory: Path) -> list[str]:
    """The names in the directory of a run that no run writes there; the working directory is
    nobody's to delete."""
    names = sorted({file.name for file in directory.iterdir()} - _OF_THE_RUN)
    here = (
        []
        if directory.resolve() not in (Path.cwd(), *Path.cwd().parents)
        else ["the current folder"]
    )
    return names + here


PACKAGES = (
    *("agent-lightning-next", "torch", "transformers", "peft", "tokenizers", "numpy"),
    *("openai", "aiohttp", "msgspec"),
)


def make_manifest(
    config: Mapping[str, Any], seed: int, train_tasks: Sequence[Any], val_tasks: Sequence[Any]
) -> dict[str, Any]:
    """Settings and command without secrets, commit, package versions, hashes of the data, seed,
    hardware."""
    return {
        "config": settings_without_secrets(
            msgspec.to_builtins(config, enc_hook=str, str_keys=True)
        ),
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "seed": seed,
        "command": settings_without_secrets(sys.argv),
        "data": {"train": fingerprint(train_tasks), "val": fingerprint(val_tasks)},
    }


def fingerprint(tasks: Sequence[Any]) -> dict[str, Any]:
    """The number of tasks, and a hash of them."""
    encoded = msgspec.json.encode(
        msgspec.to_builtins(tasks, enc_hook=str, str_keys=True), order="sorted"
    )
    return {"tasks": len(tasks), "sha256": hashlib.sha256(encoded).hexdigest()}


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)


def _commit() -> str | None:
    """The commit of the working directory, if it is a git checkout, with `-dirty` if files have
    changed."""
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        answer = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


async def check_data(store: LightningStore, run_id: str, manifest: Mapping[str, Any]) -> None:
    """ConfigError if a run is resumed with other tasks."""
    for run in await store.query_runs():
        for name, began_with in run.manifest.get("data", {}).items():
            if run.run_id == run_id and began_with != manifest["data"][name]:
                raise ConfigError(
                    f"the {name} dataset is not the one this run began with; resume with that "
                    "one, or start a new run"
                )
