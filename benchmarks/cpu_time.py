"""Where the CPU time of a training goes: engine, learner, HTTP, SDK, agent, store, gateway.

    python benchmarks/cpu_time.py [--task quickstart|tower] [--steps 10] [--seed 1] [--start FOLDER]

`quickstart` has calls of one to five turns; `tower` is examples/tower_of_hanoi with 64 games at
once, each of up to 32 calls, and says how much of its prompts the engine found cached.

py-spy samples the stacks of every thread of the training; a sample belongs to the innermost
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

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cpu_time.json"
BIN = Path(sys.executable).parent
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
    "agent": ("flight/agent.py", "flight/train.py", "flight/tasks.py", "tower_of_hanoi/"),
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


def command_of(task: str, steps: int, seed: int, start: Path | None, out: Path) -> list[str]:
    """The training to look at, which prints its report as JSON."""
    told = ["--seed", str(seed)]
    if task == "quickstart":
        quickstart = [str(BIN / "agl"), "quickstart", "--json", "--steps", str(steps)]
        return [*quickstart, *told, "--out", str(out / "run")]
    if start is None:
        start = out / "start"
        making = [sys.executable, "demonstrations.py", "--out", str(start), *told]
        subprocess.run(making, cwd=HERE.parent / "examples" / "tower_of_hanoi", check=True)
    load = str(HERE / "_tower_load.py")
    training = [sys.executable, load, str(start.resolve()), str(steps), str(seed)]
    return [*training, str(out / "run")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=["quickstart", "tower"], default="quickstart")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="the tower's policy, which is made by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        looking = [str(BIN / "py-spy"), "record", "--format", "raw", "--full-filenames"]
        looking += ["--rate", str(RATE), "--threads", "--output", str(stacks), "--"]
        command = looking + command_of(
            options.task, options.steps, options.seed, options.start, Path(folder)
        )
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
    print("| part | CPU seconds | share |\n|---|---|---|")
    for row in rows:
        print(f"| {row['part']} | {row['cpu_seconds']:.1f} | {row['share']:.0%} |")
    print(f"| together | {cpu:.1f} | |\n\n{options.steps} steps: {json.dumps(report)}")
    result = {"steps": options.steps, "seed": options.seed, "cpu_seconds": cpu, "report": report}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[options.task] = result | {"parts": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
