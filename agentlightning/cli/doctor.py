"""`agl doctor`: what an installation and a backend need to work, each looked at for real, each with a fix.

Nothing is changed: what is written to see whether that can be done is removed again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
import msgspec

from agentlightning.cli.backends import Upstream, with_backend
from agentlightning.cli.options import json_option, print_json
from agentlightning.cli.place import RUNS, run
from agentlightning.errors import AgentLightningError, ConfigError

if TYPE_CHECKING:
    from agentlightning.gateway.backends.http import HttpBackend
    from agentlightning.gateway.backends.tokens import SglangBackend

_DISTRIBUTION: Final = "agent-lightning-next"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, and what to do about it unless it is ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    fix: str | None = None


@click.command()
@with_backend("none is looked at")
@click.option("--model", metavar="NAME", help="What to ask the backend for; default the first that it lists.")
@json_option
def doctor(
    backend: Upstream | None,
    model: str | None,
    as_json: bool,
) -> int:
    """Check the installation, GPU and write access, and with --backend what that needs, with fixes.

    A backend is asked for one token. The exit code is 1 if a check has failed; warnings are no failures."""

    async def work() -> int:
        found = f"{metadata.version(_DISTRIBUTION)}, Python {sys.version.split()[0]} at {sys.executable}"
        checks = [Check("installation", "ok", f"{_DISTRIBUTION} {found}"), _gpu(), _proxy(), await _writing()]
        if backend is not None:
            checks += [check async for check in _backend(backend, model)]
        for check in checks:
            _tell(check, as_json)
        return 1 if any(check.state == "failed" for check in checks) else 0

    return run(work())


def _tell(check: Check, as_json: bool) -> None:
    if as_json:
        print_json(check)
        return
    from rich.console import Console
    from rich.text import Text

    from agentlightning.cli.tables import STYLES
    from agentlightning.tracing.tree import one_line

    line = Text(f"{check.state:<7}  ", STYLES.get(check.state, "")).append(f"{check.name:<20}  ", "bold")
    line.append(one_line(check.found, 600))
    if check.fix:
        line.append(f"\n{' ' * 9}→ {one_line(check.fix, 600)}")
    Console(highlight=False).print(line, soft_wrap=True)


# --- this machine ------------------------------------------------------------------------------------------------


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("gpu", "ok", "torch is not installed, and only training needs one")
    import torch

    if torch.cuda.is_available():
        try:
            torch.ones(8, device="cuda").sum().item()
        except RuntimeError as error:
            fix = "install the build of torch for this driver (docs/install.md), or train with --device cpu"
            return Check("gpu", "failed", f"CUDA is there and does not compute: {error}", fix)
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", "ok", ", ".join(f"{card.name}, {card.total_memory / 1024**3:.0f} GiB" for card in cards))
    if torch.backends.mps.is_available():
        return Check("gpu", "ok", "Apple's, by MPS")
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        fix = "install the CUDA build: pip install --force-reinstall torch (docs/install.md), and look at nvidia-smi"
        return Check("gpu", "warning", f"there is an NVIDIA card that torch {torch.__version__} cannot use", fix)
    return Check("gpu", "ok", "none; models are trained and served on the CPU")


def _proxy() -> Check:
    """Agents call the gateway on this machine, which a company's proxy cannot reach."""
    proxies = [name for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy") if os.environ.get(name)]
    spared = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    if not proxies or "127.0.0.1" in spared or "*" in spared:
        return Check("proxy", "ok", "none in the way of 127.0.0.1")
    fix = "export NO_PROXY=127.0.0.1,localhost"
    return Check("proxy", "warning", f"{proxies[0]} is set, and clients may send calls of 127.0.0.1 there", fix)


async def _writing() -> Check:
    """A store is made where runs would be, and written to: some network drives cannot hold one."""
    from agentlightning.store.sql import SqlStore

    place = (RUNS if RUNS.is_dir() else Path()).absolute()
    try:
        with tempfile.TemporaryDirectory(prefix=".agl-doctor-", dir=place) as directory:
            store = await SqlStore.open(Path(directory) / "store.sqlite")
            try:
                asked = time.monotonic()
                await store.enqueue_rollout("doctor")
                took = time.monotonic() - asked
            finally:
                await store.close()
    except (OSError, AgentLightningError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fix = "work in a directory that you may write to, or name one with --run-dir and --store"
        return Check("writing", "failed", f"no store can be written at {place}: {reason}", fix)
    return Check("writing", "ok", f"a store at {place} commits in {took * 1000:.0f} ms")


# --- a backend ---------------------------------------------------------------------------------------------------


async def _backend(upstream: Upstream, model: str | None) -> AsyncGenerator[Check]:
    """Whether it is there, what it serves, and whether its answers can be trained on."""
    try:
        opened = await upstream.open()
    except ConfigError as error:
        yield Check("backend", "failed", str(error), "start it, or correct the URL, which usually ends in /v1")
        return
    async for check in _answers(opened, model):
        yield check
    await opened.close()


async def _answers(backend: HttpBackend | SglangBackend, model: str | None) -> AsyncGenerator[Check]:
    from agentlightning.errors import BackendError
    from agentlightning.gateway.backend import Sampling
    from agentlightning.gateway.capture import untrainable_reason
    from agentlightning.gateway.probe import one_answer, probe

    try:
        async with backend.connection.posted(backend.connection.url("models"), None, accepted=True) as response:
            listed = msgspec.json.decode(await response.read())
        served = [str(one["id"]) for one in listed["data"]]
    except (BackendError, msgspec.DecodeError, LookupError, TypeError) as error:
        fix = "see that the server runs, that the URL is right (it usually ends in /v1), and --backend-key"
        yield Check("backend", "failed", f"{backend.name}/models: {error}", fix)
        return
    yield Check("backend", "ok", f"{backend.name}, {backend.kind}, serves {', '.join(served[:5]) or 'no model'}")
    model = model or next(iter(served), None)
    if model is None:
        return
    try:
        answer = await one_answer(backend, model, Sampling(max_tokens=1))
    except BackendError as error:
        fix = "see that the model's name and --backend-key are right, and that the server's log has no error"
        yield Check("answer", "failed", f"{model}: {error}", fix)
        return
    yield Check("answer", "ok", f"{model} answers")
    reason = untrainable_reason(answer, backend.captures_tokens)
    if reason is not None:
        fix = "nothing is needed to record and evaluate; to train take vLLM 0.16 or newer, or a Trainer's own engine"
        yield Check("token ids", "warning", f"they do not come back: {reason}", fix)
        return
    try:
        await probe(backend, model, Sampling(temperature=0.7))
    except ConfigError as error:
        yield Check("logprobs", "failed", str(error), "start vLLM with --logprobs-mode processed_logprobs")
        return
    yield Check("token ids", "ok", "they come back, with the log-probabilities that were sampled from")
