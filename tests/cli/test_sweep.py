"""`agl sweep` runs each combination of settings once, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agentlightning.cli.main import run
from agentlightning.cli.sweep import _directory


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert run(["init", str(tmp_path / "mine")]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.slow
def test_each_combination_and_seed_is_run_once_and_compared(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        "sweep",
        "run.yaml",
        "--over",
        "optimizer.learning_rate=1e-4,2e-4",
        "--seeds",
        "2",
        "--json",
    ]
    command += [
        "--steps",
        "1",
        "--algorithm",
        "rloo",
        "--time-limit",
        "1h",
        "--run-dir",
        "runs/sweep",
    ]
    capfd.readouterr()
    assert run(command) == 0
    out, err = capfd.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (
        first["settings"] == {"optimizer.learning_rate": "0.0001"}
        and first["runs"] == second["runs"] == 2
    )
    assert first["before"] == second["before"] and first["deviation"] is not None
    assert "run 4/4" in err and "optimizer.learning_rate" in err
    name = "optimizer.learning_rate=0.0002,seed=1"
    assert json.loads((project / "runs" / "sweep" / name / "result.json").read_text())["seed"] == 1
    assert (
        yaml.safe_load((project / "runs" / "sweep" / name / "run.yaml").read_text())["algorithm"][
            "name"
        ]
        == "rloo"
    )
    # as if it had been killed just before its end
    (project / "runs" / "sweep" / name / "result.json").unlink()
    assert run(command) == 0
    assert capfd.readouterr().out.splitlines()[0] == out.splitlines()[0]
    assert run([*command, "--set", "algorithm.group_size=4"]) == 1
    assert "holds runs of another run file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("algorithm.group_size", "with its values"),
        ("algorithm.group_size=", "with its values"),
        ("algorithm.steps=[", "is no YAML value"),
        ("sede=1,2", "did you mean 'seed'"),
        ("algorithm.group_sise=4,8", "did you mean 'group_size'"),
        ("seed=1,x", "expected `int`"),
        ("model=./nowhere,tiny", "model path ./nowhere does not exist"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_first_run(
    project: Path, over: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "run.yaml", "--over", over]) == 1
    assert message in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_long_values_have_a_directory_each() -> None:
    first, second = (
        _directory([f"algorithm.answer_format={'é' * 200}{end}", "seed=0"]) for end in "ab"
    )
    assert first != second and len(first) == len(second) == 200
