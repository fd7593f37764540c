"""What a run measures reaches everyone who asked for it, under names that are documented."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import agentlightning as agl
from agentlightning.algorithm.base import NoProgress
from agentlightning.algorithm.rl.alarms import GradientNorms
from agentlightning.algorithm.rl.job import Checkpoints
from agentlightning.algorithm.tracking import TrackedRun, Tracking, make_tracker
from agentlightning.cli.main import run
from agentlightning.cli.run_file import load_config
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner import losses
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch import TorchLearner
from agentlightning.store.sql import SqlStore
from agentlightning.types import Metrics
from tests import agents
from tests.frameworks.world import bin_of
from tests.test_trainer import TASKS, algorithm, policy, trainer

DOCUMENTED = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


class Kept:
    """A tracker of one's own."""

    name = "kept"

    def __init__(self, shelf: list[Any] | None = None) -> None:
        self.shelf = [] if shelf is None else shelf

    def start(self, run: TrackedRun) -> str:
        self.shelf.append(("start", run.run_id, [one.step for one in run.history]))
        return "on a shelf"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.shelf.append((step, dict(values)))

    def close(self) -> None:
        self.shelf.append("close")


class Broken(Kept):
    name = "broken"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError("no route to host")


class Absent(Kept):
    name = "absent"

    def start(self, run: TrackedRun) -> str:
        raise PermissionError("who are you?")


class Notes(NoProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def unknown_names(metrics: tuple[Metrics, ...]) -> set[str]:
    """Names that the table in docs/reference/metrics.md lacks."""
    first_cells = re.findall(r"^\| (`.*?) \|", DOCUMENTED.read_text(), flags=re.MULTILINE)
    documented = [name for cell in first_cells for name in re.findall(r"`(.+?)`", cell)]
    known = re.compile("|".join(re.sub(r"<\w+>", ".+", re.escape(name)) for name in documented))
    assert len(documented) > 50
    return {name for one in metrics for name in one.values if not known.fullmatch(name)}


@pytest.mark.slow
def test_every_measurement_reaches_every_tracker_and_a_resumed_run_continues_in_them(
    tmp_path: Path,
) -> None:
    shelf: list[Any] = []
    progress = Notes()
    settings: dict[str, Any] = {
        "trackers": ["tensorboard", Broken(), Absent(), Kept(shelf)],
        "progress": progress,
    }
    first = trainer(tmp_path, **settings).fit(agents.vowels, TASKS, TASKS[:2])
    stored = {one.step: one.values for one in first.metrics}
    assert lines(tmp_path) == [{"step": step, **values} for step, values in stored.items()]
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert shelf[0] == ("start", first.run_id, []) and shelf[-1] == "close"
    assert [step for step, _ in shelf[1:-1]] == [0, 1, 2, 2]  # the last is the closing evaluation
    told = [note for note in progress.notes if note.startswith(("broken", "absent"))]
    assert sorted(told) == [
        "absent: PermissionError: who are you? (shown once; training continues)",
        "broken: OSError: no route to host (shown once; training continues)",
        "broken: on a shelf",
    ]
    assert unknown_names(first.metrics) == set()

    again = trainer(tmp_path, algorithm=algorithm(steps=3), trackers=[Kept(shelf)])
    resumed = again.fit(agents.vowels, TASKS, TASKS[:2], resume=True)
    assert ("start", first.run_id, [0, 1, 2]) in shelf
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    assert lines(tmp_path) == [{"step": one.step, **one.values} for one in resumed.metrics]


@pytest.mark.anyio
async def test_a_late_measurement_and_a_resumed_run_keep_one_line_a_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store = await SqlStore.open(":memory:")
    run = await store.start_run("grpo", {}, run_id="run-1")
    tracking = Tracking(store, run, tmp_path / "run", (), print, asyncio.Event())
    for step in (1, 2, 3):
        await tracking.record(step, {"loss": float(step)})
    await tracking.record(1, {"val_reward": 0.5})
    assert lines(tmp_path) == [
        {"step": 1, "loss": 1, "val_reward": 0.5},
        {"step": 2, "loss": 2},
        {"step": 3, "loss": 3},
    ]
    resumed = Tracking(store, run, tmp_path / "run", (), print, asyncio.Event())
    await resumed.resume_after(1)
    await resumed.record(2, {"loss": 20.0})
    assert [line["loss"] for line in lines(tmp_path)] == [1, 20]
    await store.close()


def test_a_tracker_is_named_in_a_run_file_and_a_wrong_name_or_option_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "agent: a.py:a\n"
        "model: m\n"
        "train_dataset: t\n"
        "trackers: [tensorboard, {name: tensorboard, directory: d}]"
    )
    made = [make_tracker(spec) for spec in load_config(file).trackers]
    assert [getattr(one, "directory", "") for one in made] == [None, "d"]
    assert make_tracker({"name": f"{__file__}:Kept", "shelf": [1]}).name == "kept"
    with pytest.raises(ConfigError, match="no tracker 'tensorbord'; did you mean 'tensorboard'"):
        make_tracker("tensorbord")
    with pytest.raises(ConfigError, match=r"tensorboard: .*unexpected keyword argument 'dir'"):
        make_tracker({"name": "tensorboard", "dir": "d"})
    with pytest.raises(ConfigError, match="is not a tracker: it needs"):
        make_tracker(f"{__file__}:Notes")


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Multiplies the loss by a factor from an optimiser step on."""
    policy_loss, step, taken = losses.policy_loss, TorchLearner.step, 0

    def install(factor: float, first: int) -> None:
        def counted(*arguments: Any) -> Any:
            nonlocal taken
            taken += 1
            return step(*arguments)

        def spoiled(*arguments: Any) -> Any:
            found = policy_loss(*arguments)
            return found._replace(values=found.values * (factor if taken >= first else 1.0))

        monkeypatch.setattr(TorchLearner, "step", counted)
        monkeypatch.setattr(losses, "policy_loss", spoiled)

    return install


def test_a_loss_that_is_no_number_ends_the_run_with_its_batch_kept(
    tmp_path: Path, spoil: Any, monkeypatch: Any
) -> None:
    policy().save(tmp_path / "model")
    spoil(math.nan, first=2)
    told = f"step 2: the step was not taken: loss nan.*`agl replay {tmp_path / 'run'} --steps 2` trains"
    with pytest.raises(TrainingError, match=told):
        trainer(tmp_path, model=tmp_path / "model", algorithm=algorithm(steps=3)).fit(
            agents.vowels, TASKS
        )
    assert [line["step"] for line in lines(tmp_path)] == [1]
    latest = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert latest is not None and latest.name == "step-000001"
    assert run(["replay", str(tmp_path / "run"), "--steps", "2"]) != 0
    monkeypatch.undo()
    assert run(["replay", str(tmp_path / "run"), "--steps", "2"]) == 0


def test_gradients_explode_where_they_leave_what_was_usual_behind() -> None:
    calm = [1.0, 2.0, 1.5, 0.5, 1.0]
    norms = GradientNorms()
    assert [norms.add(norm) for norm in (*calm, 3.0)] == [0] * 6
    assert [norms.add(norm) for norm in (60.0, 80.0, 0.0, 1.0)] == [1, 2, 0, 0]
    few = GradientNorms()
    assert [few.add(norm) for norm in (1.0, 30.0)] == [0, 0]  # nothing is usual yet


@pytest.mark.slow
def test_an_exploding_gradient_is_noted_and_ends_the_run_where_that_was_asked_for(
    tmp_path: Path, spoil: Any
) -> None:
    spoil(1e5, first=6)
    progress = Notes()
    asked = algorithm(steps=9, stop_on_explosion=2, checkpoint_every=1)
    with pytest.raises(
        TrainingError, match=r"step 7: grad_norm is .* for 2 steps in a row\. The batch is kept"
    ):
        trainer(tmp_path, algorithm=asked, progress=progress).fit(agents.vowels, TASKS)
    assert sum("times what was usual" in note for note in progress.notes) == 1
    latest = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert latest is not None
    assert all(
        torch.isfinite(weight).all() for weight in load_policy(latest).model.state_dict().values()
    )


EARNED: list[float] = []


@agl.rollout
async def loses_its_reward(task: dict, llm: agl.LLM) -> float:
    """Of the first two steps rollouts earn something, of the others nothing."""
    await agents.ask(task, llm)
    EARNED.append(0.5 + len(EARNED) % 4 if len(EARNED) < 24 else 0.0)
    return EARNED[-1]


@pytest.mark.parametrize("allowed", [2, 0])
def test_a_run_that_earns_nothing_any_more_ends_with_its_best_weights_named(
    tmp_path: Path, allowed: int
) -> None:
    EARNED.clear()
    notes, asked = Notes(), algorithm(steps=5, checkpoint_every=1, stop_on_collapse=allowed)
    trained = trainer(tmp_path, algorithm=asked, progress=notes)
    best = re.escape(str(tmp_path / "run/checkpoints/step-000001"))
    told = f"no rollout of the last {allowed or 3} steps earned anything.* weights are in {best}"
    if allowed:
        with pytest.raises(TrainingError, match=f"step 4: the policy has collapsed: {told}"):
            trained.fit(loses_its_reward, TASKS)
    else:
        assert trained.fit(loses_its_reward, TASKS).stopped_because == "all steps done"
        assert len([note for note in notes.notes if re.search(told, note)]) == 1
    assert (tmp_path / "run/checkpoints/step-000001/config.json").is_file()


@pytest.mark.slow
def test_tensorboard_wandb_and_mlflow_show_what_was_measured(tmp_path: Path) -> None:
    offline = {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [bin_of("tracking") / "python", Path(__file__).with_name("offline_trackers.py")],
        cwd=tmp_path,
        env=os.environ | offline | {"PYTHONPATH": str(root), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    near = pytest.approx
    assert shown["tensorboard"] == {
        "val_reward": [[0, near(0.1)], [2, near(0.5)]],
        "loss": [[1, near(1)], [2, near(2)], [3, near(3)]],  # the step that was lost is not shown
        "excluded/odd_reason_": [[2, near(1)]],
    }
    assert shown["mlflow"] == {
        "status": "FINISHED",
        "params": {"seed": "3", "algorithm.name": "grpo"},
        "val_reward": [[0, 0.1], [2, 0.5]],
        "loss": [[1, 1], [2, 9], [2, 2], [3, 3]],
        "excluded/odd_reason_": [[2, 1]],
    }
    assert shown["wandb"] == [
        {"step": 0, "val_reward": 0.1},
        {"step": 1, "loss": 1},
        {"step": 2, "loss": 9},
        {"step": 2, "loss": 2, "excluded/odd(reason)": 1},
        {"step": 3, "loss": 3},
        {"step": 2, "val_reward": 0.5},
    ]
    assert not [note for note in shown["notes"] if "told once" in note]
