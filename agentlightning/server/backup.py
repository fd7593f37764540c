"""A copy of the server's SQLite store, for administrators: made at one moment while others write,
then sent."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentlightning.errors import ConflictError, ForbiddenError
from agentlightning.server.access import Access
from agentlightning.server.request_log import note_caller
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlStore
from agentlightning.store.sqlite import back_up

BACKUP_PATH: Final = "/api/v1/backup"
_CHUNK: Final = 1 << 20  # bytes


def backup_routes(store: LightningStore, access: Access) -> list[Route]:
    """The route over one store, if this process owns it. ForbiddenError unless an administrator
    asks, ConflictError if the store is no file."""
    if not isinstance(store, SqlStore):
        return []

    async def send_copy(request: Request) -> Response:
        caller = await access.scope(request.headers)
        note_caller(request.scope, caller.name)
        if caller.attempt is not None or "admin" not in caller.opens:
            raise ForbiddenError(
                f"this key ({caller.name}) may not back up the store; use an admin key"
            )
        copy = await asyncio.to_thread(_copied, Path(store.address))
        return StreamingResponse(_chunks(copy), media_type="application/vnd.sqlite3")

    return [Route(BACKUP_PATH, send_copy)]


def _copied(file: Path) -> Path:
    """A copy of the store in a folder of its own."""
    if not file.is_file():
        raise ConflictError(
            "the store of this server is no SQLite file; one in PostgreSQL is backed up by "
            "pg_dump and pg_restore"
        )
    # Beside the store, where there is room for it; a folder of temporary files may be in memory.
    folder = Path(tempfile.mkdtemp(prefix=".backup-", dir=file.parent))
    try:
        back_up(file, folder / file.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / file.name


async def _chunks(copy: Path) -> AsyncGenerator[bytes]:
    """The bytes of a file, which is deleted with its folder."""
    try:
        with copy.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK):
                yield chunk
    finally:
        shutil.rmtree(copy.parent, ignore_errors=True)
