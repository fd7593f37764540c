"""What the tests of real engines share: a model to serve, a server to start, a run that is to
learn."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch

from agentlightning.algorithm.grpo import GRPO
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy_config import AdamW
from agentlightning.trainer import FitResult
from tests import agents
from tests.test_trainer import TASKS, policy, trainer

ROOT = Path(__file__).parents[2]
READY_SECONDS = 300
SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SGLANG_FLAGS = [
    *["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"],
    *["--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"],
    *["--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--max-running-requests", "32"],
]


def squared(logprobs: Any, old_logprobs: Any, advantages: Any) -> Any:
    return advantages * (logprobs - old_logprobs).square()


def losses_of_servers(**first: Any) -> list[Loss]:
    """Each kind that has a ratio, and one of a user's own; `first` are further settings of the
    first."""
    return [
        Loss(**first),
        Loss(kind="importance_sampling", aggregation="sequence-mean"),
        Loss(kind="gspo", clip_low=0.9, clip_high=9, aggregation="rollout-mean"),
        Loss(kind="cispo", aggregation="constant", constant_length=4),
        Loss(kind=squared),
    ]


def save_model(directory: Path, *, tied: bool, seed: int = 0) -> Path:
    made = policy(seed=seed)
    model = cast(Any, made.model)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(
            model.get_input_embeddings().weight.detach().clone()
        )
    directory.mkdir(parents=True, exist_ok=True)
    made.save(directory)
    return directory


@contextmanager
def server(
    command: Sequence[Any],
    port: int,
    environment: Mapping[str, str],
    log: Path,
    *,
    health: str = "/health",
    cwd: Path | None = None,
) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """Its URL, as soon as it answers, and its process."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=inherited | dict(environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=cwd,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + READY_SECONDS
        while not answers(f"{url}{health}"):
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()[-5000:]
            time.sleep(1)
        yield url, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def fit(
    directory: Path, model: Path, sampler: Any, *, resume: bool = False, **changes: Any
) -> FitResult:
    lora, steps = changes.pop("lora", None), changes.pop("steps", 6)
    six = GRPO(
        steps=steps, tasks_per_step=6, group_size=8, max_tokens=6, checkpoint_every=1, **changes
    )
    optimizer = AdamW(learning_rate=3e-3 if lora is None else 1e-2)
    settings: dict[str, Any] = {
        "algorithm": six,
        "lora": lora,
        "n_runners": 32,
        "optimizer": optimizer,
    }
    return trainer(directory, model=model, sampler=sampler, **settings).fit(
        agents.vowels, TASKS, TASKS, resume=resume
    )


def check(result: FitResult) -> None:
    """It learned, from what it sampled."""
    mismatch = [
        one.values["inference_mismatch"]
        for one in result.metrics
        if "inference_mismatch" in one.values
    ]
    before, after = result.evaluations[0].reward, result.evaluations[-1].reward
    print(
        f"held-out {before:.3f} → {after:.3f}, largest mismatch {max(mismatch):.1g}, "
        f"{result.seconds:.0f} s"
    )
    assert mismatch and max(mismatch) < 1e-4
    assert after > before + 0.1
