"""Run by `.venv-tracking/bin/python` in a folder of its own: tells the real packages of a run that
is resumed, and prints as JSON what they show of it. Nothing leaves the machine."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from agentlightning.algorithm.tracking import MLflow, TensorBoard, Tracking, WandB
from agentlightning.store.sql import SqlStore
from agentlightning.types import Run

DIRECTORY = Path.cwd()
DATABASE = f"sqlite:///{DIRECTORY / 'mlflow.db'}"
CONFIG = {"seed": 3, "algorithm": {"name": "grpo"}}
PARTS = [  # what each process measures; the second goes on after step 1
    [(0, {"val_reward": 0.1}), (1, {"loss": 1.0}), (2, {"loss": 9.0})],
    [(2, {"loss": 2.0, "excluded/odd(reason)": 1.0}), (3, {"loss": 3.0}), (2, {"val_reward": 0.5})],
]


async def train(store: SqlStore, run: Run, first: bool, notes: list[str]) -> None:
    trackers = [TensorBoard(), WandB(project="flights"), MLflow(experiment="flights", uri=DATABASE)]
    tracking = Tracking(store, run, DIRECTORY, trackers, notes.append, asyncio.Event())
    if not first:
        await tracking.resume_after(1)
    for step, values in PARTS[0 if first else 1]:
        await tracking.record(step, values)
    await tracking.close()


def of_tensorboard() -> dict[str, Any]:
    shown = EventAccumulator(str(DIRECTORY / "tensorboard")).Reload()
    return {
        name: [(one.step, one.value) for one in shown.Scalars(name)]
        for name in shown.Tags()["scalars"]
    }


def of_mlflow() -> dict[str, Any]:
    client = MlflowClient(tracking_uri=DATABASE)
    experiment = client.get_experiment_by_name("flights")
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        "status": run.info.status,
        "params": run.data.params,
        **{
            name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        },
    }


def of_wandb() -> list[dict[str, Any]]:
    """What its file of a run holds to be sent."""
    rows: list[dict[str, Any]] = []
    for file in sorted(
        DIRECTORY.glob("wandb/offline-run-*/*.wandb"), key=lambda one: one.stat().st_mtime_ns
    ):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    (one.key or "/".join(one.nested_key)): one.value_json
                    for one in record.history.item
                }
                rows.append(
                    {
                        name: json.loads(text)
                        for name, text in items.items()
                        if not name.startswith("_")
                    }
                )
    return rows


def records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 kB, in them records after 7 bytes: checksum, length, whole
    (1) or part."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


async def main() -> None:
    store = await SqlStore.open(":memory:")
    notes: list[str] = []
    run = await store.start_run("grpo", {"config": CONFIG}, run_id="run-1")
    await train(store, run, True, notes)
    # W&B names its folder by the second and the run: the second part would replace the first
    await asyncio.sleep(1.0)
    await train(store, run, False, notes)
    await store.close()
    print(
        json.dumps(
            {
                "tensorboard": of_tensorboard(),
                "mlflow": of_mlflow(),
                "wandb": of_wandb(),
                "notes": notes,
            }
        )
    )


asyncio.run(main())
