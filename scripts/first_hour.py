"""The first hour of a newcomer: the commands of the install page in order, each with its time and
exit code.

    python scripts/first_hour.py [--out TABLE.json] [--steps 12]

Works in a new folder with the `agl` of this environment. Prints a Markdown table with the wall time
and the CPU time of each command, and exits with 1 if a command failed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMMANDS = (
    "agl --version",
    "agl quickstart --steps {steps} --run-dir runs/quickstart",
    "agl init mine",
    "agl eval --show run.yaml --limit 3",
    "agl train --dry-run",
    "agl train --seed 1",
    "agl train --seed 2",
    "agl runs",
    "agl eval --compare {first} {second}",
    "echo 'My parcel is late.' | agl chat {best}",
    "agl export sft.jsonl --format sft --run {first}",
    "timeout --preserve-status --signal INT 5 agl ui --port 0",
)


class Done(NamedTuple):
    command: str
    seconds: float
    cpu_seconds: float
    exit_code: int


def first_hour(folder: Path, steps: int) -> Iterator[Done]:
    here = folder
    for template in COMMANDS:
        runs = sorted((here / "runs").glob("grpo-*"))
        names = {"steps": steps, "first": "", "second": "", "best": ""}
        if runs:
            first, second = (str(run.relative_to(here)) for run in (runs[0], runs[-1]))
            names |= {"first": first, "second": second, "best": f"{second}/checkpoints/best"}
        command = template.format(**names)
        print(f"$ {command}", file=sys.stderr, flush=True)
        began, used = time.monotonic(), cpu_seconds()
        done = subprocess.run(
            ["bash", "-c", command], cwd=here, env=environment(), stdin=subprocess.DEVNULL
        )
        yield Done(command, time.monotonic() - began, cpu_seconds() - used, done.returncode)
        if command.startswith("agl init"):
            here = folder / "mine"


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine() -> str:
    return (
        f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}, Python "
        f"{platform.python_version()}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    parser.add_argument("--steps", type=int, default=12, help="training steps of the quickstart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = list(first_hour(Path(folder), options.steps))
    print("| command | seconds | CPU seconds | exit code |\n|---|---|---|---|")
    for done in table:
        shown = done.command.replace("|", "\\|")
        print(f"| `{shown}` | {done.seconds:.1f} | {done.cpu_seconds:.1f} | {done.exit_code} |")
    total, used = sum(done.seconds for done in table), sum(done.cpu_seconds for done in table)
    print(f"\n{total / 60:.1f} minutes, {used / 60:.1f} CPU minutes, on {machine()}")
    if options.out:
        rows = [done._asdict() for done in table]
        options.out.write_text(
            json.dumps({"machine": machine(), "commands": rows}, indent=2) + "\n", encoding="utf-8"
        )
    return int(any(done.exit_code for done in table))


if __name__ == "__main__":
    sys.exit(main())
