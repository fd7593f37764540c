"""Recorded groups in place of new rollouts: a loop trains on them without running the agent."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
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
from agentlightning.data.recordings import finished_rollouts, recorded_groups, rewarded_group
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import TracedRollout, compare_costs, trace_rollout
from agentlightning.errors import ConfigError, InUseError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.dialects import input_messages, model_name
from agentlightning.types import Span

_STORE_FILE: Final = "store.sqlite"


@contextlib.asynccontextmanager
async def open_traces(place: str) -> AsyncGenerator[LightningStore]:
    """The store in the directory of a run, in a SQLite file, at a postgresql:// URL, or behind a
    server's URL (with the key in AGL_KEY). ConfigError if there is none; InUseError if another
    process has it open."""
    remote = place.startswith(("http://", "https://"))
    file = _file(place)
    try:
        store = (
            LightningStoreClient(place, os.environ.get("AGL_KEY"))
            if remote
            else await SqlStore.open(file)
        )
    except InUseError:
        raise InUseError(
            f"traces: the store {file} is open already; give this run a store of its own, or give "
            "the URL of the server that has it open"
        ) from None
    try:
        yield store
    finally:
        await store.close()


def _file(place: str) -> str | Path:
    if "://" in place:
        return place
    file = Path(place, _STORE_FILE) if Path(place).is_dir() else Path(place)
    if not file.is_file():
        raise ConfigError(f"traces: there is no store at {file} (looked in {Path.cwd()})")
    return file


class RecordedGroups(Groups):
    """Groups of a store, in passes whose order is drawn from the seed."""

    def __init__(
        self,
        algorithm: RLSettings,
        context: RunContext,
        traces: LightningStore,
        groups: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(algorithm, context)
        self.sampler = TaskSampler(groups, context.seed)
        self._traces = traces

    async def collect(self) -> None:
        """All are complete."""

    async def take(self) -> tuple[list[CompleteGroup], Dropped]:
        # Some may be of a step that was started and not finished, and a run may be stopped while
        # they are read.
        self._start_next(
            min(self.algorithm.tasks_per_step, len(self.sampler.tasks)) - len(self._started)
        )
        self._taken = [await self._read(ticket) for ticket in self._started.values()]
        self._started = {}
        return self._taken, Dropped()

    async def _read(self, ticket: Ticket) -> CompleteGroup:
        ids = self.sampler.task(ticket.position)
        models = self.context.policies
        traced = tuple(
            map(_of_unknown_weights, await trace_group(self._traces, ids, self.algorithm, models))
        )
        return CompleteGroup(ticket, 0, traced, rewarded_group(traced, self.algorithm.unrewarded))


def _of_unknown_weights(traced: TracedRollout) -> TracedRollout:
    """Policy versions are numbered per run: those of another run are meaningless here."""
    return replace(
        traced,
        transitions=tuple(
            msgspec.structs.replace(call, versions=np.full_like(call.versions, -1))
            for call in traced.transitions
        ),
    )


_OTHERWISE: Final = (
    "Train the model that sampled them, or one with its tokenizer; or take the text: agl export "
    "--format sft"
)


async def read_groups(
    algorithm: RLSettings,
    context: RunContext,
    traces: LightningStore,
    run_id: str | None,
    place: str,
) -> list[tuple[str, ...]]:
    """The ids of the rollouts of each recorded group that can be trained on, without held-out
    rollouts.

    ConfigError if the policy has another tokenizer than the traces; TrainingError, with what was
    found, if there is nothing to learn."""
    context.progress.phase("read traces")
    tokens = next((policy.learner.token_bytes for policy in context.policies.values()), None)
    calls = algorithm.call_filter(*context.policies)
    groups: list[tuple[str, ...]] = []
    outcomes = Counter[str]()
    excluded = Counter[str]()
    models: set[str] = set()
    spelled: set[bool | None] = set()
    async for group in recorded_groups(traces, finished_rollouts(run_id)):
        alone = [
            trace_rollout(recorded.rollout, recorded.spans, calls=calls, reward=algorithm.reward)
            for recorded in group
        ]
        traced = compare_costs(alone, algorithm.reward)
        for rollout, recorded in zip(traced, group, strict=True):
            outcomes[rollout.outcome] += 1
            excluded += rollout.excluded
            if rollout.excluded[OTHER_MODEL]:
                models |= {
                    model_name(span.attributes) or ""
                    for span in recorded.spans
                    if span.tokens is not None
                }
            if tokens is not None:
                spelled |= _spelled(tokens, rollout, recorded.spans, place)
        context.progress.advance(outcomes.total())
        rewarded = rewarded_group(traced, algorithm.unrewarded)
        if algorithm.why_useless(rewarded) is None and algorithm.trains_on(rewarded):
            groups.append(tuple(rollout.rollout.rollout_id for rollout in traced))
    if False in spelled and True not in spelled:
        raise ConfigError(
            f"the prompts in {place} do not contain what was asked, as the tokenizer of "
            f"{', '.join(context.policies)} reads them: another one made these ids. {_OTHERWISE}"
        )
    if not groups:
        reasons = [f"{count:,} {outcome}" for outcome, count in outcomes.most_common()]
        reasons += [
            f"{count:,} calls left out ({reason})" for reason, count in excluded.most_common()
        ]
        hint = (
            f". Their model is called {', '.join(sorted(models))}: give model_name"
            if models
            else ""
        )
        where = place if run_id is None else f"{place}, run {run_id}"
        raise TrainingError(
            f"nothing to learn from: of the finished rollouts in {where}, held-out ones aside, "
            f"none is kept for {', '.join(context.policies)}: "
            f"{'; '.join(reasons) or 'there is none'}{hint}. Nothing was trained"
        )
    context.progress.note(
        f"{len(groups):,} recorded groups to train on, from {outcomes.total():,} rollouts"
    )
    return groups


def _spelled(
    tokens: TokenBytes, traced: TracedRollout, spans: Sequence[Span], place: str
) -> set[bool | None]:
    """Whether the tokens of the prompts contain the user's words exactly; None if these were not
    recorded. ConfigError for a token id that the model's tokenizer does not have."""
    if not traced.transitions:
        return set()
    last = max(
        int(max(call.prompt_ids.max(), call.response_ids.max())) for call in traced.transitions
    )
    if tokens.tokenizer.id_to_token(last) is None:
        raise ConfigError(
            f"rollout {traced.rollout.rollout_id} in {place} has the token id {last}, which the "
            f"model's tokenizer ({tokens.tokenizer.get_vocab_size():,} tokens) does not have. "
            f"{_OTHERWISE}"
        )
    call = traced.transitions[0]
    prompt = tokens.text(call.prompt_ids.tolist())
    attributes = next(span.attributes for span in spans if span.span_id == call.span_id)
    messages = chat_messages(input_messages(attributes))
    requests = [
        text.strip()
        for message in messages
        if message["role"] == "user" and isinstance(text := message["content"], str)
    ]
    return {any(text in prompt for text in requests if text) if any(requests) else None}
