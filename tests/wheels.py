"""The package as its users have it: a wheel, in an environment of its own, outside the clone."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

CLONE = Path(__file__).parents[1]


def answer(*command: object, cwd: Path, code: int = 0) -> str:
    """What a command prints, outside the clone and without its path."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(folder: Path) -> Path:
    """The wheel of the clone, which is built in this folder unless another process has."""
    folder.mkdir(exist_ok=True)
    with FileLock(folder / ".lock"):
        if not any(folder.glob("*.whl")):
            answer(
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "-w",
                folder,
                CLONE,
                cwd=folder,
            )
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path, packages: Sequence[Path] = ()) -> Path:
    """A new environment in `folder` with the wheel, and all other packages of this environment and
    of `packages` (folders called site-packages). Returns its `bin`."""
    answer(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    answer(*pip, wheel, cwd=folder.parent)
    # Of these folders no .pth file is read, and so not the one that leads to the clone.
    return _beside(folder, [*packages, Path(sysconfig.get_path("purelib"))])


def install_fresh(wheel: Path, folder: Path, packages: Sequence[Path] = ()) -> Path:
    """A new environment in `folder` with the wheel and what it requires, downloaded in the tested
    versions, and these packages besides. Returns its `bin`."""
    subprocess.run(["scripts/setup.sh", folder, f"{wheel}[all]"], cwd=CLONE, check=True)
    return _beside(folder, packages)


def _beside(folder: Path, packages: Sequence[Path]) -> Path:
    home = next((folder / "lib").glob("python*/site-packages"))
    (home / "others.pth").write_text("\n".join(map(str, packages)))
    return folder / "bin"
