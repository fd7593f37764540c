"""Recorded attempts as they are walked again: their answered calls, what each asked, and which go
on from which.

Knows spans and the store. Does not know which call is answered by which."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import msgspec

from agentlightning import semconv
from agentlightning.errors import NotFoundError
from agentlightning.gateway.request import CallRefused
from agentlightning.store.base import LightningStore
from agentlightning.store.sources import CallName, answered_calls, discarded_by, replayed_name
from agentlightning.tracing.dialects import decoded, input_messages, json_of, output_messages
from agentlightning.tracing.links import read_links, words_of
from agentlightning.types import Attempt, Attributes, Rollout, Span

_KEPT_BYTES: Final = 256 << 20  # of recorded attempts, the latest used
_IDS: Final = frozenset({"id", "call_id", "tool_call_id", "tool_use_id"})


@dataclass(eq=False)
class RecordedCall:
    """A call whose answer an agent received. `span` is that of the call that was sampled, whose
    `name` it is, `index` its place in the attempt that was recorded. `key` identifies what was
    asked, `words` the answers. It `follows` another by index; no recorded call goes on from a
    `last` one."""

    span: Span
    name: CallName
    index: int
    key: bytes
    words: frozenset[int]
    follows: int | None
    last: bool

    @property
    def blind(self) -> bool:
        """Whether its messages were not recorded, so that token ids alone identify it."""
        return semconv.GEN_AI_OUTPUT_MESSAGES not in self.span.attributes


@dataclass
class Record:
    """The answered calls of an attempt, in order."""

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    size: int = 0

    def following(self, at: int) -> set[int]:
        """Indices of call `at` and of all that go on from it."""
        following = {at}
        for call in self.calls:
            if call.follows in following:
                following.add(call.index)
        return following


class Records:
    """Recorded attempts in the store, each read once for all who walk it."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._kept: OrderedDict[tuple[str, bool], Record] = OrderedDict()
        self._bytes = 0

    async def of(self, rollout_id: str, attempt_id: str, *, lost: bool = False) -> Record:
        """The record of an attempt. Of one whose worker was `lost`, also answers that were on
        their way then. CallRefused (404) if it is not in the store."""
        key = (attempt_id, lost)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        record = await self.read(rollout_id, attempt_id, lost=lost)
        self._kept[key] = record
        self._bytes += record.size
        while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size
        return record

    async def read(self, rollout_id: str, attempt_id: str, *, lost: bool = False) -> Record:
        """The same, as it is now."""
        try:
            spans = await self._store.query_spans(rollout_id, attempt_id)
        except NotFoundError:
            _refuse_missing(rollout_id)
        sampled: dict[str, RecordedCall] = {}
        for span in spans:
            name = replayed_name(span.attributes)
            if name is not None and span.attributes.get(semconv.CALL_FLAG) == semconv.REPLAYED:
                source = await self.of(*name[:2])
                found = next((call for call in source.calls if call.name == name), None)
                if found is None:
                    _refuse_missing(name[0])
                sampled[span.span_id] = found
        return await asyncio.to_thread(_read, spans, sampled, lost)

    async def before(self, rollout: Rollout, attempt: Attempt) -> list[RecordedCall]:
        """The answered calls of the attempts before this one; of a fork also those of its source
        that it was still to walk. What one attempt walked of another is in it once."""
        calls: list[RecordedCall] = []
        if (source := rollout.source) is not None and source.attempt_id is not None:
            record = await self.of(source.rollout_id, source.attempt_id)
            live = record.following(source.at)
            calls = [call for call in record.calls if call.index not in live]
        for earlier in await self._store.query_attempts(rollout.rollout_id):
            if earlier.sequence_id < attempt.sequence_id:
                lost = earlier.status == "unresponsive"
                own = (await self.of(rollout.rollout_id, earlier.attempt_id, lost=lost)).calls
                walked = {call.name for call in own}
                calls = [*own, *(call for call in calls if call.name not in walked)]
        return calls


def _refuse_missing(rollout_id: str) -> NoReturn:
    raise CallRefused(
        f"rollout {rollout_id} was deleted, so it cannot be walked again; start a new rollout",
        status=404,
        code="source_not_found",
    )


def _read(spans: Sequence[Span], sampled: Mapping[str, RecordedCall], lost: bool) -> Record:
    """The record of an attempt's spans, with the calls that some of them only name."""
    undelivered = set[int]()
    if lost:
        left = [span for span in spans if span.name == semconv.UNDELIVERED]
        undelivered.update(*(discarded_by(span.attributes) for span in left))
        spans = [span for span in spans if span not in left]
    answered = answered_calls((span.attributes, span.status.status_code) for span in spans)
    links = ("CALL_INDEX", "CALL_CONTINUES", "CALL_SHARED_MESSAGES", "CALL_TOKENS_AGREE")
    own_names = [getattr(semconv, link) for link in links]
    calls: list[Span] = []
    for span in spans:
        if span.span_id in sampled:  # with its content, and its own place
            whole = sampled[span.span_id].span
            own = {name: span.attributes[name] for name in own_names if name in span.attributes}
            attributes = {**whole.attributes, **own}
            span = msgspec.structs.replace(span, attributes=attributes, tokens=whole.tokens)
        if semconv.CALL_INDEX in span.attributes:
            calls.append(span)
    calls.sort(key=index_of)
    follows = {name: index_of(before) for name, (before, _) in read_links(calls).items()}
    continued = set(follows.values())
    record = Record()
    for span in calls:
        index = index_of(span)
        if index not in answered:
            continue
        ids = b"" if span.tokens is None else span.tokens.prompt_token_ids.tobytes()
        known = sampled.get(span.span_id)
        own_name = replayed_name(span.attributes) or (span.rollout_id, span.attempt_id, index)
        record.calls.append(
            RecordedCall(
                span=span if known is None else known.span,
                name=own_name if known is None else known.name,
                index=index,
                key=key_of(span.attributes, ids),
                words=answer_words(span.attributes),
                follows=follows.get(span.span_id),
                last=index not in continued,
            )
        )
        record.size += 2 * len(ids) + sum(len(str(value)) for value in span.attributes.values())
    # where an answer did not arrive and another one did, the agent went on from that
    received = {call.key for call in record.calls if call.index not in undelivered}
    record.calls = [
        call for call in record.calls if call.index not in undelivered or call.key not in received
    ]
    return record


def index_of(call: Span) -> int:
    index = call.attributes[semconv.CALL_INDEX]
    assert isinstance(index, int)
    return index


def answer_words(attributes: Attributes) -> frozenset[int]:
    """What identifies the answers of a call where they are repeated."""
    return frozenset(hash(words_of(message)) for message in output_messages(attributes))


def repeated_words(attributes: Attributes) -> list[int]:
    """What identifies the answers that a call repeats."""
    return [
        hash(words_of(message))
        for message in input_messages(attributes)
        if message.get("role") == "assistant"
    ]


def key_of(attributes: Attributes, prompt_ids: bytes) -> bytes:
    """What identifies that which a call asks: its messages and tools, or else its prompt. Ids of
    tool calls are numbered in their order, arguments are read, keys are sorted."""
    messages = plain_messages(attributes)
    prompt = attributes.get(semconv.CALL_PROMPT)
    if not messages and prompt is None:
        prompt = hashlib.blake2b(prompt_ids).hexdigest()
    tools = json_of(str(attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS, "null")))
    sampling = json_of(str(attributes.get(semconv.CALL_SAMPLING, "{}")))
    n = sampling.get("n") if isinstance(sampling, dict) else None
    asked = (attributes.get(semconv.GEN_AI_OPERATION), messages, prompt, tools, n)
    return digest(asked)


def plain_messages(attributes: Attributes) -> list[Any]:
    """The messages of a call without what may differ where nothing else is asked; of a request in
    a protocol that keeps it apart, the system prompt first."""
    text = attributes.get(semconv.GEN_AI_INPUT_MESSAGES)
    if not isinstance(text, str):
        return []
    messages = json_of(text)
    apart: list[Any] = []
    if semconv.CALL_RESPONSE in attributes:  # as it was passed through
        request = json_of(str(attributes.get(semconv.CALL_REQUEST)))
        fields: dict[str, Any] = request if isinstance(request, dict) else {}
        apart = [fields.get("system") or fields.get("instructions")]
    try:
        return plain_values(apart + (messages if isinstance(messages, list) else [messages]))
    except RecursionError:
        return [text]


def plain_values(messages: list[Any]) -> list[Any]:
    numbers: dict[str, int] = {}
    return [_plain(message, numbers) for message in messages]


def _plain(value: Any, numbers: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_plain(inner, numbers) for inner in value]
    if not isinstance(value, dict):
        return value
    plain: dict[str, Any] = {}
    for name, inner in value.items():
        if name in _IDS and isinstance(inner, str):
            plain[name] = numbers.setdefault(inner, len(numbers))
        elif name == "arguments" and isinstance(inner, str):
            plain[name] = decoded(inner)
        elif inner is not None:
            plain[name] = _plain(inner, numbers)
    return plain


def digest(value: Any) -> bytes:
    encoded = msgspec.json.encode(value, order="sorted")
    return hashlib.blake2b(encoded, digest_size=16).digest()
