"""Lineage: which answers the rollouts of a group share by construction, because one walks another
again up to a call. They are independent tries only from that call on.

Knows records and the names of calls; no rewards, no prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from agentlightning import semconv
from agentlightning.data.call_filter import call_index
from agentlightning.data.statistics import Float64Array
from agentlightning.errors import ConfigError
from agentlightning.store.sources import CallName, answered_calls, replayed_name
from agentlightning.types import Rollout, Span

Answers: TypeAlias = dict[CallName, CallName]
"""The answered calls of an attempt, in order, and for each the call that sampled its answer."""


def answers_of(spans: Iterable[Span]) -> Answers:
    """The answers that the agent of an attempt received."""
    answers: Answers = {}
    calls = [span for span in spans if semconv.CALL_INDEX in span.attributes]
    answered = answered_calls((call.attributes, call.status.status_code) for call in calls)
    for span in calls:
        if (index := call_index(span)) in answered:
            name = (span.rollout_id, span.attempt_id, index)
            answers[name] = replayed_name(span.attributes) or name
    return dict(sorted(answers.items()))


def first_sampled(rollout: Rollout, answers: Answers) -> CallName | None:
    """The first of the answers that was sampled in this rollout; None for a fork that ended before
    its call, or asked something else than the record."""
    return next((name for name in answers.values() if name[0] == rollout.rollout_id), None)


class Lineage:
    """The lineage of rollouts with these records and answers. Forks of a call whose rollout is not
    among them are tries of each other's state all the same. `states` has, for each answer, what
    names its state. ConfigError for a fork with an answer that was not sampled."""

    def __init__(self, rollouts: Sequence[Rollout], answers: Sequence[Answers]) -> None:
        self.answers = answers
        names = {name: answer for own in answers for name, answer in own.items()}
        self.states = {answer: answer for answer in names.values()}
        ordered = sorted(
            zip(rollouts, answers, strict=False), key=lambda pair: pair[0].start_time
        )  # sources first
        for rollout, own in ordered:
            source = rollout.source
            if source is None:
                continue
            if source.answer is not None:
                raise ConfigError(
                    f"rollout {rollout.rollout_id} got an answer of yours at call {source.at}, so "
                    "it is no try of the policy: leave it out of the group"
                )
            again = (source.rollout_id, source.attempt_id or "", source.at)
            again = names.get(again, again)
            if (first := first_sampled(rollout, own)) is not None:
                self.states[first] = self.states.get(again, again)

    @cached_property
    def shares(self) -> Float64Array:
        """The share of each rollout in one try from the start, float64[G]: for each of its answers,
        one over the number of answers that were sampled in the same state. A rollout and its forks
        have 1 together."""
        tries = Counter(self.states.values())
        return np.array(
            [
                math.prod(1 / tries[self.states[name]] for name in own.values())
                for own in self.answers
            ]
        )
