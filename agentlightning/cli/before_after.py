"""What a person reads when the quickstart is done: what changed, an example of it, where it is, what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentlightning.data.conversations import render_message
from agentlightning.tracing.tree import printable

if TYPE_CHECKING:
    from agentlightning.quickstart import BeforeAfter, QuickstartReport

NEXT = (
    ("Talk to it, from any OpenAI client", "agl serve {checkpoint}"),
    ("Train on where it stopped", "agl quickstart --resume --out {directory} --steps {more_steps}"),
    ("See another seed", "agl quickstart --seed {next_seed}"),
    ("Train your own agent", "agl train --agent my_agent.py:agent --model MODEL --train-dataset tasks.jsonl"),
)


def show_report(console: Console, report: QuickstartReport) -> None:
    """Print the report; wide terminals show the two conversations side by side."""
    console.print(_first_tool_table(report))
    console.print(_reward_line(report))
    before, after = (
        Panel(_conversation(messages), title=title, title_align="left", width=min(60, console.width))
        for messages, title in zip(report.examples, ("before", "after"), strict=True)
    )
    console.print(Columns([before, after]))
    _show_places(console, report)


def _first_tool_table(report: QuickstartReport) -> Table:
    """Rows are kinds of task, columns first tools; the right one of each kind is marked."""
    table = Table(title="First tool called, share of held-out tasks before → after", title_justify="left")
    tools = list(next(iter(report.first_tools.values())))
    table.add_column("kind of task")
    for tool in tools:
        table.add_column(tool, justify="right")
    for kind, shares in report.first_tools.items():
        cells = [_shares(shares[tool], right=shares[tool] is report.right_first_tool[kind]) for tool in tools]
        table.add_row(kind.replace("_", " "), *cells)
    return table


def _shares(pair: BeforeAfter, *, right: bool) -> Text:
    return Text(f"{pair.before:.2f} → {pair.after:.2f}", style="bold green" if right else "dim")


def _reward_line(report: QuickstartReport) -> Text:
    return Text.assemble(
        f"Held-out reward over {report.tasks} tasks: ",
        (f"{report.reward.before:.3f} → {report.reward.after:.3f}", "bold"),
        f"   {report.steps} steps in {report.seconds:.0f} s, seed {report.seed} ({report.stopped_because})",
    )


def _conversation(messages: list[dict[str, Any]]) -> Text:
    lines = [render_message(message) for message in messages if message.get("role") != "system"]
    return Text(printable("\n".join(lines)) if lines else "no call was made")


def _show_places(console: Console, report: QuickstartReport) -> None:
    """Paths and commands on lines of their own, unwrapped, so that they can be copied."""
    places = {"Checkpoint": report.checkpoint, "Everything": report.directory}
    for name, path in places.items():
        console.print(f"{name + ':':<16}{path}", markup=False, highlight=False, soft_wrap=True)
    values = {
        "checkpoint": report.checkpoint,
        "directory": report.directory,
        "more_steps": report.steps + 20,
        "next_seed": report.seed + 1,
    }
    console.print("\nWhat to try next", style="bold")
    for purpose, command in NEXT:
        if report.checkpoint is not None or "{checkpoint}" not in command:
            console.print(f"  {purpose}:")
            console.print(
                f"    {command.format(**values)}", style="cyan", markup=False, highlight=False, soft_wrap=True
            )
