"""Better prompts for programs that nobody changes: those of examples/frameworks for LangChain and
Node, with the two searches.

    python benchmarks/unchanged_programs.py [--seeds 5] [--rollouts 250]

Both programs are run as they stand, in a process each, by `agl train` with a run file. A hosted
model, scripted, obeys nine of ten times each rule that a system prompt states: three rules are the
writer's, and the rewriter keeps the draft nine of ten times if its prompt says so, else four. The
editing model adds a rule that the prompt lacks, of seven, of which four help somewhere. The reward is the share of
the three words that the program's output has. `make frameworks` installs what is needed."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from aiohttp import web

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.node import NODE, installed  # noqa: E402

EXAMPLES: Final = ROOT / "examples" / "frameworks"
RESULTS: Final = Path(__file__).parent / "results" / "unchanged_programs.json"
WORDS: Final = {
    "Name the ship.": "Aurora",
    "Say which day it is.": "Tuesday",
    "End with the weather.": "stormy",
}
KEEP: Final = "Keep every word of the draft."
IDLE: Final = ("Be brief.", "Be friendly.", "Think before you write.")
GRADER: Final = """
def grade(task: dict, output) -> float:
    return sum(word in output.stdout for word in ("Aurora", "Tuesday", "stormy")) / 3
"""
COMMANDS: Final = {
    "langchain": f"{ROOT / '.venv-frameworks' / 'bin' / 'python'} agent.py {{task[topic]}}",
    "node": f"{NODE} agent.mjs {{task[topic]}}",
}


class HostedModel:
    """Chat completions, whole and streamed, of the agents and of the editor."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def _says(self, messages: list[dict[str, Any]]) -> str:
        first = str(messages[0]["content"])
        if "between <prompt>" in first:
            old = re.split(r'<prompt name="[^"]+">\n|\n</prompt>', first)[1]
            rules = [rule for rule in (*WORDS, KEEP, *IDLE) if rule not in old]
            return f"<prompt>{old} {self._chance.choice(rules)}</prompt>"
        if "Do not write the new prompt" in first:
            return "It lacks a rule."
        if "rewriter" in first:
            draft = str(messages[-1]["content"])
            kept = self._chance.random() < (0.9 if KEEP in first else 0.4)
            return draft if kept else "A short text."
        words = [
            word for rule, word in WORDS.items() if rule in first and self._chance.random() < 0.9
        ]
        return f"A text. {' '.join(words)}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = self._says(body["messages"])
        about = {"id": "c", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": len(str(body["messages"])) // 4, "completion_tokens": 9}
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            return web.json_response(
                about | {"object": "chat.completion", "choices": [choice], "usage": usage}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        delta = {"role": "assistant", "content": text}
        for part, reason in ((delta, None), ({}, "stop")):
            choice = {"index": 0, "finish_reason": reason, "delta": part}
            event = about | {"object": "chat.completion.chunk", "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def write_run(folder: Path, program: str, search: str, url: str, rollouts: int) -> None:
    """The folder of a user: the program as it stands, a grader, tasks and a run file."""
    shutil.copytree(EXAMPLES / program, folder, ignore=shutil.ignore_patterns("runs"))
    (folder / "rollout.py").write_text(GRADER)
    for name, tasks in (("tasks", range(16)), ("heldout", range(16, 36))):
        lines = [json.dumps({"topic": f"Write about place {number}."}) for number in tasks]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    algorithm: dict[str, Any] = {"name": search, "endpoint": url, "budget": {"rollouts": rollouts}}
    if search == "apo":
        algorithm |= {"val_batch_size": 10}
    run = {
        "agent": {"command": COMMANDS[program], "grader": "rollout.py:grade"},
        "train_dataset": "tasks.jsonl",
        "val_dataset": "heldout.jsonl",
        "initial_resources": {
            "llm": {"resource_type": "llm", "endpoint": url, "model": "gpt-4o-mini"}
        },
        "algorithm": algorithm,
        "n_runners": 4,
    }
    (folder / "run.yaml").write_text(json.dumps(run))


async def search(program: str, name: str, seed: int, rollouts: int) -> dict[str, float]:
    application = web.Application(client_max_size=2**26)
    application.router.add_post("/v1/chat/completions", HostedModel(seed).answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "program"
        write_run(folder, program, name, url, rollouts)
        if program == "node":
            packages = installed(folder / "package.json")
            (folder / "node_modules").symlink_to(packages / "node_modules")
        command = [Path(sys.executable).with_name("agl"), "train", "run.yaml", "--json", "-q"]
        command += ["--seed", str(seed)]
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=folder,
            env={**os.environ, "OPENAI_API_KEY": "any"},
            stdout=subprocess.PIPE,
        )
        out, _ = await process.communicate()
        seconds = time.perf_counter() - began
        run = json.loads(out.splitlines()[-1])
        with sqlite3.connect(Path(run["directory"]) / "store.sqlite") as store:
            ((count,),) = store.execute("SELECT count(*) FROM rollouts")
    await runner.cleanup()
    return {**run["reward"], "rollouts": count, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=250)
    parser.add_argument("--programs", nargs="+", default=["langchain", "node"], choices=COMMANDS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for program in options.programs:
        for name in ("gepa", "apo"):
            found = [
                asyncio.run(search(program, name, seed, options.rollouts))
                for seed in range(1, options.seeds + 1)
            ]
            results[f"{program}, {name}"] = found
            shown = "  ".join(
                f"{key} {statistics.median(one[key] for one in found):8.3f}" for key in found[0]
            )
            after = ", ".join(f"{one['after']:.2f}" for one in found)
            print(f"{program:10} {name:5} medians: {shown}   after: {after}", flush=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
