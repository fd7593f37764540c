"""`agl record -- COMMAND`: runs a program once, unchanged, records it and prints it as a tree."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO
from urllib.parse import quote

import click
import msgspec

from agentlightning.cli.backends import Upstream, backend_of_environment, with_backend
from agentlightning.cli.options import instrument_agents, key_flags, note, print_json
from agentlightning.cli.store_location import NEW, StoreLocation, with_location
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.runner.agent import LitAgent
from agentlightning.runner.signals import handling_signals
from agentlightning.semconv import CALL_ENDPOINT, CALL_REFUSED, HTTP_STATUS
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import LLM, AttemptedRollout, NamedResources, Rollout, Span

if TYPE_CHECKING:
    from agentlightning.runner.harnesses import Preset
    from agentlightning.store.base import LightningStore

_REASONS: Final = 10  # that are printed
_NO_CALLS: Final = (
    "no call of a language model was recorded; the program must find its API by OPENAI_BASE_URL, "
    "ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL, as the SDKs do where no other address is "
    "written into it"
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
@with_backend()
@click.option(
    "--harness",
    metavar="NAME",
    help="Run this coding agent (claude-code, codex, …) with COMMAND as its arguments.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Value of OPENAI_MODEL, ANTHROPIC_MODEL and AGL_MODEL, for a --harness.",
)
@key_flags(only=("instrument",))
@click.option("--task", metavar="JSON", help="The rollout's input; default: the command.")
@with_location(NEW)
async def record(
    command: tuple[str, ...],
    backend: Upstream | None,
    place: StoreLocation,
    harness: str | None,
    model: str | None,
    instrument: str | None,
    task: str | None,
    as_json: bool,
) -> int:
    """Run a program once and record its model calls.

    The program is unchanged, and its traces are recorded too. It must find its API by
    OPENAI_BASE_URL or ANTHROPIC_BASE_URL, as the SDKs do. Its exit code is passed on. A tree of its
    calls is printed on stderr; with --json, the program's own output too.

    With --harness the program gets a prepared home directory of its own: yours is neither read nor
    changed.

    \b
    agl record -- python my_agent.py
    agl record --instrument -- python my_agent.py
    agl record --harness claude-code --model claude-sonnet-5 -- -p "fix the test\""""
    from rich.console import Console

    from agentlightning.display import runnable
    from agentlightning.tracing.tree import rollout_tree

    instrument_agents(instrument, here=False)
    preset = None if harness is None else _preset(harness, model)
    command = command if preset is None else (preset.program, *command)
    program = Program(command, sys.stderr if as_json else None, preset, model or "")
    given = shlex.join(command) if task is None else _task(task)
    answering = await (backend.open() if backend else backend_of_environment(os.environ))
    async with place.open(create=True) as store:
        async with _gateway(answering, store) as url:
            rollout = await program.run(store, url, given)
        spans = await store.query_spans(rollout.rollout_id, "latest")
        ended = await store.get_rollout_by_id(rollout.rollout_id)
    Console(stderr=True, highlight=False).print(rollout_tree(ended or rollout, spans))
    unanswered = _unanswered(spans)
    _print_unanswered(unanswered, spans)
    server = place.server
    where = (
        f"--server {server}"
        if server
        else f"--store {shlex.quote(text_without_secrets(str(place)))}"
    )
    note(runnable(f"agl rollouts show {rollout.rollout_id} {where}"))
    page = f"/#/rollouts/{quote(rollout.rollout_id, safe='')}"
    served = (
        server.rstrip("/") + page
        if server
        else f"http://127.0.0.1:8123{page} while `agl server {where}` runs"
    )
    note(f"dashboard: {served}")
    if as_json:
        result = _result(ended or rollout, spans)
        print_json(result | {"not_answered": unanswered, "exit_code": program.exit_code})
    return program.exit_code


def _print_unanswered(unanswered: Counter[str], spans: Sequence[Span]) -> None:
    for why, times in unanswered.most_common(_REASONS):
        click.echo(f"not answered{f' ({times} times)' * (times > 1)}: {why}", err=True)
    if len(unanswered) > _REASONS:
        more = len(unanswered) - _REASONS
        click.echo(f"not answered, for {more} other reasons: see the tree", err=True)
    if not unanswered and not any(CALL_ENDPOINT in span.attributes for span in spans):
        click.echo(_NO_CALLS, err=True)


def _preset(harness: str, model: str | None) -> Preset:
    from agentlightning.runner.harnesses import find_preset

    if not model:
        raise click.UsageError("--harness needs --model NAME, the model it is to ask for")
    preset = find_preset(harness)
    preset.check()
    return preset


def _task(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise click.BadParameter(
            f"{error}; a task is JSON, text in quotes", param_hint="'--task'"
        ) from None


def _unanswered(spans: Sequence[Span]) -> Counter[str]:
    """Count the calls that the gateway or backend refused, by reason; the first hundred per
    attempt."""
    from agentlightning.tracing.tree import one_line

    found = Counter[str]()
    for span in spans:
        status = span.attributes.get(HTTP_STATUS)
        path = span.attributes.get(CALL_REFUSED)
        if status is not None and (path := path or span.attributes.get(CALL_ENDPOINT)):
            found[one_line(f"{path}: {status} {span.status.description}", 500)] += 1
    return found


def _result(rollout: Rollout, spans: Sequence[Span]) -> dict[str, Any]:
    """The object that `--json` prints."""
    from agentlightning.tracing.steps import read_steps
    from agentlightning.tracing.tree import totals

    took = totals(read_steps(spans))
    result = {
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "reward": rollout.reward,
    }
    return result | dataclasses.asdict(took)


@contextlib.asynccontextmanager
async def _gateway(backend: Any, store: LightningStore) -> AsyncGenerator[str]:
    """The gateway in front of the answering server, for this machine only; its root URL."""
    from agentlightning.gateway.gateway import Gateway
    from agentlightning.gateway.models import ANY, ModelEntry, ModelTable
    from agentlightning.server.app import create_app
    from agentlightning.server.serve import HttpServer

    entry = ModelEntry(ANY, backend, trainable=backend.captures_tokens, train=None, val=None)
    gateway = Gateway(ModelTable([entry]), store)
    try:
        # A key that nobody knows: the program may call models and add to its own attempt.
        app = create_app(store, gateway=gateway, admin_key=secrets.token_urlsafe(32))
        async with HttpServer(app) as http:
            yield http.url
    finally:
        await gateway.close()


# --- the program ----------------------------------------------------------------------------------


class ProgramFailed(AgentLightningError):
    """The program ended with an exit code other than 0, or by a signal."""


@dataclass
class Program(LitAgent[Any]):
    """A command as an agent that runs once. Its output goes to `output`, or where ours goes.
    `exit_code` is a shell's: 128 plus the signal's number for a killed program."""

    command: Sequence[str]
    output: TextIO | None = None
    preset: Preset | None = None
    model: str = ""
    exit_code: int = 0
    _url: str = ""
    _rollout: AttemptedRollout | None = field(default=None, repr=False)

    def own_copy(self) -> Program:
        return self  # it runs once, and is asked afterwards how that went

    async def run(self, store: LightningStore, url: str, task: Any) -> AttemptedRollout:
        """Run it as a rollout. `url` answers its calls and takes its spans."""
        from agentlightning.runner.runner import Runner

        self._url = url
        with contextlib.suppress(ProgramFailed):
            await Runner(store, self).run_one(task, mode="test")  # sampling is the program's own
        assert self._rollout is not None
        return self._rollout

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> None:
        from agentlightning.runner.environment import inherited_environment

        self._rollout = rollout
        variables = self._variables(rollout)
        if self.preset is None:
            await self._execute(inherited_environment() | variables)
        else:
            with tempfile.TemporaryDirectory(
                prefix="agl-record-", ignore_cleanup_errors=True
            ) as home:
                await self._execute(self.preset.environment(variables, Path(home)))
        if self.exit_code:
            raise ProgramFailed(f"exit code {self.exit_code}")

    def _variables(self, rollout: AttemptedRollout) -> dict[str, str]:
        from agentlightning.gateway.models import ANY
        from agentlightning.runner.environment import agent_environment
        from agentlightning.runner.instrumented import instrumenting

        ids = (rollout.rollout_id, rollout.attempt.attempt_id)
        key = rollout.api_key or ""
        llm = LLM(
            endpoint=f"{self._url}/rollout/{ids[0]}/attempt/{ids[1]}/v1",
            model=self.model or ANY,
            api_key=key,
        )
        variables = agent_environment(llm, *ids, self._url, key, reward_key=rollout.reward_key)
        return variables | instrumenting()

    async def _execute(self, environment: dict[str, str]) -> None:
        """Run the process to its end."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command, env=environment, stdout=self.output
            )
        except OSError as error:
            raise ConfigError(
                f"{self.command[0]!r} cannot be started: {error.strerror or error}"
            ) from None

        def pass_on(number: signal.Signals) -> None:
            from_terminal = (
                number is signal.SIGINT and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
            )
            if not from_terminal:  # which sends it to the program by itself
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

        with handling_signals(pass_on):  # we end when the program ends
            code = await process.wait()
        self.exit_code = code if code >= 0 else 128 - code
