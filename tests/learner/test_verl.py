"""verl's FSDP engine with a loss of ours has the gradient that the learner in this process has, in
one process and in two: the contract that `learner: {verl: URL}` rests on. In `.venv-verl`, whose
Python runs these tests: `make engines`."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.learner.policy import open_policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.torch import TorchLearner
from tests.learner.engines import losses_of_servers
from tests.learner.test_torch import Still, batch
from tests.learner.verl_engine import Told, Work
from tests.test_trainer import policy

with_verl = pytest.mark.skipif(
    "AGL_ENGINES" not in os.environ or importlib.util.find_spec("verl") is None,
    reason="`make engines` runs these",
)
SECONDS = 300
LOSSES = losses_of_servers(temperature=0.8, entropy_coefficient=0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("verl") / "model"
    policy().save(place)
    return place


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def told(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Told]:
    """What verl's engine tells of each loss."""
    directory, processes = tmp_path_factory.mktemp("engine"), request.param
    (directory / "model").symlink_to(model)
    (directory / "work.pkl").write_bytes(pickle.dumps(Work(batch(), LOSSES, 60)))
    environment = os.environ | {
        "PYTHONPATH": os.getcwd(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            command = [
                sys.executable,
                "-m",
                "tests.learner.verl_engine",
                directory,
                str(rank),
                str(processes),
            ]
            with (directory / f"{rank}.log").open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        for rank, process in enumerate(started):
            assert process.wait(SECONDS) == 0, (directory / f"{rank}.log").read_text()[-5000:]
    finally:
        for process in started:
            process.kill()
    return pickle.loads((directory / "told.pkl").read_bytes())


@with_verl
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("number", range(len(LOSSES)), ids=[loss.name for loss in LOSSES])
def test_verls_engine_has_our_gradient(model: Path, told: list[Told], number: int) -> None:
    learner = TorchLearner(
        open_policy(model, seed=0, device="cpu"), AdamW(max_grad_norm=1e9, micro_batch_tokens=64)
    )
    learner.optimizer = Still(learner.model.parameters(), lr=0.0)
    expected, theirs = learner.step(batch(), LOSSES[number]), told[number]
    assert theirs.micro_batches > 1
    ours = {
        name: one.grad for name, one in learner.model.named_parameters() if one.grad is not None
    }
    assert theirs.gradient.keys() == ours.keys()
    apart = [float((theirs.gradient[name] - one).norm()) for name, one in ours.items()]
    each = max(one / float(tensor.norm()) for one, tensor in zip(apart, ours.values(), strict=True))
    whole = sum(one**2 for one in apart) ** 0.5 / expected["grad_norm"]
    norms = f"gradient norm {theirs.norm:.6f}, ours {expected['grad_norm']:.6f}"
    print(
        f"{LOSSES[number].name}: {norms}; gradients {whole:.1g} apart, the worst tensor {each:.1g}"
    )
    assert theirs.loss == pytest.approx(expected["loss"], rel=1e-5)
    assert theirs.norm == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert whole < 1e-5
    assert each < 1e-4  # of float32, and of a tensor that others are a hundred times as large as
