"""`agl doctor`: each check is made for real, and what is wrong comes with a fix."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning.cli.main import run
from agentlightning.errors import ConfigError
from tests.gateway.upstream import GOOD, UNTOLD, Upstream
from tests.gateway.world import serving

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def told(
    capsys: pytest.CaptureFixture[str], *options: str, code: int = 0
) -> dict[str, dict[str, Any]]:
    """The checks by name."""
    assert await asyncio.to_thread(run, ["doctor", "--json", *options]) == code
    return {check["name"]: check for check in map(json.loads, capsys.readouterr().out.splitlines())}


async def test_this_machine_is_looked_at_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = await told(capsys)
    assert {"installation", "gpu", "writing"} <= set(checks)
    assert "agent-lightning-next" in checks["installation"]["found"]
    assert checks["writing"]["state"] == "ok" and not os.listdir(tmp_path)


async def test_a_place_that_cannot_hold_a_store_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").symlink_to("/proc")
    checks = await told(capsys, code=1)
    assert checks["writing"]["state"] == "failed" and "--run-dir" in checks["writing"]["fix"]


# --- a backend ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "kind", "state"),
    [(GOOD, "vllm", "ok"), (UNTOLD, "vllm", "warning"), (GOOD, "openai", "warning")],
)
async def test_whether_token_ids_come_back(
    events: list[str], kind: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream = Upstream(events)

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "small"}, {"id": "large"}]})

    async def version(request: Request) -> JSONResponse:
        return JSONResponse({"version": "0.11.0"}, 200 if kind == "vllm" else 404)

    routes = [Route("/v1/chat/completions", upstream.answer, methods=["POST"])]
    routes += [Route("/v1/models", models), Route("/version", version)]
    async with serving(Starlette(routes=routes)) as url:
        checks = await told(capsys, "--backend", f"{url}/v1")
    assert f"{kind}, serves small, large" in checks["backend"]["found"]
    assert checks["token ids"]["state"] == state
    assert upstream.asked[0]["model"] == "small"


async def test_a_backend_that_refuses_and_one_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    upstream = Upstream([], 401, {"error": {"message": "no such key"}})
    async with serving(
        Starlette(routes=[Route("/v1/chat/completions", upstream.answer, methods=["POST"])])
    ) as url:
        nothing_listed = await told(capsys, "--backend", f"{url}/v1", "--kind", "openai", code=1)
    away = await told(capsys, "--backend", "http://127.0.0.1:1/v1", code=1)
    assert (
        nothing_listed["backend"]["state"] == "failed"
        and "--backend-key" in nothing_listed["backend"]["fix"]
    )
    assert away["backend"]["state"] == "failed" and "nothing answers" in away["backend"]["found"]


async def test_wrong_logprobs_are_not_the_backend_s_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(*_: object) -> None:
        raise ConfigError("they are not those that were sampled from")

    monkeypatch.setattr("agentlightning.gateway.probe.probe", probe)
    upstream = Upstream(GOOD)
    routes = [Route("/v1/chat/completions", upstream.answer, methods=["POST"])]
    routes.append(Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "small"}]})))
    async with serving(Starlette(routes=routes)) as url:
        checks = await told(capsys, "--backend", f"{url}/v1", "--kind", "vllm", code=1)
    assert checks["backend"]["state"] == "ok"
    assert (
        checks["logprobs"]["state"] == "failed"
        and "processed_logprobs" in checks["logprobs"]["fix"]
    )
