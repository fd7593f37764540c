"""Forks: rollouts that walk a recorded attempt again up to a call. A source must have this call,
and a fork must be of the same task and the same program.

This module knows rows. It does not know how a call is answered again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning import semconv
from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import codec, lifecycle
from agentlightning.store.database import FIND, Connection
from agentlightning.store.tables import ATTEMPTS, ROLLOUTS, RUNS
from agentlightning.types import (
    Attempt,
    Attributes,
    EnqueueRolloutRequest,
    ForkSource,
    Rollout,
)

CallName: TypeAlias = tuple[str, str, int]
"""Rollout, attempt and index of the call that sampled an answer."""

_SAMPLE: Final = "sample"  # in the metadata of a rollout: its name within its run


def forked(
    rollout: Rollout, source: ForkSource, number: int = 0, **changes: Any
) -> EnqueueRolloutRequest:
    """The request for a fork of `rollout`: its task, mode, resources, config and seed, with random
    numbers of its own by the `number` among the forks at this call. `changes` are fields of the
    request that differ."""
    sample = f"{sample_of(rollout)}/fork {source.at}.{number}"
    request = EnqueueRolloutRequest(
        input=rollout.input,
        mode=rollout.mode,
        resources_id=rollout.resources_id,
        config=rollout.config,
        metadata={**rollout.metadata, _SAMPLE: sample},
        source=source,
    )
    return msgspec.structs.replace(request, **changes)


def forks_group(group_id: str) -> str:
    """The id of the group that a training makes of the forks of this group's rollouts."""
    return f"{group_id}-forks"


def sample_of(rollout: Rollout) -> str:
    """The name of a rollout within its run, on which its random numbers depend."""
    return str(rollout.metadata.get(_SAMPLE, rollout.rollout_id))


def replayed_name(attributes: Attributes) -> CallName | None:
    """The call whose recorded answer a call got; None if it was sampled."""
    rollout_id = attributes.get(semconv.CALL_REPLAYED_ROLLOUT)
    attempt_id = attributes.get(semconv.CALL_REPLAYED_ATTEMPT)
    index = attributes.get(semconv.CALL_REPLAYED_INDEX)
    if isinstance(rollout_id, str) and isinstance(attempt_id, str) and isinstance(index, int):
        return rollout_id, attempt_id, index
    return None


def answered_calls(calls: Iterable[tuple[Mapping[str, Any], str]]) -> set[int]:
    """The indices of the calls, each its attributes and status code, whose answers an agent
    received."""
    answered = set[int]()
    discarded = set[int]()
    copies = set[Any]()
    started_over = set[int]()
    for attributes, status_code in calls:
        index = attributes.get(semconv.CALL_INDEX)
        if semconv.CALL_REPLAYED_INDEX in attributes:
            copies.add(index)
        # an attempt that diverged from its record has received what it was given of that
        diverged = semconv.CALL_DIVERGED in attributes
        (started_over if diverged else discarded).update(discarded_by(attributes))
        embeds = attributes.get(semconv.GEN_AI_OPERATION) == "embeddings"
        if isinstance(index, int) and status_code != "ERROR" and not embeds:
            answered.add(index)
    return answered - discarded - (started_over - copies)


def discarded_by(attributes: Mapping[str, Any]) -> Iterable[int]:
    """The indices of calls whose answers do not count, as this call says."""
    return attributes.get(semconv.CALL_DISCARDS, ())


def with_source(
    connection: Connection, request: EnqueueRolloutRequest, rollout_id: str, run_id: str | None
) -> EnqueueRolloutRequest:
    """The request for the fork `rollout_id` of the run `run_id` with its source in full, and with
    a sample of its own. NotFoundError, ConflictError or InvalidError if it cannot be its source."""
    source = request.source
    assert source is not None
    rollout = ROLLOUTS.one(connection, "WHERE rollout_id = ?", source.rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {source.rollout_id!r} to fork: was it deleted?")
    attempt = _attempt(connection, source)
    if not codec.same(rollout.input, request.input, "the input of the rollout"):
        raise InvalidError(
            f"rollout {source.rollout_id} has another input: a fork is of the same task"
        )
    _check_commit(connection, rollout.run_id, run_id)
    _check_call(connection, source.at, attempt)
    metadata = dict(request.metadata)
    if str(metadata.get(_SAMPLE, sample_of(rollout))) == sample_of(rollout):
        metadata[_SAMPLE] = f"{sample_of(rollout)}/fork {source.at}.{rollout_id}"
    source = msgspec.structs.replace(source, attempt_id=attempt.attempt_id)
    return msgspec.structs.replace(request, source=source, metadata=metadata)


def _attempt(connection: Connection, source: ForkSource) -> Attempt:
    chosen = "" if source.attempt_id is None else "AND attempt_id = ? "
    given = (source.rollout_id, *([] if source.attempt_id is None else [source.attempt_id]))
    attempt = ATTEMPTS.one(
        connection, f"WHERE rollout_id = ? {chosen}ORDER BY sequence_id DESC LIMIT 1", *given
    )
    if attempt is None:
        named = "attempt" if source.attempt_id is None else f"attempt {source.attempt_id!r}"
        raise NotFoundError(f"rollout {source.rollout_id} has no {named} to fork")
    if attempt.status not in lifecycle.ENDS:
        raise ConflictError(
            f"attempt {attempt.attempt_id} is {attempt.status}; it can be forked once it has ended"
        )
    return attempt


def _check_commit(connection: Connection, *run_ids: str | None) -> None:
    """InvalidError if two runs are of different versions of the program."""
    runs = [RUNS.one(connection, "WHERE run_id = ?", run_id) for run_id in run_ids if run_id]
    commits = [run.manifest.get("commit") for run in runs if run is not None]
    if len(set(filter(None, commits))) > 1:
        raise InvalidError(
            f"the source was made by commit {commits[0]} and the fork's run is of {commits[1]}: "
            "a fork is of the same program"
        )


def _check_call(connection: Connection, at: int, attempt: Attempt) -> None:
    """InvalidError unless the call `at` of the attempt was answered, and the answers are stored."""
    rows = connection.execute(
        "SELECT attributes, status_code, token_ids IS NOT NULL FROM spans WHERE attempt = (SELECT "
        f"number FROM attempts WHERE attempt_id = ?) AND {FIND[connection.dialect]}(attributes, ?)"
        " > 0",
        (attempt.attempt_id, f'"{semconv.CALL}'),
    ).fetchall()
    calls = [(codec.from_json(text), status, tokens) for text, status, tokens in rows]
    answered = answered_calls((attributes, status) for attributes, status, _ in calls)
    if at not in answered:
        numbers = ", ".join(map(str, sorted(answered))) or "none"
        raise InvalidError(
            f"attempt {attempt.attempt_id} has no call {at} that was answered; it has {numbers}"
        )
    for attributes, _, tokens in calls:
        written = tokens or semconv.GEN_AI_OUTPUT_MESSAGES in attributes
        reference = attributes.get(semconv.CALL_FLAG) == semconv.REPLAYED
        if attributes.get(semconv.CALL_INDEX) in answered and not (written or reference):
            raise InvalidError(
                f"the answers of attempt {attempt.attempt_id} were not recorded (--capture off), "
                "so it cannot be forked"
            )
