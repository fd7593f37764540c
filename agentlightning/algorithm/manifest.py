"""The manifest of a run: everything needed to repeat it, gathered when it starts, and compared when it goes on."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore

PACKAGES = (
    "agent-lightning-next",
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "numpy",
    "openai",
    "aiohttp",
    "msgspec",
)


def make_manifest(
    *, config: Mapping[str, Any], seed: int, train_tasks: Sequence[Any], val_tasks: Sequence[Any]
) -> dict[str, Any]:
    """Resolved config, code commit, package versions, hashes of the data, seed, hardware; JSON-ready."""
    return {
        "config": _plain(config),
        **_surroundings(),
        "seed": seed,
        "command": sys.argv,
        "data": {"train": fingerprint(train_tasks), "val": fingerprint(val_tasks)},
    }


def differences(manifest: Mapping[str, Any]) -> list[str]:
    """What a run of this manifest would meet otherwise here and now: code, packages, machine. One line each."""
    told: list[str] = []
    for what, now in _surroundings().items():
        before = manifest.get(what)
        if isinstance(before, dict) and isinstance(now, dict):
            names = [*dict.fromkeys([*before, *now])]
            told += [
                f"{what}: {name} was {before.get(name)}, is {now.get(name)}"
                for name in names
                if before.get(name) != now.get(name)
            ]
        elif before != now:
            told.append(f"{what}: was {before}, is {now}")
    return told


def fingerprint(tasks: Sequence[Any]) -> dict[str, Any]:
    """How many tasks, and a hash of them all."""
    encoded = msgspec.json.encode(list(tasks), enc_hook=str, order="sorted")
    return {"tasks": len(tasks), "sha256": hashlib.sha256(encoded).hexdigest()}


def _surroundings() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
    }


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str, str_keys=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the working directory, where it is a git checkout and git is installed; with `-dirty` where files
    were changed since."""
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        answer = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


async def check_data(store: LightningStore, run_id: str, manifest: Mapping[str, Any]) -> None:
    """ConfigError where a run is resumed with other tasks than it began with."""
    for run in await store.query_runs():
        for name, began_with in run.manifest.get("data", {}).items():
            if run.run_id == run_id and began_with != manifest["data"][name]:
                raise ConfigError(
                    f"the {name} dataset is not the one this run began with; resume with that one, or start a new run"
                )
