"""A store read while another process owns it: what a job is doing is looked at while it runs.

Nothing is changed and nobody is kept out. Other processes' commits wake nobody here, so that waiting is looking again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError
from agentlightning.store import rollouts
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call
from agentlightning.store.database import Connection, DatabaseThread
from agentlightning.store.sql import LEASE_SECONDS, READS, database_of
from agentlightning.store.transaction import Transaction

_LOOK_AGAIN_SECONDS: Final = 0.5


_READS: Final[Mapping[str, Callable[..., Any]]] = {
    **READS,
    "finished_after": rollouts.finished_after,
}


class StoreReader(LightningStore):
    """The store in a file, or at a `postgresql://` URL, for reading. Made by `open`, ended by `close`; a call that
    would change something is a ConflictError."""

    def __init__(self, connection: Connection) -> None:
        self._thread = DatabaseThread(connection, "agl-store-reader")

    @classmethod
    async def open(cls, address: Path | str) -> StoreReader:
        """ConfigError if there is no store, or it is damaged; UnavailableError if PostgreSQL cannot be reached."""
        return cls(await asyncio.to_thread(database_of(address).open_reader, str(address)))

    async def close(self) -> None:
        await self._thread.close()

    async def perform(self, call: Call) -> Any:
        read = _READS.get(call.method)
        if read is None:
            raise ConflictError(f"the store is open for reading, and {call.method} may change it")
        asked = msgspec.structs.asdict(call)
        give_up = time.monotonic() + asked.pop("timeout", 0.0)
        while True:
            answer: Any = await self._thread.submit(
                lambda connection: read(Transaction(connection, time.time(), LEASE_SECONDS, b""), **asked)
            )
            remaining = give_up - time.monotonic()
            if remaining <= 0 or getattr(answer, "rollouts", True):  # only what has finished is waited for
                return answer
            await asyncio.sleep(min(_LOOK_AGAIN_SECONDS, remaining))
