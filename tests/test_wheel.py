"""A built wheel works outside the clone, on every Python that this machine has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def interpreter(version: str) -> str:
    """The Python of this version on the PATH or among pyenv's; skips the test where there is none."""
    for found in (
        shutil.which(f"python{version}"),
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ):
        if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    pytest.skip(f"there is no Python {version} here")


def answer(*command: object, cwd: Path, code: int = 0) -> str:
    """What a command prints, outside the clone and without its path."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    answer(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, CLONE, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_agents_side_works_from_a_wheel(version: str, wheel: Path, tmp_path: Path) -> None:
    answer(interpreter(version), "-m", "venv", "env", cwd=tmp_path)
    answer("env/bin/pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    assert "agl, version" in answer("env/bin/agl", "--version", cwd=tmp_path)
    assert "cd mine\n  ../env/bin/agl train" in answer("env/bin/agl", "init", "mine", cwd=tmp_path)
    assert "pip install 'agent-lightning-next[train]'" in answer(
        "../env/bin/agl", "train", cwd=tmp_path / "mine", code=1
    )
    page = "from agentlightning.errors import docs_page; print(docs_page('training.md').read_text()[:2])"
    assert "#" in answer("env/bin/python", "-c", page, cwd=tmp_path)


def test_training_works_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    """With the packages of this environment, of which the wheel takes the place of the clone."""
    answer(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    answer("env/bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel, cwd=tmp_path)
    packages = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    answer("env/bin/agl", "init", "mine", cwd=tmp_path)
    shown = answer("../env/bin/agl", "train", "--steps", "1", "--out", "run", cwd=tmp_path / "mine")
    assert "Serve it:   ../env/bin/agl serve run/checkpoints/best" in shown
    home = answer("env/bin/python", "-c", "import agentlightning; print(agentlightning.__file__)", cwd=tmp_path)
    assert home.startswith(str(packages))
