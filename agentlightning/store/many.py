"""Many stores as one, for reading: files below folders, while others write them, and servers.

A call about a rollout, run, group or resources goes to the store that has it. Pages are sorted over
all stores; other lists are those of all stores, the newest found first."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from agentlightning.errors import AgentLightningError, ConflictError, InvalidError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.database import Changes
from agentlightning.store.reader import StoreReader
from agentlightning.store.waiters import Subscribers
from agentlightning.types import Filter, Order, Run

_DEEPEST: Final = 6  # folders below a searched folder
_SKIPPED: Final = frozenset({"checkpoints", "node_modules", "site-packages"})
_LOOK_SECONDS: Final = 2.0
_REMEMBERED: Final = 100_000  # ids whose store is known
_IDS: Final = ("rollout_id", "run_id", "group_id", "resources_id")


class ManyStores(LightningStore):
    """The stores in `folders`, which may be files, as they come and go, and `others` by name.
    Create it with `open`. A call that would change something is a ConflictError. A store that
    cannot be read is left out; `problems` has the reason, by path."""

    def __init__(self, folders: Sequence[Path], others: Mapping[str, LightningStore]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._others = others
        self._files: dict[Path, _File] = {}  # as they were found
        self._homes: OrderedDict[tuple[str, str], LightningStore] = OrderedDict()
        self._subscribers: Subscribers[Changes] = Subscribers()
        self._look_lock = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self.problems: dict[Path, str] = {}

    @classmethod
    async def open(
        cls, folders: Sequence[Path], others: Mapping[str, LightningStore] | None = None
    ) -> ManyStores:
        stores = cls(folders, others or {})
        await stores._look()
        return stores

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        for store in self._all().values():
            await store.close()

    @contextlib.contextmanager
    def events(self) -> Generator[asyncio.Queue[Changes | None]]:
        """None whenever a file was written to; for a `with` statement. Files of other processes are
        checked as long as somebody listens."""
        with self._subscribers.subscribe() as queue:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._keep_looking(), name="agl-many-stores")
            yield queue

    async def perform(self, call: StoreCall) -> Any:
        if call.scope != "read":
            raise ConflictError(
                f"these stores are open for reading, and {call.method} may change one"
            )
        asked = msgspec.structs.asdict(call)
        for field in _IDS:
            if field in asked and asked[field] is not None:
                return await self._ask_home(call, field, asked[field])
        if "cursor" in asked:
            return await self._page(call, asked)
        if call.method == "query_runs":
            return await self._runs(call)
        answers = [await store.perform(call) for store in self._all().values()]
        if call.method == "statistics":
            return dict(sum(map(Counter, answers), Counter[str]()))
        if all(isinstance(answer, list) for answer in answers):
            return [item for answer in answers for item in answer]
        return next((answer for answer in answers if answer is not None), None)

    async def _runs(self, call: StoreCall) -> list[Run]:
        """Each run once, also if a store was copied, with its store's name."""
        await self._look()
        found: dict[str, Run] = {}
        for key, store in self._all().items():
            runs: list[Run] = await store.perform(call)
            for run in runs:
                name = (
                    _name(key) if len(runs) == 1 else f"{_name(key)} {run.kind} {run.run_id[-6:]}"
                )
                known = {"name": run.manifest.get("name") or name}
                if key.endswith("store.sqlite"):
                    known["directory"] = str(Path(key).parent)
                found.setdefault(
                    run.run_id, msgspec.structs.replace(run, manifest=run.manifest | known)
                )
                self._remember("run_id", run.run_id, store)
        return list(found.values())

    def address_of(self, rollout_id: str) -> str | None:
        """The file with a rollout that was asked for before; None if it is not in a file."""
        home = self._homes.get(("rollout_id", rollout_id))
        return next((str(path) for path, file in self._files.items() if file.store is home), None)

    def _all(self) -> dict[str, LightningStore]:
        """All stores by path or name, the newest found first. Writes do not change this order."""
        return {
            **{str(path): file.store for path, file in reversed(self._files.items())},
            **self._others,
        }

    def _remember(self, field: str, value: str, store: LightningStore) -> None:
        self._homes.setdefault((field, value), store)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)

    async def _ask_home(self, call: StoreCall, field: str, value: str) -> Any:
        """The answer of the store that has it: the first that is not None."""
        home = self._homes.get((field, value))
        answer: Any = None
        for store in [home] if home is not None else self._all().values():
            try:
                answer = await store.perform(call)
            except NotFoundError:
                continue
            if answer not in (None, []):
                self._remember(field, value, store)
                return answer
        if answer is None and call.method not in (
            "get_rollout_by_id",
            "get_group",
            "get_resources_by_id",
        ):
            raise NotFoundError(f"no store here has {field} {value!r}")
        return answer

    async def _page(self, call: StoreCall, asked: dict[str, Any]) -> Any:
        """A page: of the store that has the run or rollouts asked for, else of all, merged."""
        stores = self._all()
        named = _ids_in(asked["where"])
        home = next((self._homes[key] for key in named if key in self._homes), None)
        if home is None and named:
            for store in stores.values():
                if (await store.perform(msgspec.structs.replace(call, limit=1, cursor=None))).items:
                    home = store
                    self._remember(*named[0], store)
                    break
        if home is not None:
            return await home.perform(call)
        return await self._merged(call, asked, stores)

    async def _merged(
        self, call: StoreCall, asked: dict[str, Any], stores: Mapping[str, LightningStore]
    ) -> Any:
        """A page of the rows of all stores, sorted together; its cursor holds a cursor of each
        store that has more. A row may come twice if its store is written to meanwhile, and none is
        left out."""
        begun = _cursors(asked["cursor"], stores)
        end = None if asked["limit"] is None else asked["limit"] + asked["offset"]
        whole = msgspec.structs.replace(call, limit=end, offset=0, with_total=False)
        parts = [msgspec.structs.replace(whole, cursor=cursor) for cursor in begun.values()]
        found = await asyncio.gather(
            *(stores[key].perform(part) for key, part in zip(begun, parts, strict=True))
        )
        pages = dict(zip(begun, found, strict=True))
        rows = _sorted(asked["order"], list(pages.values()))
        # What comes after a page that is not its store's last may come before the rows after it in
        # other stores.
        partial = [
            place
            for place, page in enumerate(pages.values())
            if page.next_cursor is not None and page.items
        ]
        ends = [
            next(index for index, row in enumerate(reversed(rows)) if row[0] == place)
            for place in partial
        ]
        rows = rows[: len(rows) - max(ends, default=0)][:end]
        items = [found[place].items[index] for place, index in rows]
        counts = Counter(place for place, _ in rows)
        taken = {key: counts[place] for place, key in enumerate(pages)}
        following: dict[str, str | None] = {}
        for key, part in zip(begun, parts, strict=True):
            if 0 < taken[key] < len(pages[key].items):
                cut = await stores[key].perform(msgspec.structs.replace(part, limit=taken[key]))
                following[key] = cut.next_cursor
            elif pages[key].items and not taken[key]:
                following[key] = begun[key]
            elif pages[key].next_cursor is not None:
                following[key] = pages[key].next_cursor
        total = None
        if asked["with_total"]:
            counted = msgspec.structs.replace(call, limit=0, offset=0, cursor=None)
            total = sum([(await store.perform(counted)).total or 0 for store in stores.values()])
        cursor = msgspec.json.encode(following).decode() if following else None
        return call.returns(items=tuple(items[asked["offset"] :]), total=total, next_cursor=cursor)

    async def _keep_looking(self) -> None:
        while self._subscribers.any():
            await asyncio.sleep(_LOOK_SECONDS)
            await self._look()
            if self._others:  # which announce nothing here
                self._subscribers.publish(None)

    async def _look(self) -> None:
        """Open new files, close those that are gone or replaced, and announce writes."""
        async with self._look_lock:
            stamps = await asyncio.to_thread(lambda: dict(_stamped(self._folders)))
            before = {path: file.stamp for path, file in self._files.items()}
            for path, file in list(self._files.items()):
                if path not in stamps or stamps[path].inode != file.stamp.inode:
                    del self._files[path]
                    for key in [key for key, store in self._homes.items() if store is file.store]:
                        del self._homes[key]
                    await file.store.close()
            for path, stamp in sorted(stamps.items(), key=lambda item: item[1].written):
                if path in self._files:
                    self._files[path].stamp = stamp
                    continue
                try:
                    self._files[path] = _File(await StoreReader.open(path), stamp)
                    self.problems.pop(path, None)
                except AgentLightningError as error:
                    self.problems[path] = str(error)
            if before != {path: file.stamp for path, file in self._files.items()}:
                self._subscribers.publish(None)


@functools.total_ordering
@dataclass(frozen=True)
class _SortKey:
    """A value that rows of several stores are compared by, None among them, in the direction of the
    order."""

    value: Any
    order: Order

    @classmethod
    def of(cls, item: Any, order: Order) -> _SortKey:
        """InvalidError for a field that only one store alone can sort by. What was enqueued later
        has a larger `number` in its own store, and among stores a later start."""
        name = "start_time" if order.field == "number" else order.field
        if name == "duration":
            return cls(item.end_time - item.start_time, order)
        if not hasattr(item, name):
            raise InvalidError(
                f"rows of several stores cannot be sorted by {name}; ask for one run's, or sort "
                "by time"
            )
        return cls(getattr(item, name), order)

    def __lt__(self, other: _SortKey) -> bool:
        if self.value is None or other.value is None:
            lacks = (self.value is None, other.value is None)
            return lacks == ((True, False) if self.order.nulls == "first" else (False, True))
        return self.value > other.value if self.order.descending else self.value < other.value


def _sorted(order: Sequence[Order], pages: Sequence[Any]) -> list[tuple[int, int]]:
    """Page and index of each row, sorted together; those of one page stay in their order."""
    rows: list[tuple[tuple[_SortKey, ...], int, int]] = []
    for place, page in enumerate(pages):
        keys = (tuple(_SortKey.of(item, key) for key in order) for item in page.items)
        rows += [(most, place, index) for index, most in enumerate(itertools.accumulate(keys, max))]
    return [(place, index) for _, place, index in sorted(rows)]


def _cursors(cursor: str | None, stores: Mapping[str, LightningStore]) -> Mapping[str, str | None]:
    if cursor is None:
        return dict.fromkeys(stores)
    try:
        begun = msgspec.json.decode(cursor, type=dict[str, str | None])
    except msgspec.DecodeError:
        begun = {cursor: None}
    if begun.keys() <= stores.keys():
        return begun
    raise InvalidError("the cursor names a store that is not here any more; ask from the start")


class _Stamp(NamedTuple):
    """Identity of a file, and size and time of the last write of it and its log."""

    inode: int
    written: float
    size: int


@dataclass
class _File:
    store: LightningStore
    stamp: _Stamp


def _name(key: str) -> str:
    """`runs/quickstart/store.sqlite` is `quickstart`, `work.sqlite` is `work`."""
    path = Path(key)
    if path.name == "store.sqlite":
        return path.parent.name
    return path.stem if path.suffix == ".sqlite" else key


def _files(top: Path) -> Generator[Path]:
    """The stores' files below a folder, or the file itself."""
    if not os.path.isdir(top):
        yield top
    for place, below, files in os.walk(top):
        deep = len(Path(place).relative_to(top).parts) >= _DEEPEST
        below[:] = (
            []
            if deep
            else sorted(name for name in below if name[0] != "." and name not in _SKIPPED)
        )
        yield from (Path(place, name) for name in files if name.endswith(".sqlite"))


def _stamped(tops: Sequence[Path]) -> Generator[tuple[Path, _Stamp]]:
    for file in itertools.chain.from_iterable(map(_files, tops)):
        with contextlib.suppress(OSError):  # it goes as we look
            found = [file.stat()]
            log = file.with_name(f"{file.name}-wal")
            found += [log.stat()] if log.exists() else []
            written = max(stat.st_mtime for stat in found)
            size = sum(stat.st_size for stat in found)
            yield file, _Stamp(found[0].st_ino, written, size)


def _ids_in(where: Filter | None) -> list[tuple[str, str]]:
    """The rollouts, run or group that a filter selects."""
    if where is None:
        return []
    parts = where.of if where.op == "and" else (where,)
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.field in _IDS and part.op in ("eq", "in"):
            found += [
                (part.field, value) for value in (part.value if part.op == "in" else [part.value])
            ]
    return sorted(found, key=lambda pair: _IDS.index(pair[0]))
