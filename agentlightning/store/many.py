"""Many stores as one, for reading: files below some folders, beside whatever writes them, and servers.

A call that names a rollout, run, group or resources goes to the store that has it; lists are those of all stores, one
after the other, the one written to last first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning.errors import AgentLightningError, ConflictError, InvalidError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call
from agentlightning.store.reading import StoreReader
from agentlightning.store.transaction import Changes
from agentlightning.types import Filter, Run

_DEEPEST: Final = 4  # folders below one that is searched
_SKIPPED: Final = frozenset({"checkpoints", "node_modules", "site-packages"})
_LOOK_SECONDS: Final = 2.0
_IDS: Final = ("rollout_id", "run_id", "group_id", "resources_id")


class ManyStores(LightningStore):
    """The stores below `folders`, found anew as they come and go, and `others` by name. Made by `open`; a call that
    would change something is a ConflictError. A store that cannot be read is left out: see `problems`, by path."""

    def __init__(self, folders: Sequence[Path], others: dict[str, LightningStore]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._others = others
        self._files: dict[Path, LightningStore] = {}
        self._stamps: dict[Path, tuple[float, int]] = {}
        self._homes: dict[tuple[str, str], LightningStore] = {}
        self._queues: set[asyncio.Queue[Changes | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self.problems: dict[Path, str] = {}

    @classmethod
    async def open(cls, folders: Sequence[Path], others: dict[str, LightningStore] | None = None) -> ManyStores:
        stores = cls(folders, others or {})
        await stores._look()
        stores._looking = asyncio.create_task(stores._keep_looking(), name="agl-many-stores")
        return stores

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        for store in self._all():
            await store.close()

    @contextlib.contextmanager
    def events(self) -> Generator[asyncio.Queue[Changes | None]]:
        """None whenever something was written to one of the files; for a `with` statement."""
        queue: asyncio.Queue[Changes | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    async def perform(self, call: Call) -> Any:
        if call.scope != "read":
            raise ConflictError(f"these stores are open for reading, and {call.method} may change one")
        asked = msgspec.structs.asdict(call)
        for field in _IDS:
            if field in asked and asked[field] is not None:
                return await self._of_one(call, field, asked[field])
        if "cursor" in asked:
            return await self._page(call, asked)
        answers = [await store.perform(call) for store in self._all()]
        if call.method == "query_runs":
            named = zip(self._names(), answers, strict=True)
            return [_named(run, name, len(runs)) for name, runs in named for run in runs]
        if call.method == "statistics":
            return dict(sum(map(Counter, answers), Counter[str]()))
        if all(isinstance(one, list) for one in answers):
            return [item for one in answers for item in one]
        return next((one for one in answers if one is not None), None)

    def _all(self) -> list[LightningStore]:
        newest = sorted(self._files, key=lambda path: self._stamps[path], reverse=True)
        return [*(self._files[path] for path in newest), *self._others.values()]

    def _names(self) -> list[str]:
        """What each of `_all` is called: by its folder, `runs/quickstart/store.sqlite` is `quickstart`."""
        newest = sorted(self._files, key=lambda path: self._stamps[path], reverse=True)
        return [*(path.parent.name if path.name == "store.sqlite" else path.stem for path in newest), *self._others]

    async def _of_one(self, call: Call, field: str, value: str) -> Any:
        """The answer of the store that knows what the call is about: the first whose answer is not nothing."""
        home = self._homes.get((field, value))
        answer: Any = None
        for store in [home] if home is not None else self._all():
            try:
                answer = await store.perform(call)
            except NotFoundError:
                continue
            if answer not in (None, []):
                self._homes[field, value] = store
                return answer
        if answer is None and call.method not in ("get_rollout_by_id", "get_group", "get_resources_by_id"):
            raise NotFoundError(f"no store here has {field} {value!r}")
        return answer

    async def _page(self, call: Call, asked: dict[str, Any]) -> Any:
        """A page: of the store that has the run or rollouts asked for, else of one store after the other."""
        stores = self._all()
        named = _ids_in(asked["where"])
        home = next((self._homes[one] for one in named if one in self._homes), None)
        if home is None and named:
            for store in stores:
                found = await store.perform(msgspec.structs.replace(call, limit=1, cursor=None))
                if found.items:
                    home = self._homes[named[0]] = store
                    break
        if home is not None:
            return await home.perform(call)
        place, _, inner = (asked["cursor"] or "0:").partition(":")
        if not place.isdecimal() or int(place) > len(stores):
            raise InvalidError("the cursor is none of these stores'")
        items: list[Any] = []
        kind, total, index, cursor = None, None, int(place), inner or None
        if asked.get("with_total"):
            counts = [await one.perform(msgspec.structs.replace(call, limit=0, cursor=None)) for one in stores]
            total = sum(one.total or 0 for one in counts)
        while index < len(stores) and (kind is None or len(items) < asked["limit"]):
            part = msgspec.structs.replace(call, limit=asked["limit"] - len(items), cursor=cursor)
            page = await stores[index].perform(part)
            kind, cursor = page, page.next_cursor
            items += page.items
            index += cursor is None
        following = f"{index}:{cursor or ''}" if index < len(stores) else None
        if kind is None:
            kind = call.returns
            return kind(items=(), total=total)
        return msgspec.structs.replace(kind, items=tuple(items), total=total, next_cursor=following)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if await self._look():
                for queue in self._queues:
                    queue.put_nowait(None)

    async def _look(self) -> bool:
        """Open what is new and close what is gone; whether anything was written since the last look."""
        stamps = await asyncio.to_thread(lambda: dict(_stamped(self._folders)))
        changed, self._stamps = stamps != self._stamps, {**self._stamps, **stamps}
        for path in [path for path in self._files if path not in stamps]:
            gone = self._files.pop(path)
            self._homes = {key: store for key, store in self._homes.items() if store is not gone}
            await gone.close()
        for path in stamps.keys() - self._files.keys():
            try:
                self._files[path] = await StoreReader.open(path)
                self.problems.pop(path, None)
            except AgentLightningError as error:
                self.problems[path] = str(error)
        return changed


def _stamped(folders: Sequence[Path]) -> Generator[tuple[Path, tuple[float, int]]]:
    """Each store's file below the folders, with when it or its log was written to last, and their size."""
    for top in folders:
        for place, below, files in os.walk(top):
            deep = len(Path(place).relative_to(top).parts) >= _DEEPEST
            below[:] = [] if deep else sorted(one for one in below if one[0] != "." and one not in _SKIPPED)
            for file in (Path(place, name) for name in files if name.endswith(".sqlite")):
                with contextlib.suppress(OSError):  # it goes as we look
                    found = [path.stat() for path in (file, file.with_name(f"{file.name}-wal")) if path.exists()]
                    yield file, (max(one.st_mtime for one in found), sum(one.st_size for one in found))


def _ids_in(where: Filter | None) -> list[tuple[str, str]]:
    """The rollouts, or else the run or group, of which alone a filter lets something through."""
    parts: Sequence[Filter] = () if where is None else where.of if where.op == "and" else (where,)
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.field in _IDS and part.op in ("eq", "in"):
            found += [(part.field, one) for one in (part.value if part.op == "in" else [part.value])]
    return sorted(found, key=lambda one: _IDS.index(one[0]))


def _named(run: Run, store: str, alone: int) -> Run:
    name = store if alone == 1 else f"{store} {run.kind} {run.run_id[-6:]}"
    return msgspec.structs.replace(run, manifest={**run.manifest, "name": name})
