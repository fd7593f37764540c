"""Checkpoints of a training run: atomic directories that `transformers` loads and `--resume` continues from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.algorithm.rl.alarms import Earnings
from agentlightning.algorithm.rl.groups import GroupsState
from agentlightning.algorithm.rl.policies import Policies
from agentlightning.errors import ConfigError

STATE_FILE = "loop.json"


@dataclass
class LoopState:
    """The state of the loop. `policy_version` numbers the current weights, `first_version` the starting ones; `groups`
    are the running ones, `evaluation_seconds` the time of the first evaluation, `recent_reward` the mean training
    reward of the last steps."""

    step: int = 0
    policy_version: int = 0
    first_version: int = 0
    best_reward: float | None = None
    groups: GroupsState = field(default_factory=GroupsState)
    evaluation_seconds: float = 0.0
    recent_reward: float | None = None
    earnings: Earnings = field(default_factory=Earnings)
    algorithm: Any = None


class Checkpoints:
    """`step-000010/`, `step-000020/` … in one directory. The newest `keep` and the one with the highest training reward
    are kept. `best/` has weights only."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep

    def save(self, weights: Policies, state: LoopState) -> Path:
        """Write a checkpoint. A kill at any moment leaves the earlier ones intact."""
        path = self.directory / f"step-{state.step:06d}"
        if (path / STATE_FILE).is_file():  # this step's weights are saved already
            with explained("checkpoint", path):
                _write_state(path, state)
            return path
        self._write(weights, state, path.name)
        for old in {*self._steps()[: -self.keep]} - {_highest(self._steps())}:
            shutil.rmtree(old)
        return path

    def save_best(self, weights: Policies, state: LoopState) -> Path:
        return self._write(weights, state, "best", resumable=False)

    def save_candidate(self, weights: Policies, state: LoopState) -> Path:
        """Keep weights that are being evaluated while training continues."""
        return self._write(weights, state, "candidate", resumable=False)

    def promote_candidate(self, step: int, reward: float) -> bool:
        """Make this step's candidate the best. False if the candidate is of another step."""
        candidate = self.directory / "candidate"
        if not (candidate / STATE_FILE).is_file() or (state := _read_state(candidate)).step != step:
            return False
        state.best_reward = reward
        _write_state(candidate, state)
        self._replace(candidate, self.directory / "best")
        return True

    def latest(self) -> Path | None:
        steps = self._steps()
        return steps[-1] if steps else None

    def best(self) -> Path | None:
        """The best weights, by held-out reward or, if higher, by training reward."""
        best = self.directory / "best"
        return _highest([*([best] if (best / STATE_FILE).is_file() else []), *self._steps()])

    def restore(self, weights: Policies) -> LoopState | None:
        """Load the newest checkpoint; None if there is none."""
        for replaced in self.directory.glob(".*.replaced"):  # the process was killed between two renames
            target = self.directory / replaced.name[1 : -len(".replaced")]
            if not target.exists():
                os.replace(replaced, target)
        path = self.latest()
        if path is None:
            return None
        weights.load(path)
        state = _read_state(path)
        best = self.directory / "best"
        if (best / STATE_FILE).is_file():  # it may be newer than the checkpoint
            state.best_reward = _read_state(best).best_reward
        return state

    def _steps(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step-*") if (path / STATE_FILE).is_file())

    def _write(self, weights: Policies, state: LoopState, name: str, resumable: bool = True) -> Path:
        """Write into a hidden directory, then rename it: a named checkpoint is complete."""
        target, partial = self.directory / name, self.directory / f".{name}.partial"
        with explained("checkpoint", target):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                weights.save(partial, resumable=resumable)
                _write_state(partial, state)
                self._replace(partial, target)
            finally:  # frees its space on a full disk
                shutil.rmtree(partial, ignore_errors=True)
        return target

    @staticmethod
    def _replace(source: Path, target: Path) -> None:
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            os.replace(target, replaced)
        os.replace(source, target)
        shutil.rmtree(replaced, ignore_errors=True)


def _highest(places: list[Path]) -> Path | None:
    """The checkpoint with the highest recorded reward."""
    states = {path: _read_state(path) for path in places}
    rewards = {
        path: state.best_reward if path.name == "best" else state.recent_reward for path, state in states.items()
    }
    known = {path: reward for path, reward in rewards.items() if reward is not None}
    return max(known, key=known.__getitem__, default=None)


def _read_state(checkpoint: Path) -> LoopState:
    return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=LoopState)


def _write_state(checkpoint: Path, state: LoopState) -> None:
    partial = checkpoint / f".{STATE_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(state))
    os.replace(partial, checkpoint / STATE_FILE)


@contextmanager
def explained(what: str, target: Path) -> Generator[None]:
    """Turn write errors into a ConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {what} {target}: {error}. Free space or choose another --out; training can be "
            "resumed from the checkpoint before"
        ) from None
