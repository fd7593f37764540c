"""The retriever of examples/multi_hop_rag on a corpus the size of an encyclopedia: memory, time,
and queries.

    .venv-experiments/bin/python benchmarks/retrieval.py [--passages 1000000] [--queries 300]

Passages are 60 words each, drawn from 300,000 by Zipf's law. A query is five words of a passage,
which is to be among the first five found. Each stage is a process of its own, whose greatest
resident memory is told, mapped files included."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "multi_hop_rag"))
import retriever

RESULTS = Path(__file__).parent / "results" / "retrieval.json"
WORDS, LENGTH, QUERY_LENGTH, TOP = 300_000, 60, 5, 5


def texts(n: int) -> Iterator[str]:
    """The same for the same n, a few thousand at a time."""
    generator = np.random.default_rng(0)
    vocabulary = [spelled(number) for number in range(WORDS)]
    weights = 1 / np.arange(10, WORDS + 10)
    cumulative = np.cumsum(weights / weights.sum())
    for start in range(0, n, 5000):
        drawn = np.searchsorted(cumulative, generator.random((min(5000, n - start), LENGTH))).clip(
            max=WORDS - 1
        )
        yield from (" ".join(map(vocabulary.__getitem__, row)) for row in drawn.tolist())


def spelled(number: int) -> str:
    """A word for each number: `w` and two to five letters."""
    letters = "w"
    while number or len(letters) < 3:
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def build(folder: Path, n: int, method: str) -> dict[str, Any]:
    started = time.monotonic()
    if method == "bm25":
        retriever.write_bm25(retriever.read_passages(folder / "texts.jsonl"), folder)
    else:
        retriever.write_dense(
            retriever.Passages(folder), retriever.make_encoder(retriever.HASHED), folder
        )
        (folder / "dense.json").write_text(json.dumps({"encoder": retriever.HASHED}))
    files = folder.glob("bm25/*") if method == "bm25" else [folder / "dense.faiss"]
    return {
        "seconds": time.monotonic() - started,
        "gb_on_disk": sum(file.stat().st_size for file in files) / 1e9,
    }


def query(folder: Path, n: int, method: str) -> dict[str, Any]:
    index = retriever.Index(folder, method)  # type: ignore[arg-type]
    generator = np.random.default_rng(1)
    times: list[float] = []
    found = 0
    for number in generator.choice(len(index.passages), n, replace=False).tolist():
        text = index.passages[number]
        asked = " ".join(generator.choice(text.split(), QUERY_LENGTH, replace=False).tolist())
        started = time.perf_counter()
        found += text in index.search(asked, TOP)
        times.append(1000 * (time.perf_counter() - started))
    return {
        "p50_ms": float(np.percentile(times, 50)),
        "p95_ms": float(np.percentile(times, 95)),
        "found": found / n,
    }


STAGES = {"build": build, "query": query}


def alone(stage: str, folder: Path, n: int, method: str) -> dict[str, Any]:
    """What a stage measures in a process of its own."""
    command = [sys.executable, __file__, "--stage", stage, str(folder), str(n), method]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--stage", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        stage, folder, n, method = options.stage
        measured = STAGES[stage](Path(folder), int(n), method)
        measured["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps(measured))
        return
    results: dict[str, Any] = {"passages": options.passages, "queries": options.queries}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "texts.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts(options.passages))
        for method in ("bm25", "dense"):
            built = alone("build", folder, options.passages, method)
            asked = alone("query", folder, options.queries, method)
            results[method] = {"build": built, "query": asked}
            print(
                f"{method:6} built in {built['seconds']:.0f} s with {built['peak_gb']:.2f} GB, on "
                f"disk {built['gb_on_disk']:.2f} GB; p50 {asked['p50_ms']:.1f} ms, p95 "
                f"{asked['p95_ms']:.1f} ms with {asked['peak_gb']:.2f} GB; found "
                f"{asked['found']:.0%}"
            )
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
