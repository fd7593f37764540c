"""The quickstart over several seeds: is it the method that learns, or was it luck?

    python benchmarks/quickstart_seeds.py --seeds 1-10 --out runs/experiments

Prints one table and writes `quickstart_seeds.json` with the reports. A seed that was run before is
read, not run again. A seed passes when the right first tool of each kind reaches 0.8, that of
cancelled flights (memory) 0.85, and the held-out reward 0.75."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

MEMORY_FIRST, FIRST_TOOL, REWARD, SECONDS = 0.85, 0.8, 0.75, 240


def seeds_of(text: str) -> list[int]:
    """`1-3,7` → [1, 2, 3, 7]."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def run(seed: int, out: Path, extra: list[str]) -> dict[str, Any]:
    """The report of one seed, from its file if it was run before."""
    saved = out / f"seed-{seed}.json"
    if saved.is_file():
        return json.loads(saved.read_text())
    command = [
        str(Path(sys.executable).with_name("agl")),
        "quickstart",
        "--json",
        "--seed",
        str(seed),
    ]
    command += ["--out", str(out / f"seed-{seed}"), *extra]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {"seed": seed, "error": f"exit code {done.returncode}"}
    report = json.loads(done.stdout.rstrip("\n").rpartition("\n")[2])
    saved.write_text(json.dumps(report, indent=1))
    return report


def passes(report: dict[str, Any]) -> bool:
    return (
        report["right_first_tool"]["cancelled"]["after"] >= MEMORY_FIRST
        and all(pair["after"] >= FIRST_TOOL for pair in report["right_first_tool"].values())
        and report["reward"]["after"] >= REWARD
        and report["seconds"] < SECONDS
    )


def row(report: dict[str, Any]) -> str:
    if "error" in report:
        return f"| {report['seed']} | {report['error']} | | | | no |"
    pairs = [*report["right_first_tool"].values(), report["reward"]]
    cells = [f"{pair['before']:.2f} → {pair['after']:.2f}" for pair in pairs]
    verdict = "yes" if passes(report) else "no"
    return f"| {report['seed']} | {' | '.join(cells)} | {report['seconds']:.0f} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-10"))
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    arguments, extra = parser.parse_known_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports = [run(seed, arguments.out, extra) for seed in arguments.seeds]
    kinds = next(
        (list(report["right_first_tool"]) for report in reports if "error" not in report), []
    )
    header = ["seed", *kinds, "reward", "s", "passes"]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}"
    )
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for report in reports:
        print(row(report))
    passed = sum("error" not in report and passes(report) for report in reports)
    print(f"\n{passed} of {len(reports)} seeds pass")
    summary = {"passed": passed, "reports": reports}
    (arguments.out / "quickstart_seeds.json").write_text(json.dumps(summary, indent=1))
    return 0 if passed >= 0.9 * len(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
