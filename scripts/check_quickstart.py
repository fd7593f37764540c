"""Runs a short quickstart as a user would and checks the JSON object it promises on the last line
of stdout.

Usage: python scripts/check_quickstart.py [--steps 2] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {"cancelled", "origin_given", "sum"}


def is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def complaints(report: dict[str, Any], seed: int) -> Iterator[str]:
    """What is wrong with the report, one line each."""
    pairs = {"reward": report.get("reward")}
    first_tools = report.get("right_first_tool")
    if not isinstance(first_tools, dict) or set(first_tools) != KINDS:
        yield f"right_first_tool is {first_tools!r}; expected the kinds {sorted(KINDS)}"
    else:
        pairs |= {f"right_first_tool.{kind}": pair for kind, pair in first_tools.items()}
    for name, pair in pairs.items():
        if (
            not isinstance(pair, dict)
            or not is_share(pair.get("before"))
            or not is_share(pair.get("after"))
        ):
            yield f"{name} is {pair!r}; expected {{before, after}} between 0 and 1"
    if not isinstance(report.get("seconds"), int | float) or report["seconds"] <= 0:
        yield f"seconds is {report.get('seconds')!r}; expected a positive number"
    if report.get("seed") != seed:
        yield f"seed is {report.get('seed')!r}; expected {seed}"
    checkpoint = Path(str(report.get("checkpoint")))
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (checkpoint / file).is_file():
            yield f"the checkpoint {checkpoint} has no {file}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    arguments = parser.parse_args()
    agl = Path(sys.executable).with_name("agl")
    with tempfile.TemporaryDirectory() as directory:
        command = [str(agl), "quickstart", "--json", "--run-dir", f"{directory}/run"]
        command += ["--steps", str(arguments.steps), "--seed", str(arguments.seed)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=arguments.timeout, check=False
        )
        if done.returncode != 0:
            print(f"{' '.join(command)} ended with code {done.returncode}", file=sys.stderr)
            return 1
        last = done.stdout.rstrip("\n").rpartition("\n")[2]
        try:
            report = json.loads(last)
        except json.JSONDecodeError:
            print(f"the last line of stdout is not JSON: {last!r}", file=sys.stderr)
            return 1
        found = list(complaints(report, arguments.seed))
    print(last)
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
