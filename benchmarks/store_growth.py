"""What a long conversation costs the store: 30 calls that each repeat the history.

    python benchmarks/store_growth.py [--rollouts 10] [--turns 30] [--json FILE]

`agl server`, on SQLite and on PostgreSQL, records conversations over HTTP from an upstream that
answers as vLLM does. A turn adds a tool's result of 2 kB and an answer of 128 tokens. *ids*: with
token ids and logprobs. *text*: of an upstream without them. *images*: with ids, and every fifth
turn brings a screenshot of 100 kB. Bytes are what the files, or the relations, grow by in a
rollout. What cannot be less is counted beside it: the messages of the last prompt and its token
ids, and of every turn the answer with its ids and logprobs."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web
from store import Server, client_of, server

from agentlightning.store.client import LightningStoreClient

KINDS: Final = ("text", "ids", "images")
SAMPLED: Final = 128
TOOL_RESULT: Final = 2_000  # characters
SCREENSHOT: Final = 75_000  # bytes, 100 kB as base64
_random: Final = random.Random(0)
_WORDS: Final = [
    "".join(_random.choices("abcdefghijklmnopqrstuvwxyz", k=_random.randint(2, 9)))
    for _ in range(8000)
]
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": " ".join(_random.choices(_WORDS, k=40)),
        },
    }
    for number in range(5)
]


def words(characters: int) -> str:
    return " ".join(_random.choices(_WORDS, k=characters // 6))[:characters]


def token_ids(text: str) -> list[int]:
    """About a token for four characters, the same for the same text."""
    return [hash(text[place : place + 4]) % 150_000 for place in range(0, len(text), 4)]


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        parts = (
            message["content"]
            if isinstance(message["content"], list)
            else [{"text": message["content"]}]
        )
        for part in parts:
            ids += token_ids(part["text"]) if "text" in part else [151_655] * 1000
    return ids


async def answer(request: web.Request) -> web.Response:
    """A chat completion; its model `text` returns neither token ids nor logprobs."""
    asked = await request.json()
    text = words(4 * SAMPLED)
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    ids = prompt_ids(asked["messages"])
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": SAMPLED,
        "total_tokens": len(ids) + SAMPLED,
    }
    told = {
        "id": f"c-{time.time_ns()}",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "usage": usage,
    }
    if asked["model"] != "text":
        sampled = token_ids(text)
        content = [
            {"token": "a", "logprob": -_random.expovariate(2.0), "top_logprobs": []}
            for _ in sampled
        ]
        choice |= {"token_ids": sampled, "logprobs": {"content": content}}
        told["prompt_token_ids"] = ids
    return web.json_response({**told, "choices": [choice]})


async def converse(
    url: str, store: LightningStoreClient, kind: str, turns: int
) -> tuple[str, dict[str, int]]:
    """One rollout; its id, and the bytes of what it could not do without."""
    rollout = await store.start_rollout({"kind": kind})
    address = f"{url}/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1/chat/completions"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": words(2000)},
        {"role": "user", "content": words(500)},
    ]
    outputs = 0
    headers = {"authorization": f"Bearer {rollout.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for turn in range(turns):
            body = {
                "model": kind,
                "messages": messages,
                "tools": TOOLS,
                "temperature": 1.0,
                "max_tokens": SAMPLED,
            }
            async with session.post(address, json=body) as response:
                assert response.status == 200, await response.text()
                said = (await response.json())["choices"][0]["message"]
            last = (
                len(json.dumps(messages, separators=(",", ":"))),
                4 * len(prompt_ids(messages)) * (kind != "text"),
            )
            outputs += len(json.dumps(said, separators=(",", ":"))) + (
                8 * SAMPLED if kind != "text" else 0
            )
            result: Any = words(TOOL_RESULT)
            if kind == "images" and turn % 5 == 0:
                picture = base64.b64encode(_random.randbytes(SCREENSHOT)).decode()
                url_of_it = {"url": f"data:image/png;base64,{picture}"}
                result = [
                    {"type": "text", "text": result},
                    {"type": "image_url", "image_url": url_of_it},
                ]
            messages += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": result},
            ]
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    return rollout.rollout_id, {"last prompt": sum(last), "outputs": outputs}


def size(address: str) -> int:
    """Of the file, with its log moved into it; or of the relations of the database."""
    if "://" in address:
        import psycopg

        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("VACUUM")
            return connection.execute(
                "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r' "
                "AND relnamespace = 'public'::regnamespace"
            ).fetchone()[0]
    connection = sqlite3.connect(address)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return Path(address).stat().st_size


async def measured(
    at: Server, address: str, upstream: str, kind: str, rollouts: int, turns: int
) -> dict[str, Any]:
    async with client_of(at) as store, aiohttp.ClientSession() as session:
        model = {"base_url": f"{upstream}/v1", "trainable": kind != "text"}
        async with session.put(f"{at.url}/api/v1/models/{kind}", json=model) as response:
            assert response.status == 200, await response.text()
        await converse(at.url, store, kind, 2)
        before, cpu = size(address), at.cpu_seconds()
        done = [await converse(at.url, store, kind, turns) for _ in range(rollouts)]
        cpu = at.cpu_seconds() - cpu
        stored = (size(address) - before) / rollouts
        spans = await store.query_spans(done[-1][0])
        assert len(spans) == turns, f"{turns} calls, {len(spans)} spans"
    content = {name: sum(one[name] for _, one in done) / rollouts for name in done[0][1]}
    return {
        "bytes per rollout": round(stored),
        **{name: round(value) for name, value in content.items()},
        "times the last prompt": round(stored / content["last prompt"], 2),
        "times last prompt and outputs": round(stored / sum(content.values()), 2),
        "server CPU ms per call": round(1000 * cpu / rollouts / turns, 2),
    }


async def run(arguments: argparse.Namespace, address: str, directory: Path) -> dict[str, Any]:
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream = f"http://127.0.0.1:{runner.addresses[0][1]}"
    results: dict[str, Any] = {}
    try:
        with server(address, directory) as at:
            for kind in KINDS:
                results[kind] = await measured(
                    at, address, upstream, kind, arguments.rollouts, arguments.turns
                )
    finally:
        await runner.cleanup()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--postgres", help="a postgresql:// URL of an empty database, measured too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        results["sqlite"] = asyncio.run(
            run(arguments, str(Path(name) / "store.sqlite"), Path(name))
        )
        if arguments.postgres:
            results["postgres"] = asyncio.run(run(arguments, arguments.postgres, Path(name)))
    for database, kinds in results.items():
        for kind, figures in kinds.items():
            print(f"{database:9} {kind:7}", figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
