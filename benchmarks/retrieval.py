"""The retriever of examples/multi_hop_rag on WordNet: time, memory, and what is found.

    .venv-experiments/bin/python benchmarks/retrieval.py [--queries 300]

A query is the gloss of a noun, or its name, and its passage is to be the first. Each stage is a
process of its own, whose greatest resident memory is measured, mapped files included."""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "multi_hop_rag"))
import retriever
from tasks import clear
from wordnet import passage, passages

RESULTS = Path(__file__).parent / "results" / "retrieval.json"


def build(folder: Path, n: int, method: str) -> dict[str, Any]:
    texts = passages()
    dense = retriever.HASHED if method == "dense" else None
    started = time.monotonic()
    retriever.build_index(texts, folder / method, dense=dense)
    files = (folder / method).iterdir()
    return {
        "passages": len(texts),
        "seconds": time.monotonic() - started,
        "mb_on_disk": sum(file.stat().st_size for file in files) / 1e6,
    }


def query(folder: Path, n: int, method: str) -> dict[str, Any]:
    started = time.perf_counter()
    index = retriever.Index(folder / method, method)  # type: ignore[arg-type]
    loaded = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    found = {"name": 0, "gloss": 0}
    times: list[float] = []
    for synset in random.Random(1).sample(list(clear().values()), n):
        for kind, asked in (("name", synset.names[0]), ("gloss", synset.gloss)):
            started = time.perf_counter()
            results = index.search(asked)
            times.append(1000 * (time.perf_counter() - started))
            found[kind] += results == [passage(synset)]
    return {
        "load_s": loaded,
        "mb_loaded": memory,
        "p50_ms": float(np.percentile(times, 50)),
        "p95_ms": float(np.percentile(times, 95)),
        "found": {kind: count / n for kind, count in found.items()},
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
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--stage", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        stage, folder, n, method = options.stage
        print(json.dumps(STAGES[stage](Path(folder), int(n), method)))
        return
    results: dict[str, Any] = {"queries": options.queries}
    with tempfile.TemporaryDirectory() as name:
        for method in ("bm25", "dense"):
            stages = {stage: alone(stage, Path(name), options.queries, method) for stage in STAGES}
            results[method] = stages
            print(method, json.dumps(stages, indent=1))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
