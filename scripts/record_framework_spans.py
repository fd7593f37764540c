"""Record what the real instrumentation of each agent framework says: tests/tracing/spans/NAME.json.

Usage: python scripts/record_framework_spans.py NAME=PYTHON …

NAME is a program of scripts/framework_agents.py, PYTHON an interpreter whose environment holds that
framework, its instrumentation, opentelemetry-sdk and msgspec. The model is scripted and answers
through the real gateway, whose spans are recorded with the others."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from agentlightning.gateway.backend import (
    BackendEvent,
    Delta,
    Finished,
    ModelCall,
    RelayedCall,
    Started,
)
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.store import codec
from agentlightning.store.sql import SqlStore
from agentlightning.types import EnqueueRolloutRequest, Span
from tests.gateway.world import serving_gateway

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "scripts" / "framework_agents.py"
LONGEST_TEXT = 1200  # of an attribute that no reader looks into


class Script:
    """A model that, where it is given tools, calls `add`, then `boom`, and then says `done`: where
    an agent has a tool for its answer, by that tool, and in the sections that DSPy asks for."""

    name, captures_tokens, seeded, relays = "script", True, False, frozenset[str]()

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        results = sum(message["role"] == "assistant" for message in call.messages)
        offered = [tool["function"]["name"] for tool in call.tools or ()]
        name, arguments = [("add", '{"a": 1, "b": 2}'), ("boom", '{"x": 3}'), ("", "")][
            min(results, 2)
        ]
        if name not in offered:
            name, arguments = (
                ("final_answer", '{"answer": "done"}') if "final_answer" in offered else ("", "")
            )
        yield Started(tuple(range(1, 4)))
        if name:
            function = {"name": name, "arguments": arguments}
            tool_call = {
                "index": 0,
                "id": f"call_{call.request_id}",
                "type": "function",
                "function": function,
            }
            yield Delta(0, {"tool_calls": [tool_call]}, token_ids=(4,), logprobs=(-0.5,), version=1)
            yield Finished(0, "tool_calls")
        else:
            yield Delta(0, {"content": said(call)}, token_ids=(5,), logprobs=(-0.5,), version=1)
            yield Finished(0, "stop")

    def relay(self, call: RelayedCall) -> Any:
        raise AssertionError(f"{call.path} was relayed, though nothing is")

    async def count_tokens(self, call: ModelCall) -> int:
        return 3

    async def close(self) -> None: ...


def said(call: ModelCall) -> str:
    """The sections of a DSPy module, else `done`."""
    prompt = str(call.messages[-1]["content"])
    sections = dict.fromkeys(
        re.findall(r"\[\[ ## (\w+) ## \]\]", prompt.rpartition("Respond with")[2]), "done"
    )
    if "next_tool_name" in sections:
        tool = [("add", '{"a": 1, "b": 2}'), ("boom", '{"x": 3}'), ("finish", "{}")][
            prompt.count("## observation_")
        ]
        sections |= dict(zip(("next_tool_name", "next_tool_args"), tool, strict=True))
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in sections.items()) or "done"


async def record(name: str, python: str, directory: Path) -> list[Span]:
    """The spans of one program: the gateway's and the instrumentation's."""
    store = await SqlStore.open(directory / f"{name}.sqlite")
    try:
        gateway = Gateway(ModelTable([ModelEntry("policy", Script())]), store)
        async with serving_gateway(gateway) as url:
            await store.enqueue_many_rollouts(
                [EnqueueRolloutRequest(input="task", rollout_id=name)]
            )
            leased = await store.dequeue_rollout()
            assert leased is not None and leased.api_key is not None
            attempt_id = leased.attempt.attempt_id
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": leased.api_key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": leased.api_key,
                "CREWAI_DISABLE_TELEMETRY": "true",
                "CREWAI_TRACING_ENABLED": "false",
            }
            process = await asyncio.create_subprocess_exec(
                python,
                str(PROGRAM),
                name,
                name,
                attempt_id,
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if "-v" in sys.argv else asyncio.subprocess.PIPE,
                cwd=directory,
            )
            told, complaints = await process.communicate()
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{(complaints or b'').decode()[-3000:]}")
            captured = await store.query_spans(name, attempt_id)
        return [*captured, *msgspec.json.decode(told, type=list[Span])]
    finally:
        await store.close()


def trimmed(span: Span) -> Span:
    """Without what differs from machine to machine or fills the file."""
    attributes = {
        key: value[:LONGEST_TEXT]
        if isinstance(value, str) and not key.startswith("gen_ai.")
        else value
        for key, value in span.attributes.items()
        if not re.search(
            r"stacktrace|tool_definitions|tool\.definitions|json_schema|invocation_parameters", key
        )
    }
    events = tuple(
        msgspec.structs.replace(
            event, attributes={k: v for k, v in event.attributes.items() if "stacktrace" not in k}
        )
        for event in span.events
    )
    return msgspec.structs.replace(span, attributes=attributes, events=events, resource={})


async def main(pairs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for pair in pairs:
            name, _, python = pair.partition("=")
            spans = [trimmed(span) for span in await record(name, python, Path(directory))]
            text = msgspec.json.format(msgspec.json.encode(spans, enc_hook=codec.plain), indent=1)
            (PROGRAM.parent / "spans" / f"{name}.json").write_bytes(text + b"\n")
            print(f"{name}: {len(spans)} spans, {len(text)} bytes")


if __name__ == "__main__":
    asyncio.run(main([argument for argument in sys.argv[1:] if argument != "-v"]))
