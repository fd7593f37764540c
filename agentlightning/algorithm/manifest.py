"""The manifest of a run: everything needed to repeat it, gathered when it starts."""

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

PACKAGES = ("agent-lightning-next", "torch", "transformers", "tokenizers", "numpy", "openai", "aiohttp", "msgspec")


def make_manifest(
    *, config: Mapping[str, Any], seed: int, train_tasks: Sequence[Any], val_tasks: Sequence[Any]
) -> dict[str, Any]:
    """Resolved config, code commit, package versions, hashes of the data, seed, hardware; JSON-ready."""
    return {
        "config": _plain(config),
        "seed": seed,
        "command": sys.argv,
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "data": {"train": _fingerprint(train_tasks), "val": _fingerprint(val_tasks)},
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
    }


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str, str_keys=True)


def _fingerprint(tasks: Sequence[Any]) -> dict[str, Any]:
    encoded = msgspec.json.encode(list(tasks), enc_hook=str, order="sorted")
    return {"tasks": len(tasks), "sha256": hashlib.sha256(encoded).hexdigest()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the working directory, where it is a git checkout and git is installed."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
