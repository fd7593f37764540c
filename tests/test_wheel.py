"""A built wheel works outside the clone, on every Python that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.wheels import answer

pytestmark = pytest.mark.slow


def interpreter(version: str) -> str:
    """The Python of this version on the PATH or among pyenv's; skips the test where there is
    none."""
    for found in (
        shutil.which(f"python{version}"),
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ):
        if (
            found is not None
            and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return str(found)
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_agents_side_works_from_a_wheel(version: str, wheel: Path, tmp_path: Path) -> None:
    answer(interpreter(version), "-m", "venv", "env", cwd=tmp_path)
    answer("env/bin/pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    assert "agl, version" in answer("env/bin/agl", "--version", cwd=tmp_path)
    assert "cd mine\n  ../env/bin/agl train" in answer("env/bin/agl", "init", "mine", cwd=tmp_path)
    assert "pip install 'agent-lightning-next[train]'" in answer(
        "../env/bin/agl", "train", cwd=tmp_path / "mine", code=1
    )
    page = (
        "from agentlightning.errors import docs_page; "
        "print(docs_page('training.md').read_text()[:2])"
    )
    assert "#" in answer("env/bin/python", "-c", page, cwd=tmp_path)
