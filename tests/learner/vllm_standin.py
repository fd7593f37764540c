"""A server that loads weights as vLLM does in development mode, over this project's own engine.

It stands in for vLLM where that is not installed: what its answers and its control routes look like was compared with
vLLM 0.32 by `test_vllm.py`, which asks the same of the real one. As a program it takes the arguments of `vllm`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.gateway.app import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.learner.policy import load_policy
from agentlightning.learner.serving import EmbeddedSampler, serve_policy
from agentlightning.server.app import create_app
from tests.gateway.world import serving


class Standin:
    """The server of the model in a directory. `told` are the control routes it was asked for, in order; `loads` says
    whether it really loads what it is told to."""

    def __init__(self, model: Path) -> None:
        self.told: list[str] = []
        self.loads = True
        self.sampler: EmbeddedSampler = serve_policy(load_policy(model), concurrency=32, max_sequence_length=128)

    async def _control(self, request: Request) -> Response:
        self.told.append(request.url.path)
        print(request.url.path, flush=True)
        body = json.loads(await request.body() or b"{}")
        match request.url.path:
            case "/collective_rpc" if self.loads:
                async with self.sampler.exclusive():
                    weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                    with torch.no_grad():
                        self.sampler.model.load_state_dict(weights, strict=False)
            case "/update_weight_version":
                await self.sampler.service.update_weights(int(body["new_version"]))
            case _:
                pass
        return JSONResponse({})

    def app(self, gateway: Gateway) -> Starlette:
        paths = ("/collective_rpc", "/reset_prefix_cache", "/pause", "/resume", "/update_weight_version")
        paths += ("/sleep", "/wake_up")
        routes = [Route(path, self._control, methods=["POST"]) for path in paths]
        return Starlette(routes=[*routes, Mount("/", create_app(None, gateway=gateway))])


@asynccontextmanager
async def standin(model: Path) -> AsyncIterator[tuple[str, Standin]]:
    """Its URL, and the server."""
    server = Standin(model)
    async with AsyncExitStack() as stack:
        stack.callback(server.sampler.service.close)
        gateway = Gateway(ModelTable([ModelEntry("theirs", server.sampler.backend)]))
        stack.push_async_callback(gateway.close)
        yield await stack.enter_async_context(serving(server.app(gateway))), server


class Mortal:
    """`app` in a process that ends itself, as `kill -9` does, at the request number `count` for `path`; with a file
    `once` only where that is not there yet."""

    def __init__(self, app: ASGIApp, path: str, count: int, once: str | None) -> None:
        self._app, self._path, self._left = app, path, count
        self._once = None if once is None else Path(once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == self._path:
            self._left -= 1
            if self._left == 0:
                self._die()
        await self._app(scope, receive, send)

    def _die(self) -> None:
        if self._once is None or not self._once.exists():
            if self._once is not None:
                self._once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


async def main(model: str, where: dict[str, Any]) -> None:
    """Serve until killed. The variable STANDIN_DIES is a path and a number, and a file where it is to happen once."""
    server = Standin(Path(model))
    app: ASGIApp = server.app(Gateway(ModelTable([ModelEntry("theirs", server.sampler.backend)])))
    if dies := os.environ.get("STANDIN_DIES", "").split():
        app = Mortal(app, dies[0], int(dies[1]), dies[2] if len(dies) > 2 else None)
    await uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", **where)).serve()


if __name__ == "__main__":
    if "--uds" in sys.argv:
        asyncio.run(main(sys.argv[2], {"uds": sys.argv[sys.argv.index("--uds") + 1]}))
    asyncio.run(main(sys.argv[2], {"port": int(sys.argv[sys.argv.index("--port") + 1])}))
