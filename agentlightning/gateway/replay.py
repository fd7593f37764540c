"""An attempt that walks recorded calls again: which of them answers a call, and which calls are
live.

Replayed are all recorded calls but call k of a fork and those that go on from it. Each serves once,
equal ones in the order of the record. Live by right is what asks the same as call k or one behind
it, what goes on from a live answer, and everything once call k was asked and all before it have
been served. A retry has no call k: live by right are calls that go on from the end of the record,
and those that begin anew. Everything else has diverged.

Knows requests as attributes. Does not know backends and HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from agentlightning import semconv
from agentlightning.gateway.recordings import (
    RecordedCall,
    Records,
    answer_words,
    key_of,
    plain_messages,
    repeated_words,
)
from agentlightning.gateway.request import CallRefused
from agentlightning.gateway.varying import RecordedBeginnings, named
from agentlightning.store.sources import answered_calls, replayed_name
from agentlightning.tracing.dialects import json_of
from agentlightning.types import Attempt, Attributes, ForkSource, Rollout, Span

_SHOWN: Final = 160  # characters of each side of a difference


class Met(NamedTuple):
    """The decision on a call: the recorded one that answers it, None if it is live, and its place
    among those of the walk. A live call that `diverged` from the record says how."""

    call: RecordedCall | None = None
    place: int | None = None
    diverged: str | None = None


LIVE: Final = Met()


class Replay:
    """The walk of one attempt. `calls` are recorded ones, of which a fork, which has a `source`,
    serves those that are not at a place in `live`."""

    def __init__(
        self, calls: Sequence[RecordedCall], live: set[int], source: ForkSource | None
    ) -> None:
        self._calls = calls
        self._live = live
        self._source = source
        self._places: dict[bytes, list[int]] = {}
        for place, call in enumerate(calls):
            self._places.setdefault(call.key, []).append(place)
        self._met = set[int]()
        self._copies: list[int] = []
        self._noted = set[int]()  # indices of this attempt's calls
        # what identifies answers from which a call goes on by right
        self._open = set[int]()
        self._reached = source is None
        self._required = {
            place
            for place, call in enumerate(calls)
            if place not in live and (source is None or call.index < source.at)
        }
        self.blind = any(call.blind for call in calls)
        # to a server with the agent's own protocol; one whose server converts is read as it was
        self.passed_through = not calls or any(
            semconv.CALL_RESPONSE in call.span.attributes for call in calls
        )
        self.diverged = False
        self.beginnings: RecordedBeginnings | None = None
        if source is None:
            self._open.update(*(call.words for call in calls if call.last))
        elif source.replace:
            known = (
                json_of(call.span.attributes.get(semconv.GEN_AI_INPUT_MESSAGES))
                for place, call in enumerate(calls)
                if place not in live or call.index == source.at
            )
            self.beginnings = RecordedBeginnings(source.replace, filter(None, known))

    @property
    def is_fork(self) -> bool:
        return self._source is not None

    def resume(self, own: Sequence[RecordedCall], rollout_id: str) -> None:
        """Let a fork go on from the end of its own earlier attempts."""
        sampled = [call for call in own if call.name[0] == rollout_id]
        self._open.update(*(call.words for call in sampled if call.last))
        self._reached |= bool(sampled)

    def meet(self, asked: Attributes, prompt_ids: bytes, *, again: bool = False) -> Met:
        """Decide on a call, which is met once, unless its client makes it `again`, since it had no
        answer. CallRefused (409) if it diverges in a fork that fails then."""
        if self.diverged and self._source is None:
            return LIVE
        places = self._places.get(key_of(asked, prompt_ids), [])
        model = asked.get(semconv.GEN_AI_REQUEST_MODEL)
        waiting = [place for place in places if place not in self._met]
        if again and not waiting:
            waiting = [place for place in places if place not in self._live][-1:]
        if waiting:  # of equal calls, if they ask several models, those of the same first
            place = min(waiting, key=lambda place: (self._model(place) != model, place))
            self._met.add(place)
            call = self._calls[place]
            if place not in self._live:
                return Met(call, place)
            if self._source is not None and call.index == self._source.at:
                self._reached = True
                if self._source.answer is not None:
                    return Met(_given(call, self._source.answer), place)
            return Met(None, place)
        by_right = not self._live.isdisjoint(places) or self._goes_on(asked)
        if by_right or (self._reached and self._required <= self._met):
            return LIVE
        return self._diverge(asked)

    def _model(self, place: int) -> Any:
        return self._calls[place].span.attributes.get(semconv.GEN_AI_REQUEST_MODEL)

    def _goes_on(self, asked: Attributes) -> bool:
        repeated = repeated_words(asked)
        if self._source is None and not repeated:
            return True
        return not self._open.isdisjoint(repeated if self._source is not None else repeated[-1:])

    def _diverge(self, asked: Attributes) -> Met:
        why = self._difference(asked)
        if self._source is not None and self._source.on_divergence == "fail":
            raise CallRefused(why, status=409, code="replay_diverged")
        self.diverged = True
        return Met(diverged=why)

    def serve(self, index: int) -> None:
        """Note that call `index` of this attempt was answered from the record."""
        self._noted.add(index)
        self._copies.append(index)

    def take_copies(self) -> list[int]:
        """The copies so far, which do not count once the attempt starts over."""
        copies = self._copies
        self._copies = []
        return copies

    def put_back(self, met: Met) -> None:
        """Let a call be met again whose answer was not received."""
        self._met.discard(-1 if met.place is None else met.place)

    def went_on(self, index: int | None, attributes: Attributes) -> None:
        """Note a live call that was answered. Once nothing is left to serve, the record is
        dropped."""
        self._noted.add(-1 if index is None else index)
        self._open |= answer_words(attributes)
        if self._reached and len(self._met | self._live) == len(self._calls):
            self._calls = ()
            self._places = {}
            self._live = set()
            self._required = set()

    def restore(self, spans: Sequence[Span]) -> None:
        """Go on behind calls of this attempt that another process answered, or this one before a
        restart."""
        answered = answered_calls((span.attributes, span.status.status_code) for span in spans)
        places = {call.name: place for place, call in enumerate(self._calls)}
        for span in spans:
            attributes = span.attributes
            index = attributes.get(semconv.CALL_INDEX)
            self.diverged |= semconv.CALL_DIVERGED in attributes
            if not isinstance(index, int) or index not in answered - self._noted:
                continue
            self._noted.add(index)
            name = replayed_name(attributes)
            if name in places:
                self._met.add(places[name])
                self.serve(index)
                continue
            ids = b"" if span.tokens is None else span.tokens.prompt_token_ids.tobytes()
            waiting = [
                place
                for place in self._places.get(key_of(attributes, ids), ())
                if place in self._live and place not in self._met
            ]
            self._met.update(waiting[:1])
            at = self._source and self._source.at
            self._reached |= any(self._calls[place].index == at for place in waiting[:1])
            self._open |= answer_words(attributes)

    def _difference(self, asked: Attributes) -> str:
        """The difference to the recorded call that begins most alike."""
        if self.blind:
            return "this call asks something else than the record, whose texts were not stored"
        here = plain_messages(asked)
        candidates = [
            plain_messages(call.span.attributes)
            for place, call in enumerate(self._calls)
            if place not in self._met
        ]
        alike = [_shared(here, there) for there in candidates]
        if not candidates:
            return "all recorded calls have been answered, and this one goes on from none of them"
        same = max(alike)
        there = candidates[alike.index(same)]
        if same == len(here) == len(there):
            return "the tools, the number of choices or the prompt are not those of the record"
        number = f"message {same + 1}"
        if same == len(here) or same == len(there):
            longer = "the record" if same == len(here) else "this call"
            return f"{number} is in {longer} alone; up to there they are the same"
        shown = _excerpts(here[same], there[same])
        kinds = named(here[same], there[same])
        varied = ", ".join(kinds)
        hint = f". They differ in {varied} alone: fork with replace: [{varied}]" if kinds else ""
        return f"{number} is {shown[0]} here and {shown[1]} in the record{hint}"


def _shared(here: list[Any], there: list[Any]) -> int:
    return next(
        (n for n, (mine, other) in enumerate(zip(here, there, strict=False)) if mine != other),
        min(len(here), len(there)),
    )


def _excerpts(*messages: Any) -> list[str]:
    """Texts of two messages around where they begin to differ."""
    texts = [msgspec.json.encode(message, order="sorted").decode() for message in messages]
    start = max(0, _shared(list(texts[0]), list(texts[1])) - _SHOWN // 2)
    return [("…" if start else "") + text[start : start + _SHOWN] for text in texts]


def _given(call: RecordedCall, answer: str) -> RecordedCall:
    """A recorded call with another answer, which nobody sampled."""
    attributes: Attributes = {
        **call.span.attributes,
        semconv.GEN_AI_OUTPUT_MESSAGES: msgspec.json.encode(
            [{"role": "assistant", "content": answer}]
        ).decode(),
        semconv.GEN_AI_FINISH_REASONS: ["stop"],
        semconv.CALL_FLAG: semconv.GIVEN,
    }
    for name in (semconv.CALL_ANSWER, semconv.CALL_RESPONSE, semconv.GEN_AI_OUTPUT_TOKENS):
        attributes.pop(name, None)
    span = msgspec.structs.replace(call.span, attributes=attributes, tokens=None)
    return replace(call, span=span)


async def replay_of(records: Records, rollout: Rollout, attempt: Attempt) -> Replay | None:
    """The walk of an attempt; None if it walks nothing again. CallRefused as `Records.of`."""
    source = rollout.source
    again = attempt.sequence_id > 1 and rollout.config.retry == "replay"
    if source is None and not again:
        return None
    if source is None or source.attempt_id is None:
        return Replay(await records.before(rollout, attempt), set(), None)
    record = await records.of(source.rollout_id, source.attempt_id)
    following = record.following(source.at)
    calls = record.calls
    if again:  # those of its own attempts first, then what they were still to walk
        own = await records.before(rollout, attempt)
        calls = [*own, *(call for call in calls if call.index in following)]
        replay = Replay(calls, set(range(len(own), len(calls))), source)
        replay.resume(own, rollout.rollout_id)
        return replay
    live = {place for place, call in enumerate(calls) if call.index in following}
    return Replay(calls, live, source)
