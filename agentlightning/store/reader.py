"""A store for reading, while another process may own it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError
from agentlightning.store import records, rollouts
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.database import Connection, DatabaseThread, Transaction
from agentlightning.store.operations import READS
from agentlightning.store.sql import LEASE_SECONDS, absolute, database_of
from agentlightning.types import Run

_LOOK_AGAIN_SECONDS: Final = 0.5


class StoreReader(LightningStore):
    """The store in a file, or at a `postgresql://` URL, for reading while another process may own
    it. Create it with `open`, end it with `close`. Nothing is locked, and a call that would change
    something is a ConflictError. Commits of other processes wake nobody here, so waiting polls."""

    def __init__(self, address: str, connection: Connection) -> None:
        self._address = address
        self._thread = DatabaseThread(
            connection,
            "agl-store-reader",
            lambda held: Transaction(held, time.time(), LEASE_SECONDS, b""),
        )

    @classmethod
    async def open(cls, address: Path | str) -> StoreReader:
        """ConfigError if there is no store, or it is damaged; UnavailableError if PostgreSQL cannot
        be reached."""
        address = absolute(address)
        return cls(address, await asyncio.to_thread(database_of(address).open_reader, address))

    async def close(self) -> None:
        await self._thread.close()

    def _runs(self, tx: Transaction) -> list[Run]:
        owned = database_of(self._address).is_owned(self._address, tx.connection)
        runs = records.query_runs(tx)
        gone = () if owned else [run for run in runs if run.status == "running"]
        return [
            msgspec.structs.replace(run, status="stopped") if run in gone else run for run in runs
        ]

    async def perform(self, call: StoreCall) -> Any:
        read = {**READS, "finished_after": rollouts.finished_after}.get(call.method)
        if read is None:
            raise ConflictError(
                f"the store is open for reading only; this may change it: {call.words()}"
            )
        asked = msgspec.structs.asdict(call)
        if call.method == "query_runs":
            return await self._thread.submit(self._runs)
        give_up = time.monotonic() + asked.pop("timeout", 0.0)
        while True:
            answer: Any = await self._thread.submit(lambda tx: read(tx, **asked))
            remaining = give_up - time.monotonic()
            # only what has finished is waited for
            if remaining <= 0 or getattr(answer, "rollouts", True):
                return answer
            await asyncio.sleep(min(_LOOK_AGAIN_SECONDS, remaining))
