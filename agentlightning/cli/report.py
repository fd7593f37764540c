"""`agl report`: runs as one HTML page that needs nothing beside it, and their curves as pictures.

What models, agents and users wrote is in the page, and is text there: all of it is escaped, and the page allows neither
scripts nor requests. This module reads runs and fills `report.html`; it does not know what the metrics mean.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.options import print_json
from agentlightning.cli.place import READ_STORE, Place, with_place
from agentlightning.cli.rollouts import ENDED, with_rewards
from agentlightning.cli.runs import StoredRun, choose_runs, count_rollouts
from agentlightning.errors import ConfigError
from agentlightning.types import And, Condition, Order, Span

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

_TEMPLATE: Final = Path(__file__).with_name("report.html")
_STYLE: Final = Path(__file__).with_name("report.css")
_METRICS: Final = (
    "reward",
    "val_reward",
    "entropy",
    "behaviour_kl",
    "reference_kl",
    "inference_kl",
    "loss",
    "grad_norm",
    "response_tokens_mean",
    "tokens_per_second",
    "learner_idle",
    "engine_idle",
)
_LOOKED_THROUGH: Final = 200  # rollouts, for examples
_LONGEST: Final = 4000  # characters of a message


@click.command()
@click.argument("names", metavar="[RUN]…", nargs=-1)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Where to; default report-RUN in this directory.")  # fmt: skip
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A curve to draw; default the usual ones.")
@click.option("--examples", type=click.IntRange(min=0), default=4, show_default=True, help="Conversations of each run.")
@with_place(READ_STORE)
async def report(
    names: tuple[str, ...],
    out: Path | None,
    metrics: tuple[str, ...],
    examples: int,
    place: Place,
    as_json: bool,
) -> None:
    """Write a page about one run, or several side by side, and a picture of each curve.

    RUN is an id, the beginning of one, or a directory; default the newest below runs/. The page, report.html, is whole
    by itself: it can be sent to others or attached to a pull request."""

    chosen = await choose_runs(names, place)
    directory = out or Path(f"report-{chosen[0].run.run_id}")
    told: list[dict[str, Any]] = []
    for one in chosen:
        async with one.place.open(reading=True) as store:
            told.append(await _described(store, one, examples))
    files = _write(directory, chosen, told, metrics)
    if as_json:
        print_json({"runs": [one.run.run_id for one in chosen], "files": list(map(str, files))})
    else:
        click.echo(f"{files[0]}, and {len(files) - 1} pictures beside it")


def _write(
    directory: Path, chosen: Sequence[StoredRun], told: Sequence[dict[str, Any]], metrics: Sequence[str]
) -> list[Path]:
    """Draw and fill in; the files, the page first. An older report in the same place is replaced."""
    from agentlightning.algorithm.curves import draw_curves

    try:
        directory.mkdir(parents=True, exist_ok=True)
        pictures: dict[str, Path] = {}
        for name in metrics or _METRICS:
            curves = {one.run.run_id: points for one in chosen if (points := one.curve(name))}
            if curves:
                path = directory / f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in name)}.png"
                title = name if len(chosen) > 1 else f"{name}, {chosen[0].run.run_id}"
                pictures[name] = draw_curves(curves, path, title=title, along="training step", measured=name)
        page = directory / "report.html"
        page.write_text(_page([one.run.run_id for one in chosen], told, pictures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror or error}; choose another --out") from None
    return [page, *pictures.values()]


def _page(run_ids: Sequence[str], told: Sequence[dict[str, Any]], pictures: Mapping[str, Path]) -> str:
    import jinja2
    from markupsafe import Markup

    from agentlightning.tracing.tree import printable

    def visible(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    style = _STYLE.read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=visible)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=", ".join(run_ids),
        made=time.strftime("%Y-%m-%d %H:%M"),
        version=metadata.version("agent-lightning-next"),
        style=Markup(style),  # our own
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        curves=[{"name": name, "png": base64.b64encode(path.read_bytes()).decode()} for name, path in pictures.items()],
        runs=told,
    )


# --- what is told of a run ----------------------------------------------------------------------------------------


async def _described(store: LightningStore, one: StoredRun, examples: int) -> dict[str, Any]:
    """What the page shows of a run, by the names in `report.html`."""
    from agentlightning.cli.tables import number
    from agentlightning.display import duration

    told, manifest, newest = one.run, one.run.manifest, one.newest
    ended = told.end_time or time.time()
    counts = await count_rollouts(store, told.run_id)
    settings = {name: manifest.get(name) for name in ("seed", "commit", "command", "packages", "hardware", "data")}
    rows = [(name, [value for _, value in one.curve(name)]) for name in sorted(newest)]
    return {
        "id": told.run_id,
        "kind": told.kind,
        "status": told.status,
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(told.start_time)),
        "took": duration(max(0.0, ended - told.start_time)),
        "steps": one.history[-1].step if one.history else 0,
        "reward": _change(one, "reward"),
        "held_out": _change(one, "val_reward"),
        "settings": [
            ("rollouts", ", ".join(f"{count:,} {status}" for status, count in counts.items()) or "none"),
            *((name, _words(value)) for name, value in settings.items() if value is not None),
        ],
        "config": msgspec.json.format(msgspec.json.encode(manifest.get("config", {})), indent=2).decode(),
        "metrics": [(name, *map(number, (v[0], min(v), max(v), v[-1]))) for name, v in rows],
        "examples": await _examples(store, told.run_id, examples),
    }


def _change(one: StoredRun, name: str) -> str:
    values = [value for _, value in one.curve(name)]
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else "–"


def _words(value: Any) -> str:
    """`{"torch": "2.9", "numpy": "2.4"}` → `torch 2.9, numpy 2.4`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


async def _examples(store: LightningStore, run_id: str, count: int) -> list[dict[str, Any]]:
    """The best and the worst among the newest rollouts that have a reward."""
    where = And([Condition("run_id", "eq", run_id), Condition("status", "in", list(ENDED))])
    newest = Order(field="start_time", descending=True)
    page = await store.page_rollouts(where, [newest], limit=_LOOKED_THROUGH if count else 0)
    rewarded = [one for one in await with_rewards(store, page.items) if one.reward is not None]
    ranked = sorted(rewarded, key=lambda one: one.reward or 0.0, reverse=True)
    chosen = ranked if len(ranked) <= count else [*ranked[: (count + 1) // 2], *ranked[len(ranked) - count // 2 :]]
    return [
        {
            "id": one.rollout.rollout_id,
            "reward": f"{one.reward:g}",
            "mode": one.rollout.mode,
            "status": one.rollout.status,
            "messages": _conversation(await store.query_spans(one.rollout.rollout_id, "latest")),
        }
        for one in chosen
    ]


def _conversation(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The longest conversation of an attempt, message by message."""
    from agentlightning.tracing.dialects import items, mapping
    from agentlightning.tracing.messages import input_messages, output_messages, text_of

    said = [[*input_messages(span.attributes), *output_messages(span.attributes)[:1]] for span in spans]
    messages: list[dict[str, Any]] = []
    for message in max(said, key=len, default=[]):
        functions = [mapping(mapping(call).get("function")) for call in items(message.get("tool_calls"))]
        calls = [f"{function.get('name')}({function.get('arguments') or ''})" for function in functions]
        text = text_of(message)
        cut = f"{text[:_LONGEST]}… ({len(text) - _LONGEST:,} characters more)" if len(text) > _LONGEST else text
        messages.append({"role": str(message.get("role", "?")), "text": cut, "calls": calls})
    return messages
