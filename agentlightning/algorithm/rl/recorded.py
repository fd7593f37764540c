"""Groups that were recorded earlier, in the place of those that are run: what a loop trains on without new rollouts.

Knows the store of the traces, and checks before anything is trained that the policy's tokenizer reads them and that
something of them is to be learned.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.rl.groups import CompleteGroup, Dropped, Groups, Ticket, trace_group
from agentlightning.algorithm.rl.sampling import TaskSampler
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.call_filter import OTHER_MODEL
from agentlightning.data.conversations import chat_messages
from agentlightning.data.recorded import Recorded, finished_rollouts, recorded_groups, rewarded_group
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import ConfigError, InUseError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.messages import input_messages, model_name
from agentlightning.types import Span

_STORE_FILE: Final = "store.sqlite"


@contextlib.asynccontextmanager
async def open_traces(place: str) -> AsyncGenerator[LightningStore]:
    """The store in the directory of a run, in a SQLite file, at a postgresql:// URL, or behind a server's URL (whose
    key is in AGL_KEY). ConfigError where there is none, or another has it open."""
    file = place if "://" in place else _file(Path(place))
    try:
        remote = place.startswith(("http://", "https://"))
        store = LightningStoreClient(place, os.environ.get("AGL_KEY")) if remote else await SqlStore.open(file)
    except InUseError:
        raise InUseError(
            f"traces: the store {file} is open already; give this run a store of its own, or give the URL of the "
            "server that has it open"
        ) from None
    try:
        yield store
    finally:
        await store.close()


def _file(path: Path) -> Path:
    file = path / _STORE_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"traces: there is no store at {file} (looked in {Path.cwd()})")
    return file


class RecordedGroups(Groups):
    """Groups that a store holds, pass after pass in an order that the seed gives."""

    def __init__(
        self, algorithm: RLSettings, context: RunContext, traces: LightningStore, groups: Sequence[Sequence[str]]
    ) -> None:
        super().__init__(algorithm, context)
        self.sampler = TaskSampler(groups, context.seed)
        self._traces = traces

    async def collect(self) -> None:
        """All are complete."""

    async def take(self) -> tuple[list[CompleteGroup], Dropped]:
        tickets = [*self._begun.values()]  # of a step that was begun and not finished
        count = min(self.algorithm.tasks_per_step, len(self.sampler.tasks)) - len(tickets)
        tickets += [self._next_ticket() for _ in range(count)]
        self._begun = {self.name(ticket): ticket for ticket in tickets}  # a run may be stopped while they are read
        self._taken, self._begun = [await self._read(ticket) for ticket in tickets], {}
        return self._taken, Dropped()

    async def _read(self, ticket: Ticket) -> CompleteGroup:
        ids, models = self.sampler.task(ticket.position), tuple(self.context.policies)
        traced = tuple(map(_of_unknown_weights, await trace_group(self._traces, ids, self.algorithm, models)))
        return CompleteGroup(ticket, 0, traced, rewarded_group(traced, self.algorithm.unrewarded))


def _of_unknown_weights(traced: TracedRollout) -> TracedRollout:
    """Policy versions count within a run: those of another say nothing here."""
    return replace(
        traced,
        transitions=tuple(
            msgspec.structs.replace(one, versions=np.full_like(one.versions, -1)) for one in traced.transitions
        ),
    )


# --- before anything is trained ----------------------------------------------------------------------------------


@dataclass
class _Read:
    """What the traces come to. `groups` are the rollouts of those that teach something, by id; `kept` counts rollouts
    that may be trained; `spelled` says of how many prompts the tokenizer spells what was said, and of how many not."""

    groups: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    kept: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    excluded: Counter[str] = field(default_factory=Counter[str])
    rewards: list[float] = field(default_factory=list[float])
    models: set[str] = field(default_factory=set[str])
    spelled: Counter[bool] = field(default_factory=Counter[bool])


async def read_groups(
    algorithm: RLSettings, context: RunContext, traces: LightningStore, run_id: str | None, place: str
) -> list[tuple[str, ...]]:
    """The rollouts of each recorded group that teaches something, by id. Held-out rollouts are left alone.

    ConfigError where the policy's tokenizer is not the one that the traces were made with; TrainingError, which says
    what there was, where nothing is to be learned."""
    context.progress.phase("read traces")
    read = _Read()
    tokens = next((policy.learner.token_bytes for policy in context.policies.values()), None)
    calls = algorithm.call_filter(*context.policies)
    async for group in recorded_groups(traces, finished_rollouts(run_id)):
        traced = [trace_rollout(one.rollout, one.spans, calls=calls, reward=algorithm.reward) for one in group]
        for one, recorded in zip(traced, group, strict=True):
            _note(read, one, recorded, tokens, place)
        context.progress.advance(read.outcomes.total())
        rewarded = rewarded_group(traced, algorithm.unrewarded)
        read.rewards += rewarded.rewards
        if algorithm.why_useless(rewarded) is None:
            kept = sum(any(item.teaches for item in calls) for calls in algorithm.advantages([rewarded])[0])
            read.kept += kept
            read.groups += [tuple(one.rollout.rollout_id for one in traced)] if kept else []
    if read.spelled[False] and not read.spelled[True]:
        raise ConfigError(
            f"the prompts in {place} do not say what was asked when the tokenizer of "
            f"{', '.join(context.policies)} reads them: another one made these ids. {_OTHERWISE}"
        )
    if not read.groups:
        raise TrainingError(_nothing(read, context, place, run_id))
    a_pass = math.ceil(len(read.groups) / algorithm.tasks_per_step)
    context.progress.note(
        f"{read.kept:,} of {read.outcomes.total():,} recorded rollouts are learned from; to go through their groups "
        f"takes {a_pass} step{'s'[: a_pass > 1]}, and there are {algorithm.steps}"
    )
    return read.groups


_OTHERWISE: Final = (
    "Train the model that sampled them, or one with its tokenizer; or take the text: agl export --format sft"
)


def _note(read: _Read, traced: TracedRollout, recorded: Recorded, tokens: TokenBytes | None, place: str) -> None:
    read.outcomes[traced.outcome] += 1
    read.excluded += traced.excluded
    sampled = [span for span in recorded.spans if span.tokens is not None]
    if traced.excluded[OTHER_MODEL]:
        read.models |= {name for span in sampled if (name := model_name(span.attributes))}
    if tokens is None or not traced.transitions:
        return
    ours = {one.span_id for one in traced.transitions}
    last = max(int(max(one.prompt_ids.max(), one.response_ids.max())) for one in traced.transitions)
    if tokens.tokenizer.id_to_token(last) is None:
        raise ConfigError(
            f"rollout {traced.rollout.rollout_id} in {place} has the token id {last}, which the model's tokenizer "
            f"({tokens.tokenizer.get_vocab_size():,} tokens) does not have. {_OTHERWISE}"
        )
    spelled = next(
        (fits for span in sampled if span.span_id in ours and (fits := _spells(tokens, span)) is not None), None
    )
    if spelled is not None:
        read.spelled[spelled] += 1


def _spells(tokens: TokenBytes, span: Span) -> bool | None:
    """Whether the prompt's tokens hold what a user said, letter by letter; None where that was not recorded."""
    messages = chat_messages(input_messages(span.attributes))
    said = [text.strip() for one in messages if one["role"] == "user" and isinstance(text := one["content"], str)]
    if span.tokens is None or not any(said):
        return None
    prompt = tokens.text(list(span.tokens.prompt_token_ids))
    return any(text in prompt for text in said if text)


def _nothing(read: _Read, context: RunContext, place: str, run_id: str | None) -> str:
    where = place if run_id is None else f"{place}, run {run_id}"
    if not read.outcomes:
        return f"nothing to learn from: there is no finished rollout in {where}, held-out ones aside"
    told = [f"{count:,} {outcome}" for outcome, count in read.outcomes.most_common()]
    if read.rewards:
        told.append(f"rewards from {min(read.rewards):g} to {max(read.rewards):g}")
    told += [f"{count:,} calls left out ({reason})" for reason, count in read.excluded.most_common()]
    hint = f". Their model is called {', '.join(sorted(read.models))}: give model_name" if read.models else ""
    return (
        f"nothing to learn from: none of the {read.outcomes.total():,} rollouts in {where} is kept for "
        f"{', '.join(context.policies)}: {'; '.join(told)}{hint}. Nothing was trained"
    )
