"""Spans on their way into the store: redacted, made into rows, written, and their prompts remembered for those that go
on from them.

Knows rows and who writes them: this process's database, or the process that owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from agentlightning.errors import OutdatedError
from agentlightning.store import codec
from agentlightning.store.prompts import Prepared, Prompts, SpanRow
from agentlightning.store.redaction import Redact
from agentlightning.store.spans import Stored
from agentlightning.types import Span

T = TypeVar("T")
Observer: TypeAlias = Callable[[Sequence[Span]], None]
"""Gets the spans that were stored, in the event loop, perhaps twice."""


class SpanWriter:
    """Stores spans by `write`, which takes rows and stores all or none."""

    def __init__(
        self, redact: Redact, write: Callable[[list[SpanRow]], Awaitable[list[Stored]]], observer: Observer | None
    ) -> None:
        self._redact = redact
        self._write = write
        self._observer = observer
        self._prompts = Prompts()

    async def store(self, spans: Sequence[Span]) -> list[int]:
        """The sequence id of each; 0 for a span that the redaction dropped."""
        prepared, stored = await write_spans(spans, self._prompts, self._redact, self._write)
        for entry, (_, attempt) in zip(prepared, stored, strict=True):
            if entry.prompt is not None and attempt is not None:
                entry.prompt.attempt = attempt
                self._prompts.remember(entry.row, entry.prompt)
        if self._observer is not None:
            written = zip(prepared, stored, strict=True)
            self._observer(
                [msgspec.structs.replace(entry.span, sequence_id=n) for entry, (n, _) in written if entry.span]
            )
        return [number for number, _ in stored]


async def write_spans(
    spans: Sequence[Span], prompts: Prompts, redact: Redact, write: Callable[[list[SpanRow]], Awaitable[T]]
) -> tuple[list[Prepared], T]:
    """Redact spans and write their rows. Long spans are prepared in a thread. Rows are written whole if the store
    no longer has what they go on from."""

    async def written(*, whole: bool) -> tuple[list[Prepared], T]:
        def prepare() -> list[Prepared]:
            return prompts.prepare(spans, redact, whole=whole)

        prepared = await asyncio.to_thread(prepare) if codec.larger(spans, codec.LARGE) else prepare()
        return prepared, await write([item.row for item in prepared])

    try:
        return await written(whole=False)
    except OutdatedError:
        return await written(whole=True)
