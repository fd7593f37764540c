"""A process that answers LLM calls beside the owner of the store:
`python -m agentlightning.server.worker FD`.

It reads and writes the store through a pipe to the owner, which also says how the models are. An
attempt's calls are all answered by one process, which numbers them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning.data.references import load_reference
from agentlightning.errors import UnavailableError
from agentlightning.garbage import garbage_sought_seldom
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.gateway.recorder import CallStatistics
from agentlightning.gateway.replicas import servers_of
from agentlightning.server.app import ServerSettings, create_app
from agentlightning.server.handover import Place
from agentlightning.server.logs import configure_logging
from agentlightning.server.models import RegisterModel, entry_of
from agentlightning.server.pipe import Pipe
from agentlightning.server.serve import HttpServer, run_on_fastest_loop
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call
from agentlightning.store.prompts import SpanRow
from agentlightning.store.redaction import Redact, redaction
from agentlightning.store.spans import SpanWriter, Stored
from agentlightning.types import Attempt, Span

_REPORT_SECONDS: Final = 0.5
_KNOWN: Final = 10_000  # attempts


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The models as the owner has them: `versions` has the policy version that each server of a
    model holds, by URL, and why one cannot be used; `holds` who holds a model's calls, and for how
    many seconds more at most."""

    models: list[RegisterModel]
    versions: dict[str, dict[str, tuple[int, str | None]]]
    holds: dict[str, dict[str, float | None]]


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """What worker number `index` begins with; `folder` holds the inboxes."""

    server: ServerSettings
    port: int
    folder: str
    index: int
    state: State


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's gateway has done since it began, and per model how many calls run and
    wait."""

    calls: list[tuple[str, str, int]]
    untrainable: dict[str, int]
    undelivered: int
    held: int
    held_seconds: float
    versions: dict[str, int]
    shed: int
    gates: dict[str, tuple[int, int]]

    def statistics(self) -> CallStatistics:
        calls = Counter({(model, outcome): count for model, outcome, count in self.calls})
        return CallStatistics(
            calls,
            Counter(self.untrainable),
            self.undelivered,
            self.held,
            self.held_seconds,
            self.versions,
        )


class PipedStore(LightningStore):
    """The owner's store through a pipe. Rows are made here; what nobody has touched since is known
    here."""

    def __init__(self, pipe: Pipe, redact: Redact, *, observed: bool) -> None:
        self._pipe = pipe
        self._writer = SpanWriter(redact, self._store_rows, self._show if observed else None)
        self._latest: dict[str, Attempt] = {}  # by rollout
        self._changes = 0

    def forget(self, rollout_ids: list[str] | None) -> None:
        """Look at these rollouts anew; None: at all of them."""
        self._changes += 1
        for rollout_id in list(self._latest) if rollout_ids is None else rollout_ids:
            self._latest.pop(rollout_id, None)

    async def perform(self, call: Call) -> Any:
        if call.method == "get_latest_attempt":
            return await self._latest_attempt(call)
        if call.method == "store_spans":
            return await self._writer.store(getattr(call, "spans"))  # noqa: B009 - it has this field
        return await self._ask(call.method, call, call.returns)

    async def close(self) -> None:
        """The pipe is closed by whoever made it."""

    async def _latest_attempt(self, call: Call) -> Attempt | None:
        rollout_id: str = getattr(call, "rollout_id")  # noqa: B009 - it has this field
        found = self._latest.get(rollout_id)
        if found is None:
            changes = self._changes
            found = await self._ask(call.method, call, call.returns)
            if found is not None and changes == self._changes:
                if len(self._latest) >= _KNOWN:
                    self._latest.clear()
                self._latest[rollout_id] = found
        return found

    async def _store_rows(self, rows: list[SpanRow]) -> list[Stored]:
        return await self._ask("store_rows", rows, list[Stored])

    def _show(self, spans: Sequence[Span]) -> None:
        self._pipe.tell("stored", spans)

    async def _ask(self, name: str, content: Any, returns: Any) -> Any:
        answer = await self._pipe.ask(name, content)
        return None if returns is None else msgspec.msgpack.decode(answer, type=returns)


class Worker:
    """The gateway of one worker, as the owner tells it."""

    def __init__(self, settings: ServerSettings, pipe: Pipe) -> None:
        self._pipe = pipe
        self._models: list[RegisterModel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._obeying = asyncio.Lock()  # what the owner says is carried out in its order
        hook = load_reference(settings.hook) if settings.hook else None
        observed = settings.otlp_forward is not None
        self.store = PipedStore(pipe, redaction(settings.capture, hook), observed=observed)
        self.gateway = Gateway(
            ModelTable(), self.store, admin_key=settings.key, body_limit=settings.body_limit
        )

    async def obey(self, name: str, content: msgspec.Raw) -> None:
        async with self._obeying:
            if name == "forget":
                self.store.forget(_read(content, list[str] | None))
            elif name == "state":
                await self.take(_read(content, State))

    async def take(self, state: State) -> None:
        """Have the models of this state, with its versions and holds."""
        table = self.gateway.models
        changed = [
            await asyncio.to_thread(entry_of, call)
            for call in state.models
            if call not in self._models
        ]
        for call in self._models:
            if call not in state.models and (removed := table.remove(call.name)) is not None:
                # Nobody waits until its calls under way are answered.
                self._closing.add(closing := asyncio.create_task(removed.backend.close()))
                closing.add_done_callback(self._closing.discard)
        for entry in changed:
            table.put(entry)
        self._models = state.models
        for entry in table:
            for server in servers_of(entry.backend):
                server.connection.version, server.connection.unusable = state.versions[entry.name][
                    server.name
                ]
        for name, holds in state.holds.items():
            for holder, seconds in holds.items():
                self.gateway.hold_gate(name, holder, seconds)
        for gate in table.gates():
            for holder, _ in gate.holds():
                if holder not in state.holds.get(gate.name, {}):
                    self.gateway.release_gate(gate.name, holder)

    async def report(self) -> None:
        """Tell the owner, again and again, what has become of calls."""
        reported = None
        while True:
            if (report := self.report_now()) != reported:
                self._pipe.tell("report", report)
                reported = report
            await asyncio.sleep(_REPORT_SECONDS)

    def report_now(self) -> Report:
        counted = self.gateway.statistics
        return Report(
            calls=[(model, outcome, count) for (model, outcome), count in counted.calls.items()],
            untrainable=dict(counted.untrainable),
            undelivered=counted.undelivered,
            held=counted.held,
            held_seconds=counted.held_seconds,
            versions=counted.versions,
            shed=self.gateway.shed,
            gates={gate.name: (gate.running, gate.waiting) for gate in self.gateway.models.gates()},
        )


def _read(content: msgspec.Raw, kind: Any) -> Any:
    return msgspec.msgpack.decode(content, type=kind)


async def _run(descriptor: int) -> None:
    """Serve from what the owner begins with until it says stop, or is gone."""
    stop = asyncio.Event()
    ready = asyncio.Event()
    begun: asyncio.Future[Beginning] = asyncio.get_running_loop().create_future()
    worker: Worker | None = None

    async def obey(name: str, content: msgspec.Raw) -> None:
        if name == "begin":
            begun.set_result(_read(content, Beginning))
            await ready.wait()
        elif name == "stop":
            stop.set()
        else:
            await ready.wait()
            assert worker is not None
            await worker.obey(name, content)

    loop = asyncio.get_running_loop()
    _, pipe = await loop.create_unix_connection(
        lambda: Pipe(obey), sock=socket.socket(fileno=descriptor)
    )
    beginning = await begun
    settings = beginning.server
    configure_logging(settings.log_format)
    worker = Worker(settings, pipe)
    await worker.take(beginning.state)
    app = create_app(
        None,
        gateway=worker.gateway,
        admin_key=settings.key,
        body_limit=settings.body_limit,
        rate_limit=settings.rate_limit,
        access_log=settings.access_log,
        keys=worker.store,
    )
    place = Place(beginning.index, settings.workers, Path(beginning.folder))
    async with HttpServer(app, host=settings.host, port=beginning.port, place=place):
        ready.set()
        reporting = asyncio.create_task(worker.report(), name="reports to the owner")
        ends = [asyncio.create_task(event.wait()) for event in (stop, pipe.closed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await worker.gateway.close()
    reporting.cancel()
    with contextlib.suppress(UnavailableError):  # the owner was killed
        await pipe.ask("report", worker.report_now())  # everything before it has arrived


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the owner says when to stop
        signal.signal(number, signal.SIG_IGN)
    with garbage_sought_seldom():
        run_on_fastest_loop(_run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
