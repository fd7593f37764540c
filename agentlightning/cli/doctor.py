"""`agl doctor`: checks an installation and a backend by using them, and suggests fixes."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import click
import msgspec

from agentlightning.cli.backends import Upstream, listed_models, with_backend
from agentlightning.cli.options import json_option, print_result
from agentlightning.cli.store_location import RUNS
from agentlightning.errors import AgentLightningError, BackendError, ConfigError, docs_page
from agentlightning.tracing.tree import one_line


class Check(NamedTuple):
    """A check, its result and, unless it is ok, how to fix it."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    fix: str | None = None


@click.command()
@with_backend("none is checked")
@click.option(
    "--model",
    metavar="NAME",
    help="Model to ask for; default: the first one that the server lists.",
)
@json_option
def doctor(backend: Upstream | None, model: str | None, as_json: bool) -> int:
    """Check the installation and a model server.

    It looks at GPU and write access and, with --backend, at a model server, and suggests fixes.

    The model server is asked for one token. The exit code is 1 if a check failed; warnings do not
    count."""

    async def work() -> int:
        found = (
            f"{metadata.version('agent-lightning-next')}, Python {sys.version.split()[0]} at "
            f"{sys.executable}"
        )
        checks = [
            Check("installation", "ok", f"agent-lightning-next {found}"),
            _gpu(),
            await _writing(),
        ]
        if backend is not None:
            checks += [check async for check in _backend(backend, model)]
        for check in checks:
            words = f"{check.state:<7}  {check.name:<20}  {one_line(check.found, 600)}"
            print_result(
                as_json,
                check._asdict(),
                words + (f"\n{' ' * 9}→ {one_line(check.fix, 600)}" if check.fix else ""),
            )
        return 1 if any(check.state == "failed" for check in checks) else 0

    return asyncio.run(work())


def _gpu() -> Check:
    if find_spec("torch") is None:
        return Check("gpu", "ok", "torch is not installed, and only training needs one")
    import torch

    fix = (
        f"install the build of torch for this driver ({docs_page('install.md')}), or train with "
        "--device cpu"
    )
    if torch.cuda.is_available():
        try:
            torch.ones(8, device="cuda").sum().item()
        except RuntimeError as error:
            return Check("gpu", "failed", f"CUDA is there and does not compute: {error}", fix)
        return Check("gpu", "ok", f"{torch.cuda.device_count()} of {torch.cuda.get_device_name()}")
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        return Check(
            "gpu",
            "warning",
            f"there is an NVIDIA card that torch {torch.__version__} cannot use",
            fix,
        )
    return Check("gpu", "ok", "none; models are trained and served on the CPU")


async def _writing() -> Check:
    """Create a store where runs would be, and write to it: some network drives cannot hold one."""
    from agentlightning.store.sql import SqlStore

    place = (RUNS if RUNS.is_dir() else Path()).absolute()
    try:
        with tempfile.TemporaryDirectory(prefix=".agl-doctor-", dir=place) as directory:
            store = await SqlStore.open(Path(directory) / "store.sqlite")
            try:
                await store.enqueue_rollout("doctor")
            finally:
                await store.close()
    except (OSError, AgentLightningError) as error:
        fix = "work in a directory that you may write to, or name one with --run-dir and --store"
        return Check("writing", "failed", f"no store can be written at {place}: {error}", fix)
    return Check("writing", "ok", f"a store can be written at {place}")


async def _backend(upstream: Upstream, model: str | None) -> AsyncGenerator[Check]:
    """Whether the server answers, what it serves, and whether its answers can be trained on."""
    from agentlightning.gateway.backend import Sampling
    from agentlightning.gateway.capture import untrainable_reason
    from agentlightning.gateway.probe import one_answer, probe

    fix = (
        "see that the server runs, that the URL is right (it usually ends in /v1), and "
        "--backend-key and --model"
    )
    backend = None
    try:
        backend = await upstream.open()
        served = await listed_models(backend.connection)
        yield Check(
            "backend",
            "ok",
            f"{backend.name}, {backend.kind}, serves {', '.join(served[:5]) or 'no model'}",
        )
        model = model or next(iter(served), None)
        if model is None:
            return
        answer = await one_answer(backend, model, Sampling(max_tokens=1))
        yield Check("answer", "ok", f"{model} answers")
        reason = untrainable_reason(answer, backend.captures_tokens)
        if reason is not None:
            fix = (
                "record and evaluate as it is; to train take vLLM 0.16 or newer, or a Trainer's "
                "own engine"
            )
            yield Check("token ids", "warning", f"they do not come back: {reason}", fix)
            return
        try:
            await probe(backend, model, Sampling(temperature=0.7))
        except ConfigError as error:
            yield Check(
                "logprobs",
                "failed",
                str(error),
                "start vLLM with --logprobs-mode processed_logprobs",
            )
            return
        yield Check(
            "token ids", "ok", "they come back, with the log-probabilities that were sampled from"
        )
    except ConfigError as error:
        yield Check("backend", "failed", str(error), fix)
    except (BackendError, msgspec.DecodeError, LookupError, TypeError) as error:
        yield Check("backend", "failed", f"{upstream.url}: {error}", fix)
    finally:
        if backend is not None:
            await backend.close()
