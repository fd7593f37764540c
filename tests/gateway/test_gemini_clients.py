"""Clients of Google's protocol as they are: the google-genai SDK, and Gemini CLI."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from agentlightning import semconv
from agentlightning.engine.engine import Engine
from agentlightning.engine.service import EngineService
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.chat.backend import TokenBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout
from tests.frameworks.world import bin_of
from tests.gateway.talker import FOUND, PLAIN
from tests.gateway.world import World, serving
from tests.node import NODE, installed

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SETTINGS = '{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false}}'
HERE = Path(__file__).parent


async def run(there: World, attempted: AttemptedRollout, *command: str | Path, **more: Any) -> tuple[int | None, str]:
    """How a program ended that finds the attempt by its environment, and what it printed."""
    variables = {
        "GOOGLE_GEMINI_BASE_URL": f"{there.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}",
        "GEMINI_API_KEY": attempted.api_key or "EMPTY",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        env={"PATH": os.environ["PATH"], **variables, **more.pop("env", {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        **more,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode()


async def test_googles_sdk_understands_the_answers(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    code, out = await run(gateway_world, attempted, bin_of("frameworks") / "python", HERE / "genai_client.py")
    assert code == 0, out
    told = json.loads(out.splitlines()[-1])
    assert (told["asked_for"], told["found"]) == (["sun"], FOUND)
    assert (told["streamed"], told["pieces"] > 2) == (PLAIN["hello"], True)
    assert told["tokens"] > told["counted"] > 0 and told["refused"] == "400 INVALID_ARGUMENT"
    spans = [span for span in await gateway_world.spans(attempted) if span.tokens]
    assert [semconv.CALL_FLAG in span.attributes for span in spans] == [False] * 3


async def test_gemini_cli_runs_unchanged(tmp_path: Path) -> None:
    """Its prompt is long: a tiny model with random weights reads it, and says something."""
    folder = installed(HERE / "node" / "gemini.json")
    tokenizer = make_tokenizer(["hello there, write a file"] * 8, 512)
    model = make_model(tokenizer, seed=0, max_positions=65536)
    service = EngineService(Engine(model, eos_token_ids=[tokenizer.eos_token_id], max_sequence_length=65536, slots=1))
    service.start()
    store = await SqlStore.open(tmp_path / "store.sqlite", synchronous="NORMAL")
    try:
        backend = TokenBackend(ChatTemplate.from_pretrained(tokenizer), service, name="embedded")
        gateway = Gateway(ModelTable([ModelEntry("policy", backend, train=Sampling(max_tokens=8))]), store)
        async with serving(Starlette(routes=gateway.routes())) as url:
            there = World(url, store, gateway, service)
            attempted = await there.attempt()
            (tmp_path / ".gemini").mkdir()
            (tmp_path / ".gemini" / "settings.json").write_text(SETTINGS)
            program = folder / "node_modules" / "@google" / "gemini-cli" / "bundle" / "gemini.js"
            options = ("-p", "write hello to hi.txt", "-m", "policy", "--yolo", "--skip-trust")
            env = {"HOME": str(tmp_path), "GEMINI_CLI_NO_RELAUNCH": "true"}
            code, out = await run(there, attempted, NODE, program, *options, env=env, cwd=tmp_path)
            spans = await there.spans(attempted)
    finally:
        service.close()
        await store.close()
    assert code == 0, out
    (span, *_) = spans
    assert span.tokens is not None and len(span.tokens.choices[0].token_ids) <= 8
    assert semconv.CALL_FLAG not in span.attributes
    assert span.attributes[semconv.CALL_DROPPED] == ["generationConfig.thinkingConfig"]
