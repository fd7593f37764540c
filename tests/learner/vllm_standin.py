"""A server that loads weights as vLLM does in development mode, over this project's own engine.

It stands in for vLLM where that is not installed: what its answers and its control routes look like
was compared with vLLM 0.32 by `test_vllm.py`, which asks the same of the real one. As a program it
takes the arguments of `vllm`."""

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

import httptools
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.learner.embedded_sampler import EmbeddedSampler, serve_policy
from agentlightning.learner.policy import load_policy
from agentlightning.server.app import create_app
from agentlightning.server.guards import GuardedProtocol
from tests.gateway.world import serving


class Standin:
    """The server of the model in a directory. `told` are the control routes it was asked for, in
    order; `loads` says whether it really loads what it is told to, and `keeps_head` that of a model
    whose embeddings are also its head it loads the embeddings alone, as builds of vLLM for CPUs
    do."""

    def __init__(self, model: Path) -> None:
        self.told: list[str] = []
        self.loads, self.keeps_head = True, False
        self.sampler: EmbeddedSampler = serve_policy(
            load_policy(model), concurrency=32, max_sequence_length=128
        )

    async def _control(self, request: Request) -> Response:
        self.told.append(request.url.path)
        print(request.url.path, flush=True)
        body = json.loads(await request.body() or b"{}")
        match request.url.path:
            case "/collective_rpc" if self.loads:
                async with self.sampler.exclusive():
                    weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                    with torch.no_grad():
                        if self.keeps_head:
                            head = self.sampler.model.lm_head
                            # no longer the embeddings
                            head.weight = torch.nn.Parameter(head.weight.clone())
                        self.sampler.model.load_state_dict(weights, strict=False)
            case "/update_weight_version":
                await self.sampler.service.update_weights(int(body["new_version"]))
            case _:
                pass
        return JSONResponse({})

    def app(self, gateway: Gateway) -> Starlette:
        paths = (
            "/collective_rpc",
            "/reset_prefix_cache",
            "/pause",
            "/resume",
            "/update_weight_version",
        )
        paths += ("/sleep", "/wake_up")
        app = create_app(None, gateway=gateway)
        app.routes[:0] = [Route(path, self._control, methods=["POST"]) for path in paths]
        return app


@asynccontextmanager
async def standin(model: Path) -> AsyncIterator[tuple[str, Standin]]:
    """Its URL, and the server."""
    server = Standin(model)
    async with AsyncExitStack() as stack:
        stack.callback(server.sampler.service.close)
        gateway = Gateway(ModelTable([ModelEntry("theirs", server.sampler.backend)]))
        stack.push_async_callback(gateway.close)
        yield (
            await stack.enter_async_context(serving(server.app(gateway), http=GuardedProtocol)),
            server,
        )


class Mortal(GuardedProtocol):
    """Connections of a process that ends itself, as `kill -9` does, at the request number `left`
    for `path`; with a file `once` only where that is not there yet."""

    path = ""
    left = 0
    once: Path | None = None

    def on_headers_complete(self) -> None:
        if httptools.parse_url(self.url).path.decode() == Mortal.path:
            Mortal.left -= 1
            if Mortal.left == 0:
                self._die()
        super().on_headers_complete()

    def _die(self) -> None:
        if self.once is None or not self.once.exists():
            if self.once is not None:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


async def main(model: str, where: dict[str, Any]) -> None:
    """Serve until killed. The variable STANDIN_DIES is a path and a number, and a file where it is
    to happen once."""
    server = Standin(Path(model))
    app = server.app(Gateway(ModelTable([ModelEntry("theirs", server.sampler.backend)])))
    if dies := os.environ.get("STANDIN_DIES", "").split():
        Mortal.path, Mortal.left = dies[0], int(dies[1])
        Mortal.once = Path(dies[2]) if len(dies) > 2 else None
    await uvicorn.Server(
        uvicorn.Config(app, http=Mortal, log_level="error", lifespan="off", **where)
    ).serve()


if __name__ == "__main__":
    if "--uds" in sys.argv:
        asyncio.run(main(sys.argv[2], {"uds": sys.argv[sys.argv.index("--uds") + 1]}))
    asyncio.run(main(sys.argv[2], {"port": int(sys.argv[sys.argv.index("--port") + 1])}))
