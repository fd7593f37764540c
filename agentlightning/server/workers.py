"""The workers of a server, as the process that owns the store sees them: started, told about
models, and started again when one dies."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning.gateway.app import Gateway
from agentlightning.gateway.recorder import CallStatistics
from agentlightning.gateway.replicas import servers_of
from agentlightning.server.app import ServerSettings
from agentlightning.server.models import Models
from agentlightning.server.pipe import Pipe
from agentlightning.server.worker import Beginning, Report, State
from agentlightning.store.base import CALLS
from agentlightning.store.prompts import SpanRow
from agentlightning.store.spans import Observer
from agentlightning.store.sql import SqlStore
from agentlightning.types import Span

_log = logging.getLogger(__name__)
_PAUSE: Final = 0.5  # seconds until a worker that died is started again
_STOP_SECONDS: Final = 15.0
_rows: Final = msgspec.msgpack.Decoder(list[SpanRow])


class Workers:
    """The workers of a server, from `start` to `stop`. `observer` gets the spans that they
    store."""

    def __init__(
        self, settings: ServerSettings, store: SqlStore, observer: Observer | None
    ) -> None:
        self.reports: dict[Pipe, Report] = {}  # also of workers that are gone
        self._settings = settings
        self._store = store
        self._observer = observer
        self._beginning: Callable[[int], Beginning] | None = None
        self._pipes: dict[int, Pipe] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self, port: int, folder: Path, models: Models) -> None:
        """Return when all of them answer calls. Raises what keeps a worker from starting."""
        self._beginning = lambda index: Beginning(
            server=self._settings, port=port, folder=str(folder), index=index, state=_state(models)
        )
        begun = [asyncio.get_running_loop().create_future() for _ in range(self._settings.workers)]
        self._tasks = [
            asyncio.create_task(self._keep(index, ready), name=f"worker {index}")
            for index, ready in enumerate(begun, start=1)
        ]
        self._tasks.append(asyncio.create_task(self._pass_changes(), name="changes for workers"))
        await asyncio.gather(*begun)

    def changed(self) -> None:
        """Tell them how the models are now."""
        if self._beginning is not None:
            self.tell("state", self._beginning(0).state)

    async def stop(self) -> None:
        """Let them answer the calls that they have, and end."""
        self._stopping = True
        self.tell("stop")
        keeping = self._tasks[:-1]
        self._tasks = self._tasks[-1:]
        _, running = await asyncio.wait(keeping, timeout=_STOP_SECONDS) if keeping else (None, ())
        for task in (*running, *self._tasks):
            task.cancel()
        await asyncio.gather(*keeping, *self._tasks, return_exceptions=True)

    def tell(self, name: str, content: Any = None) -> None:
        """Tell all of them; each carries out its orders in sequence."""
        for pipe in self._pipes.values():
            pipe.tell(name, content)

    async def settled(self) -> None:
        """Return when the models of each are as they are here; a worker that dies counts as
        done."""
        self.changed()
        await asyncio.gather(
            *(pipe.ask("settle") for pipe in self._pipes.values()), return_exceptions=True
        )

    async def _keep(self, index: int, ready: asyncio.Future[None]) -> None:
        """Run worker number `index`, again when it dies."""
        while not self._stopping:
            try:
                await self._run(index, ready)
            except Exception as error:  # noqa: BLE001 - whoever waits for the first start gets it
                if not ready.done():
                    ready.set_exception(error)
                    return
                _log.error("worker %d could not be started again: %s", index, error)
            if self._stopping:
                return
            _log.error(
                "worker %d has died and is started again; its calls that were not answered fail",
                index,
            )
            await asyncio.sleep(_PAUSE)

    async def _run(self, index: int, ready: asyncio.Future[None]) -> None:
        ours, its = socket.socketpair()
        with its:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentlightning.server.worker", str(its.fileno())),
                pass_fds=[its.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        pipe = Pipe(lambda name, content: self._answer(pipe, name, content))
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: pipe, sock=ours)
            # from here on it hears of changes, behind what it begins with
            self._pipes[index] = pipe
            assert self._beginning is not None
            await pipe.ask("begin", self._beginning(index))
            if not ready.done():
                ready.set_result(None)
            await process.wait()
        finally:
            self._pipes.pop(index, None)
            pipe.close()
            if pipe in self.reports:
                self.reports[pipe] = msgspec.structs.replace(self.reports[pipe], gates={})
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _answer(self, pipe: Pipe, name: str, content: msgspec.Raw) -> Any:
        """Carry out what a worker asks of the store."""
        if name == "store_rows":
            return await self._store.store_rows(_rows.decode(content))
        if name == "stored":
            assert self._observer is not None
            self._observer(msgspec.msgpack.decode(content, type=list[Span]))
            return None
        if name == "report":
            self.reports[pipe] = msgspec.msgpack.decode(content, type=Report)
            return None
        return await self._store.perform(_decoder(name).decode(content))

    async def _pass_changes(self) -> None:
        """Have workers look anew at attempts that were changed."""
        with self._store.events() as changes:
            while True:
                change = await changes.get()
                if change is None:
                    self.tell("forget")  # some were missed
                elif change.touched or change.removed:
                    self.tell("forget", [*change.touched, *change.removed])


class SharedGateway(Gateway):
    """The owner's gateway: what holds calls, and what counts them, means those of its workers
    too."""

    def __init__(self, workers: Workers, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.workers = workers

    def hold_gate(self, name: str, holder: str, seconds: float | None = None) -> None:
        super().hold_gate(name, holder, seconds)
        self.workers.changed()

    def release_gate(self, name: str, holder: str) -> None:
        super().release_gate(name, holder)
        self.workers.changed()  # also what they held calls for, new weights

    def counts(self, name: str) -> tuple[int, int]:
        several = [
            super().counts(name),
            *(report.gates.get(name, (0, 0)) for report in self.workers.reports.values()),
        ]
        return sum(running for running, _ in several), sum(waiting for _, waiting in several)

    @property
    def statistics(self) -> CallStatistics:
        whole = copy.deepcopy(super().statistics)
        for statistics in (report.statistics() for report in self.workers.reports.values()):
            whole.calls += statistics.calls
            whole.untrainable += statistics.untrainable
            whole.undelivered += statistics.undelivered
            whole.held += statistics.held
            whole.held_seconds += statistics.held_seconds
            for model, version in statistics.versions.items():
                whole.versions[model] = max(version, whole.versions.get(model, 0))
        return whole

    @property
    def shed(self) -> int:
        return super().shed + sum(report.shed for report in self.workers.reports.values())


def _state(models: Models) -> State:
    table = models.gateway.models
    return State(
        models=list(models.registered.values()),
        versions={
            entry.name: {
                server.name: (server.connection.version, server.connection.unusable)
                for server in servers_of(entry.backend)
            }
            for entry in table
        },
        holds={gate.name: dict(gate.holds()) for gate in table.gates()},
    )


@cache
def _decoder(name: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(CALLS[name])
