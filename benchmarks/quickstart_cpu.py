"""Where the quickstart's CPU time goes: engine, learner, HTTP, SDK, agent, store, gateway.

    python benchmarks/quickstart_cpu.py [--steps 10] [--seed 1]

py-spy samples the stacks of every thread of `agl quickstart`; a sample belongs to the innermost
frame that one of the parts below owns, unless the thread is waiting. The CPU time of each thread,
as the kernel counts it, is divided over the parts by its samples."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

RATE = 100  # samples per second
# Part → paths of its frames. The innermost frame that is listed decides.
PARTS = {
    "demonstrations": ("flight/demonstrations.py",),
    "learner and warm start": ("agentlightning/learner/",),
    "engine": ("agentlightning/engine/",),
    "gateway": ("agentlightning/gateway/",),
    "store": ("agentlightning/store/",),
    "data and loop": ("agentlightning/data/", "agentlightning/algorithm/"),
    "runner and tracing": ("agentlightning/runner/", "agentlightning/tracing/"),
    "OpenAI SDK with its HTTP client": (
        "site-packages/openai/",
        "site-packages/aiohttp/",
        "site-packages/httpx",
    ),
    "HTTP server": ("site-packages/uvicorn/", "site-packages/starlette/"),
    "agent": ("flight/agent.py", "flight/train.py", "flight/tasks.py"),
    "display": ("agentlightning/cli/", "site-packages/rich/"),
    "imports": ("<frozen importlib",),
}


WAITING = (
    "_worker (",
    "Condition.wait (",
    "DatabaseThread._work (",
    "Event.wait (",
)  # innermost frames of idle threads


def part_of(stack: list[str]) -> str:
    """`stack` is outermost first, each frame `function (path:line)`."""
    for frame in reversed(stack):
        for part, paths in PARTS.items():
            if any(path in frame for path in paths):
                return part
    return "event loop and the rest"


def watch_threads(process: subprocess.Popen[str]) -> dict[int, float]:
    """CPU seconds of each thread of py-spy's child, read until it ends."""
    tick = os.sysconf("SC_CLK_TCK")
    seconds: dict[int, float] = {}
    while process.poll() is None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            for stat in Path(f"/proc/{child}/task").glob("*/stat"):
                try:
                    fields = stat.read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue  # the thread has just ended
                seconds[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / tick
        time.sleep(0.2)
    return seconds


def divide(lines: list[str], cpu_of_thread: dict[int, float]) -> dict[str, float]:
    """CPU seconds of each part."""
    samples: dict[int, Counter[str]] = defaultdict(Counter)
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        found = re.match(r"thread \((\d+)\)", frames[0])
        if found and len(frames) > 1 and not any(name in frames[-1] for name in WAITING):
            samples[int(found[1])][part_of(frames)] += int(count)
    parts: dict[str, float] = defaultdict(float)
    for thread, cpu in cpu_of_thread.items():
        if not samples[thread]:
            parts["event loop and the rest"] += cpu
        for part, count in samples[thread].items():
            parts[part] += cpu * count / samples[thread].total()
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    here = Path(__file__).parent
    bin_directory = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        command = [
            str(bin_directory / "py-spy"),
            "record",
            "--format",
            "raw",
            "--full-filenames",
            "--rate",
            str(RATE),
        ]
        command += [
            "--threads",
            "--output",
            str(stacks),
            "--",
            str(bin_directory / "agl"),
            "quickstart",
            "--json",
        ]
        command += [
            "--steps",
            str(options.steps),
            "--seed",
            str(options.seed),
            "--out",
            f"{folder}/run",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            cpu_of_thread = watch_threads(process)
            assert process.stdout is not None
            report = json.loads(next(line for line in process.stdout if line.startswith("{")))
        parts = divide(stacks.read_text().splitlines(), cpu_of_thread)
    cpu = sum(parts.values())
    rows = [
        {"part": part, "share": round(seconds / cpu, 4), "cpu_seconds": round(seconds, 1)}
        for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
    ]
    print(f"{'part':<34} {'share':>6} {'CPU s':>7}")
    for row in rows:
        print(f"{row['part']:<34} {row['share']:>6.1%} {row['cpu_seconds']:>7.1f}")
    print(
        f"{'together':<34} {'':>6} {cpu:>7.1f}   ({options.steps} steps, {report['seconds']:.0f} "
        "s of wall time)"
    )
    result = {
        "steps": options.steps,
        "seed": options.seed,
        "wall_seconds": report["seconds"],
        "cpu_seconds": cpu,
    }
    (here / "results").mkdir(exist_ok=True)
    (here / "results" / "quickstart_cpu.json").write_text(
        json.dumps(result | {"parts": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
