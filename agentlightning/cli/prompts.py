"""`agl prompts`: shows the texts that a program itself sends to its models, what varies in them,
and which of them can be replaced.

`agentlightning.prompts` finds them; this module runs or reads rollouts, and prints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from agentlightning.cli.evaluating import evaluation_config, evaluation_options
from agentlightning.cli.fit import fit
from agentlightning.cli.options import COUNT, note, print_json
from agentlightning.cli.prompt_diff import diff
from agentlightning.cli.run_file import check_files
from agentlightning.cli.store_location import POSTGRES, StoreLocation
from agentlightning.errors import TrainingError
from agentlightning.tracing.tree import one_line, printable
from agentlightning.types import Condition, Order, PromptCandidate, Rollout, Span

if TYPE_CHECKING:
    from agentlightning.prompts.extraction import Component

_Recorded: TypeAlias = list[tuple[Rollout, Sequence[Span]]]
_OPENAI: Final = "https://api.openai.com/v1"
_TASKS: Final = 5  # that an agent is run on
_ROLLOUTS: Final = 200  # that are read of what is stored, the newest
_LINES: Final = 20  # of a text that are printed
_WIDTH: Final = 60  # of an example of what varies


class _Shown(click.Group):
    """A group whose command `show` needs no name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and args[0] in self.commands
        return super().parse_args(ctx, args if named else ["show", *args])


@click.group(cls=_Shown)
def prompts() -> None:
    """Show the prompts that a program sends."""


prompts.add_command(diff)


@prompts.command()
@click.argument("source", metavar="FILE.py:NAME|RUN.yaml|RUN|STORE", required=False)
@click.argument("dataset", metavar="[DATA]", required=False)
@evaluation_options
@click.option(
    "--limit",
    type=COUNT,
    metavar="N",
    help=f"Number of tasks to run (default: {_TASKS}), or of rollouts to read ({_ROLLOUTS}).",
)
@click.option(
    "--keep", multiple=True, metavar="NAME", help="Leave this out, such as 'tools.*'. Repeatable."
)
@click.option(
    "--write",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what can be replaced as a candidate, to be edited.",
)
def show(
    source: str | None,
    dataset: str | None,
    limit: int | None,
    keep: tuple[str, ...],
    write: Path | None,
    as_json: bool,
    **running: Any,
) -> None:
    """Show the prompts that a program sends.

    An agent is run on the first tasks of DATA, if no model is named at its own API, by
    OPENAI_API_KEY and OPENAI_BASE_URL; of a run or a store, what it has recorded is read. Each text
    is shown by agent, with {hole1} where it varies, and with the reason where it cannot be
    replaced.

    \b
    agl prompts agent.py:agent tasks.jsonl
    agl prompts agent.py:agent tasks.jsonl --model Qwen/Qwen3-0.6B
    agl prompts runs/grpo-…
    agl prompts calls.sqlite --write prompts.json      # edit it, then:
    agl server --backend URL --prompts prompts.json
    agl prompts diff runs/gepa-…                       # a search's prompts as a patch"""
    from agentlightning.prompts.components import write_candidate
    from agentlightning.prompts.extraction import base_candidate, components_of

    candidates: dict[str, PromptCandidate] = {}
    if source is not None and (".py:" in source or source.endswith((".yaml", ".yml"))):
        running["dataset"] = dataset
        # what the agent prints
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            recorded = _run(source, limit or _TASKS, running, as_json)
    elif source is not None and source.endswith(".py"):
        raise click.UsageError(f"name the agent in {source}: {source}:NAME, then its tasks")
    else:
        place = StoreLocation(running["store"], running["server"], running["api_key"])
        if source is not None and (source.startswith(POSTGRES) or os.path.isfile(source)):
            place = StoreLocation(source)
            source = None
        recorded = asyncio.run(_read(source, place, limit or _ROLLOUTS, candidates))
    components = components_of(recorded, candidates=candidates, keep=keep)
    offered = base_candidate(components)
    if as_json:
        print_json({"rollouts": len(recorded), "components": components})
    else:
        _print(components, len(recorded))
    if write is not None:
        write_candidate(offered, write)
        note(f"wrote {len(offered.components)} components to {write}")


def _run(agent: str, limit: int, running: dict[str, Any], as_json: bool) -> _Recorded:
    """The rollouts of an agent on its first tasks."""
    from agentlightning.display import terminal
    from agentlightning.gateway.models import ANY

    if ".py:" in agent and running["model"] is None and running["endpoint"] is None:
        if running["endpoint_key"] is None:
            raise click.UsageError(
                "set OPENAI_API_KEY (and OPENAI_BASE_URL), with which the agent calls its models; "
                "or choose one: --model, or --endpoint and --model"
            )
        running["endpoint"] = os.environ.get("OPENAI_BASE_URL", _OPENAI)
        running["model"] = ANY
        note(f"the agent's models are asked at {running['endpoint']}")
    config = evaluation_config(agent, running, {"mode": "test"})
    check_files(config)
    tasks = fit(config, terminal(stderr=as_json), limit).evaluations[0].tasks
    if all(task.rollout.status == "failed" for task in tasks):
        raise TrainingError(
            f"all {len(tasks)} rollouts failed; the first with: {tasks[0].rollout.error}"
        )
    return [(task.traced.rollout, task.spans) for task in tasks]


async def _read(
    source: str | None, place: StoreLocation, limit: int, candidates: dict[str, PromptCandidate]
) -> _Recorded:
    """The newest rollouts of a run or a store, whose candidates are added to `candidates`."""
    from agentlightning.cli.stored_runs import choose_run
    from agentlightning.prompts.replacing import record_of

    where = None
    if source is not None or not place.named:
        run = await choose_run(source, place)
        place = run.place
        where = Condition("run_id", "eq", run.run.run_id)
    found: _Recorded = []
    async with place.open(reading=True) as store:
        newest = Order(field="start_time", descending=True)
        for rollout in (await store.page_rollouts(where, [newest], limit=limit)).items:
            spans = await store.query_spans(rollout.rollout_id, "latest")
            found.append((rollout, spans))
            records = filter(None, map(record_of, spans))
            for resources_id in {each.resources_id for each in records} - candidates.keys():
                update = await store.get_resources_by_id(resources_id)
                for resource in () if update is None else update.resources.values():
                    if isinstance(resource, PromptCandidate):
                        candidates[resources_id] = resource
    return found


# --- printing -------------------------------------------------------------------------------------


def _print(components: Sequence[Component], rollouts: int) -> None:
    for each in components:
        lines = [f"{each.name}  in {each.calls} calls of {', '.join(each.agents)}"]
        if each.reason is not None:
            lines.append(f"not offered: {each.reason}")
        text = each.sent.split("\n")
        lines += [f"│ {line}" for line in text[:_LINES]]
        if len(text) > _LINES:
            lines.append(f"│ … {len(text) - _LINES} more lines; --json has them")
        for number, values in enumerate(each.holes, 1):
            shown = ", ".join(repr(one_line(value, _WIDTH)) for value in values)
            lines.append(f"{{hole{number}}}: {shown}")
        click.echo("\n  ".join(map(printable, lines)) + "\n")
    offered = sum(each.reason is None for each in components)
    note(f"{rollouts} rollouts, {len(components)} texts, {offered} of them can be replaced")
