"""Trains every example once, as its page says, from an installed wheel, and writes down the reward
before and after.

    python scripts/ways.py [--out benchmarks/results/ways.json] [--only langchain,guess_number] [--fresh]

Works in a new folder below /tmp with copies of the examples. Examples whose environment was not
made (`make frameworks`, `make harnesses`) are skipped, and a line says so. With --fresh the wheel's
requirements are downloaded too, instead of taken from this environment. Prints a Markdown table;
the exit code is 1 if a training failed or made its agent worse."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests import wheels  # noqa: E402

REWARD = re.compile(r"[Hh]eld-out reward: ([\d.]+)(?:.*?([\d.]+)(?: after|;|\.?$))", re.MULTILINE)
WORSE = 0.05  # a fall of the reward by more is no noise

# Their run files train one step, to show that it works. A few more show that it learns.
FRAMEWORK = (
    "agl train run.yaml --val-dataset ../tasks.jsonl --set algorithm.steps=6 --set "
    "algorithm.evaluate_every=0"
)


class Way(NamedTuple):
    """A command in the folder of an example, and the environment that it needs besides."""

    name: str
    folder: str
    command: str
    environment: str = ""


def frameworks() -> Iterator[Way]:
    for folder in sorted((ROOT / "examples" / "frameworks").iterdir()):
        if folder.is_dir() and folder.name != "__pycache__":
            where = {"crewai": "crewai", "node": "node"}.get(folder.name, "frameworks")
            first = "npm install --silent && " if where == "node" else ""
            yield Way(folder.name, f"frameworks/{folder.name}", first + FRAMEWORK, where)


WAYS = (
    Way("quickstart", "flight", "agl quickstart"),
    Way("agl init", ".", "agl init mine && cd mine && agl train"),
    Way("tutorial", "tutorial", "python tiny_model.py && agl train", "frameworks"),
    Way("guess_number", "guess_number", "agl train run.yaml --seed 1"),
    Way("tower_of_hanoi", "tower_of_hanoi", "agl train run.yaml --seed 1"),
    Way("sft_from_traces", "sft_from_traces", "python train.py 1 run"),
    Way("math_tools", "math_tools", "python train.py --out run", "experiments"),
    Way("text_to_sql", "text_to_sql", "python train.py --out run", "experiments"),
    Way("multi_hop_rag", "multi_hop_rag", "python train.py --seed 1 --out run", "experiments"),
    *frameworks(),
    Way("harnesses", "harnesses", "agl train run.yaml --val-dataset tasks.jsonl", "harnesses"),
)


class Walked(NamedTuple):
    """An example that was trained. Rewards are held-out; None if the command printed none."""

    name: str
    command: str
    before: float | None
    after: float | None
    seconds: float
    cpu_seconds: float
    exit_code: int

    @property
    def is_well(self) -> bool:
        return (
            self.exit_code == 0
            and self.after is not None
            and self.after >= (self.before or 0) - WORSE
        )


def missing(environment: str) -> Path | None:
    """The path that the environment lacks; None if it is there."""
    wanted = {"": ROOT, "harnesses": ROOT / ".harnesses", "node": ROOT / ".harnesses"}
    path = wanted.get(environment, ROOT / f".venv-{environment}")
    return None if path.exists() else path


def programs(wheel: Path, folder: Path, environment: str, fresh: bool) -> Path:
    """The folder of `agl` and `python`, in an environment made at the first call."""
    place = folder / f"env-{environment}"
    if not place.exists():
        # The agents of the experiments take some of their packages from the environment of `make
        # setup`.
        seen = {"": (), "experiments": (".venv-experiments", ".venv")}.get(
            environment, (f".venv-{environment}",)
        )
        packages = (
            found for name in seen for found in (ROOT / name / "lib").glob("python*/site-packages")
        )
        (wheels.install_fresh if fresh else wheels.install)(wheel, place, [*packages])
    return place / "bin"


def walk(way: Way, wheel: Path, folder: Path, fresh: bool) -> Walked:
    python = "" if way.environment in ("node", "harnesses") else way.environment
    where = programs(wheel, folder, python, fresh)
    path = [str(where), str(ROOT / ".harnesses" / "node_modules" / ".bin"), os.environ["PATH"]]
    variables = {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    began, used = time.monotonic(), cpu_seconds()
    done = subprocess.run(
        ["bash", "-c", way.command],
        cwd=folder / "examples" / way.folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = REWARD.findall(done.stdout)
    before, after = map(float, found[-1]) if found else (None, None)
    if done.returncode or not found:
        sys.stderr.write(done.stdout[-3000:])
    seconds = time.monotonic() - began
    return Walked(
        way.name, way.command, before, after, seconds, cpu_seconds() - used, done.returncode
    )


def cpu_seconds() -> float:
    used = os.times()
    return used.children_user + used.children_system


def table(walked: list[dict[str, Any]]) -> str:
    lines = ["| example | before | after | seconds | CPU seconds |", "|---|---|---|---|---|"]
    for one in walked:
        rewards = [
            f"{one[end]:.2f}" if one[end] is not None else "–" for end in ("before", "after")
        ]
        used = one["cpu_seconds"]
        spent = f"{one['seconds']:.0f} | {'–' if used is None else round(used)}"
        lines.append(f"| {one['name']} | {' | '.join(rewards)} | {spent} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ways.json")
    parser.add_argument("--only", help="names of examples, separated by commas")
    parser.add_argument("--fresh", action="store_true", help="download what the wheel requires")
    given = parser.parse_args()
    chosen = [way for way in WAYS if given.only is None or way.name in given.only.split(",")]
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else []
    kept = {one["name"]: one for one in known}
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="agl-ways-") as made:
        folder = Path(made)
        wheel = wheels.build(folder / "wheel")
        ignored = shutil.ignore_patterns("__pycache__", "runs", "node_modules")
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=ignored)
        for way in chosen:
            if (lacking := missing(way.environment)) is not None:
                print(f"skipped {way.name}: there is no {lacking}", file=sys.stderr, flush=True)
                continue
            walked = walk(way, wheel, folder, given.fresh)
            print(f"{way.name}: {walked.before} → {walked.after}", file=sys.stderr, flush=True)
            bad += [] if walked.is_well else [way.name]
            kept[way.name] = walked._asdict()
            ordered = [kept[name] for name in (way.name for way in WAYS) if name in kept]
            given.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    print(table([kept[way.name] for way in WAYS if way.name in kept]))
    if bad:
        print(f"not well: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
