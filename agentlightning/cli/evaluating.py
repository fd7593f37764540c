"""What the commands that run an agent without training have in common: their options, and the run
that these make of a run file; also the run that forks a recorded rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.options import combined, json_option, key_flags, note, set_option
from agentlightning.cli.run_file import load_config
from agentlightning.cli.store_location import StoreLocation, store_file
from agentlightning.cli.stored_runs import find_rollout
from agentlightning.cli.training import RUN_FILE
from agentlightning.config import RunConfig
from agentlightning.errors import InvalidError
from agentlightning.learner.policy_config import AdamW
from agentlightning.types import LLM, ForkSource, Rollout

if TYPE_CHECKING:
    from agentlightning.gateway.recordings import Record

evaluation_options: Final = combined(
    click.option(
        "--model",
        metavar="ID|DIR|FILE.py:NAME",
        help="Model to use: an id, a directory, or its maker.",
    ),
    click.option(
        "--endpoint",
        metavar="URL",
        help="Use the model called --model at this OpenAI-compatible URL.",
    ),
    click.option(
        "--endpoint-key", metavar="KEY", envvar="OPENAI_API_KEY", show_envvar=True, help="Its key."
    ),
    set_option,
    json_option,
    key_flags(
        *("agent", "environment", "model", "model_name", "train_dataset", "val_dataset"),
        *("algorithm", "time_limit"),
    ),
)
"""The options of commands that run an agent and train nothing."""


def evaluation_config(
    agent: str, running: dict[str, Any], baseline: Mapping[str, Any]
) -> RunConfig:
    """The run file and the flags, as a run that trains nothing, with these settings of `Baseline`.
    Its temperature is that of held-out tasks, or with `sources` that of training."""
    model = running.pop("model")
    endpoint = running.pop("endpoint")
    key, assignments = (running.pop(name) for name in ("endpoint_key", "assignments"))
    if endpoint is not None and model is None:
        raise click.UsageError("--endpoint needs --model, the model's name there")
    run_file = Path(agent) if agent.endswith((".yaml", ".yml")) else None
    dataset = running.pop("dataset", None)
    flags = {
        **running,
        "agent": None if run_file else agent,
        "val_dataset": dataset,
        "train_dataset": [],
    }
    config = load_config(run_file, assignments, flags)
    forks = "sources" in baseline
    if not forks and config.val_dataset is None and config.environment is None:
        raise click.UsageError("DATA is missing: the held-out tasks to measure the agent on")
    fields = config.algorithm_fields
    kept = {key: fields[key] for key in ("rollout", "max_tokens") if key in fields}
    temperature = fields.get("temperature" if forks else "val_temperature", 1.0)
    changed: dict[str, Any] = {
        "algorithm": {"name": "baseline", **kept, "temperature": temperature, **baseline},
        "train_dataset": config.val_dataset,
        "optimizer": AdamW(),
        "lora": None,
        "time_limit": None,
    }
    if forks:
        changed |= {"train_dataset": None, "val_dataset": None}
    if endpoint is not None:
        llm = LLM(endpoint=endpoint, model=model or "", api_key=key)
        changed |= {"model": None, "initial_resources": {**config.initial_resources, "llm": llm}}
    elif model is not None:
        changed["model"] = model
    config = msgspec.structs.replace(config, **changed)
    if config.model is None and config.endpoint is None:
        raise click.UsageError("choose the model: --model, or --endpoint and --model")
    return config


@dataclass(frozen=True)
class Forked:
    """A recorded rollout that is to be forked, its answered calls, and its store."""

    place: StoreLocation
    rollout: Rollout
    record: Record

    def config(
        self,
        agent: str | None,
        running: dict[str, Any],
        sources: Sequence[ForkSource],
        samples: int,
        tools: str = "run",
    ) -> RunConfig:
        """The run that forks it. Where nothing else is named, the agent is that of the run whose
        store it is in, or else of this folder's run file, with the newest weights of the run."""
        address = self.place.address and store_file(self.place.address)
        folder = Path(address or "").parent
        kept = (folder / RUN_FILE, RUN_FILE)
        agent = agent or next((str(file) for file in kept if file.is_file()), None)
        if agent is None:
            raise click.UsageError("name the agent of the rollout, FILE.py:NAME or RUN.yaml")
        checkpoints = sorted((folder / "checkpoints").glob("step-*/config.json"))
        if checkpoints and running["model"] is None:
            running["model"] = str(checkpoints[-1].parent)
            note(f"continued by {running['model']}")
        running |= {"store": address, "server": self.place.server}
        running["assignments"] += (f"algorithm.rollout.tools={tools}",)
        return evaluation_config(agent, running, {"sources": sources, "samples": samples})


async def read_forked(named: StoreLocation, rollout_id: str, at: int | None) -> Forked:
    """NotFoundError if there is no such rollout; InvalidError if it has no answered call, or not
    call `at`."""
    from agentlightning.gateway.recordings import Records

    place, rollout = await find_rollout(named, rollout_id)
    async with place.open(reading=True) as store:
        attempt = await store.get_latest_attempt(rollout_id)
        record = await Records(store).of(rollout_id, attempt.attempt_id) if attempt else None
    indices = [call.index for call in record.calls] if record else []
    if record is None or not indices or (at is not None and at not in indices):
        numbers = ", ".join(map(str, indices)) or "none"
        wanted = "" if at is None else f" {at}"
        raise InvalidError(f"rollout {rollout_id} has no call{wanted} that was answered: {numbers}")
    return Forked(place, rollout, record)
