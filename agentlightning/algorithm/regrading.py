"""Other rewards for rollouts that are stored, without running the agent again."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning.data.conversations import conversation, render_conversations
from agentlightning.data.recordings import Recorded
from agentlightning.datasets.export import annotation_of
from agentlightning.errors import BackendError, ConfigError
from agentlightning.rewards import RelativeJudge
from agentlightning.rewards.relative import Ranking

Grader: TypeAlias = Callable[[Any, "StoredRollout"], Any]
SHOWN_CHARACTERS: Final = 6_000  # of one attempt to a judge; the middle is left out


class StoredRollout(Recorded):
    """A stored rollout, as graders get it; `reward` is the one that it has."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The longest conversation, as messages of Chat Completions, with its last answer."""
        return conversation(self.spans)

    @property
    def answer(self) -> str:
        """The text of the last answer; empty if there is none."""
        messages = self.messages
        return str(messages[-1].get("content") or "") if messages else ""


@dataclass(frozen=True)
class Regraded:
    """A rollout with its new reward, or the reason why it has none. `agreement` is that of a judge
    with itself about its task."""

    stored: StoredRollout
    reward: float | None
    problem: str = ""
    agreement: float | None = None


async def regrade(groups: AsyncIterable[list[Recorded]], grader: Any) -> list[Regraded]:
    """The rollouts with what `grader` gives them: a function of (task, StoredRollout), async or
    not, or a `RelativeJudge`, which compares those of each task.

    A grader that fails on a rollout costs that one its reward. ConfigError for something else."""
    if not isinstance(grader, RelativeJudge) and not callable(grader):
        raise ConfigError(
            f"the grader is a {type(grader).__name__}; give a function of (task, rollout), or a "
            "RelativeJudge"
        )
    stored = [StoredRollout(one.rollout, one.spans) async for group in groups for one in group]
    if isinstance(grader, RelativeJudge):
        return await _judged(stored, grader)
    return [await _graded(one, grader) for one in stored]


async def _graded(stored: StoredRollout, grader: Grader) -> Regraded:
    try:
        given = grader(stored.rollout.input, stored)
        given = await given if inspect.isawaitable(given) else given
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of a stranger's function
        return Regraded(stored, None, f"{type(error).__name__}: {error}")
    if not isinstance(given, int | float) or not math.isfinite(given):
        return Regraded(stored, None, f"the grader returned {given!r:.100}, not a finite number")
    return Regraded(stored, float(given))


async def _judged(stored: Sequence[StoredRollout], judge: RelativeJudge) -> list[Regraded]:
    """Tasks are judged one after the other; a task that was run once has nothing to compare."""
    done: list[Regraded] = []
    for attempts in _by_task(stored).values():
        if len(attempts) == 1:
            done.append(Regraded(attempts[0], None, "the only rollout of its task"))
            continue
        try:
            ranking = await ranked(attempts, judge)
        except BackendError as error:
            done += [Regraded(attempt, None, str(error)) for attempt in attempts]
            continue
        done += [
            Regraded(attempt, score, agreement=ranking.agreement)
            for attempt, score in zip(attempts, ranking.scores, strict=True)
        ]
    return done


async def ranked(attempts: Sequence[Recorded], judge: RelativeJudge) -> Ranking:
    """The judge's ranking of rollouts of one task. BackendError as `RelativeJudge.rank`."""
    task = msgspec.json.encode(attempts[0].rollout.input).decode()
    shown = [
        f"{render_conversations(attempt.spans, SHOWN_CHARACTERS)}\nended: {attempt.rollout.status}"
        for attempt in attempts
    ]
    return await judge.rank(task, shown, task)


def _by_task(stored: Sequence[StoredRollout]) -> dict[str, list[StoredRollout]]:
    found = defaultdict[str, list[StoredRollout]](list)
    for one in stored:
        found[msgspec.json.encode(one.rollout.input).decode()].append(one)
    return found


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The new rewards of `graded` of `rollouts` beside the old ones. `same_order` is the share of
    pairs of rollouts of one task, with different old rewards, that the new ones order alike, ties
    counting half; `labelled` that of pairs which people labelled `good` and `bad`. None where there
    is no such pair."""

    rollouts: int
    graded: int
    before: float | None
    after: float | None
    same_order: float | None
    pairs: int
    labelled: float | None
    labelled_pairs: int
    agreement: float | None
    problems: dict[str, int]


_LABELS: Final = {"good": 1.0, "bad": 0.0}


def compare(regraded: Sequence[Regraded]) -> Comparison:
    """The new rewards beside the old ones, and beside labels of people."""
    graded = [one for one in regraded if one.reward is not None]
    old = [one.stored.reward for one in graded]
    labels = [_LABELS.get(annotation_of(one.stored.rollout).label or "") for one in graded]
    same_order, pairs = _same_order(graded, old)
    labelled, labelled_pairs = _same_order(graded, labels)
    problems = [one.problem for one in regraded if one.problem]
    return Comparison(
        rollouts=len(regraded),
        graded=len(graded),
        before=_mean([reward for reward in old if reward is not None]),
        after=_mean([one.reward for one in graded if one.reward is not None]),
        same_order=same_order,
        pairs=pairs,
        labelled=labelled,
        labelled_pairs=labelled_pairs,
        agreement=_mean([one.agreement for one in graded if one.agreement is not None]),
        problems={problem: problems.count(problem) for problem in dict.fromkeys(problems)},
    )


def _same_order(
    graded: Sequence[Regraded], values: Sequence[float | None]
) -> tuple[float | None, int]:
    """(the share of pairs that the new rewards order as `values` do, how many pairs there are)."""
    tasks = defaultdict[bytes, list[tuple[float, float]]](list)
    for one, value in zip(graded, values, strict=True):
        if value is not None and one.reward is not None:
            tasks[msgspec.json.encode(one.stored.rollout.input)].append((value, one.reward))
    alike = [
        0.5 if new == other_new else float((value > other) == (new > other_new))
        for members in tasks.values()
        for (value, new), (other, other_new) in itertools.combinations(members, 2)
        if value != other
    ]
    return _mean(alike), len(alike)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
