"""Converts recorded rollouts to lines of fine-tuning files: conversations to imitate (SFT),
preference pairs (DPO).

The lines are those of OpenAI's chat fine-tuning: `{"messages", "tools"}`, and `{"input":
{"messages", "tools"}, "preferred_output", "non_preferred_output"}`. Pure functions, without stores
or files."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from agentlightning.data.agents import agent_pattern
from agentlightning.data.conversations import (
    NOT_RECORDED,
    ChatCall,
    Message,
    conversations,
    read_calls,
)
from agentlightning.data.recordings import Recorded
from agentlightning.errors import InvalidError
from agentlightning.types import Rollout

ANNOTATION: Final = "annotation"
"""The key of a rollout's metadata that holds its annotation."""

# Why a rollout or a pair of them gives no line.
NO_REWARD: Final = "rollouts without a reward"
LOW_REWARD: Final = "rollouts of less reward than asked"
OTHER_LABEL: Final = "rollouts without the label asked for"
NOT_BEST: Final = "rollouts that are not the best of their group"
NO_CALL: Final = "rollouts without a call"
NO_CONTENT: Final = "rollouts whose messages were not recorded"
NO_GROUP: Final = "rollouts that are in no group with others"
TIE: Final = "pairs of equal reward"
NOT_COMPARABLE: Final = "pairs that never answered the same prompt differently"
LESSER_PAIR: Final = "pairs of less difference than another of their prompt"

# What OpenAI and Azure take: parts of a content by the message's role, names and number of tools,
# lines of a file.
_PARTS: Final = {
    "system": ("text",),
    "developer": ("text",),
    "user": ("text", "image_url"),
    "assistant": ("text",),
    "tool": ("text",),
}
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_MOST_TOOLS: Final = 128
FEWEST_LINES: Final = 10


@dataclass(frozen=True)
class Wanted:
    """The answers to learn from: those of these models (None: all that are not frozen) and
    agents (a pattern; None: all), in rollouts with one of these labels (None: any or none) and a
    reward of at least `min_reward`; with `best_of_group`, only the best of each group."""

    models: frozenset[str] | None = None
    agents: str | None = None
    labels: frozenset[str] | None = None
    min_reward: float | None = None
    best_of_group: bool = False


@dataclass(frozen=True)
class Lines:
    """The lines of a group of rollouts, and how much was left out, by reason."""

    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: Counter[str] = field(default_factory=Counter[str])


def sft_lines(group: Sequence[Recorded], wanted: Wanted) -> Lines:
    """A line for each conversation in a group's rollouts (or in one without a group) that has
    something to learn from.

    It ends with the last answer to learn, replaced by an annotation's answer. Each answer has
    weight in one line only; the assistant's other messages there have `"weight": 0`."""
    found = Lines()
    for recorded in _kept(group, wanted, found.left_out):
        calls = _calls(recorded, wanted, found.left_out)
        calls[-1:] = [corrected for _, corrected in _corrections(recorded, calls)] or calls[-1:]
        for chain in conversations(calls):
            learnable = [index for index, call in enumerate(chain) if call.unlearnable is None]
            if not learnable:
                continue
            chain = chain[: learnable[-1] + 1]
            messages = [*chain[-1].messages, chain[-1].answer]
            learned = {len(call.messages) for call in chain if call.unlearnable is None}
            line: dict[str, Any] = {
                "messages": [
                    message
                    if index in learned or message["role"] != "assistant"
                    else {**message, "weight": 0}
                    for index, message in enumerate(messages)
                ]
            }
            line |= _tools(chain[-1])
            _add(found, "conversations", line, line["messages"])
    return found


def dpo_lines(group: Sequence[Recorded], wanted: Wanted) -> Lines:
    """Lines for pairs of a group's rollouts: a better and a worse answer to the first prompt that
    both got and answered differently. The better rollout has at least `min_reward`. An annotation's
    answer is preferred to the one it corrects."""
    found = Lines()
    group = list(labelled(group, wanted, found.left_out))
    for recorded in group:
        for given, corrected in _corrections(recorded, _calls(recorded, wanted, Counter())):
            _add_pair(found, corrected, given)
    if len(group) < 2 or group[0].rollout.group_id is None:
        found.left_out[NO_GROUP] += len(group)
        return found
    rewarded = [(recorded.reward, recorded) for recorded in group if recorded.reward is not None]
    found.left_out[NO_REWARD] += len(group) - len(rewarded)
    rewarded.sort(key=lambda pair: -pair[0])
    members = [(reward, _calls(recorded, wanted, found.left_out)) for reward, recorded in rewarded]
    pairs: dict[tuple[str, ...], list[tuple[float, ChatCall, ChatCall]]] = {}
    for (high, better), (low, worse) in itertools.combinations(members, 2):
        if wanted.min_reward is not None and high < wanted.min_reward:
            found.left_out[
                f"pairs whose better rollout has less reward than {wanted.min_reward:g}"
            ] += 1
        elif high == low:
            found.left_out[TIE] += 1
        elif (pair := _divergence(better, worse)) is None:
            found.left_out[NOT_COMPARABLE] += 1
        else:
            pairs.setdefault(pair[0].sent, []).append((high - low, *pair))
    for candidates in pairs.values():
        _, better, worse = max(candidates, key=lambda candidate: candidate[0])
        found.left_out[LESSER_PAIR] += len(candidates) - 1
        _add_pair(found, better, worse)
    return Lines(found.lines, +found.left_out)  # without the reasons that were none


def _add_pair(found: Lines, better: ChatCall, worse: ChatCall) -> None:
    line = {
        "input": {"messages": better.messages, **_tools(better)},
        "preferred_output": [better.answer],
        "non_preferred_output": [worse.answer],
    }
    _add(found, "pairs", line, [*better.messages, better.answer, worse.answer])


def _corrections(recorded: Recorded, calls: Sequence[ChatCall]) -> list[tuple[ChatCall, ChatCall]]:
    """The last call as it was and as its annotation corrects it; nothing without a correction."""
    answer = annotation_of(recorded.rollout).answer
    if answer is None or not calls:
        return []
    message = {"role": "assistant", "content": answer}
    return [(calls[-1], replace(calls[-1], answer=message, unlearnable=None, answered=answer))]


def labelled(
    group: Sequence[Recorded], wanted: Wanted, left_out: Counter[str]
) -> Iterator[Recorded]:
    """A group's rollouts with a wanted label; the others are counted."""
    for recorded in group:
        if wanted.labels is None or annotation_of(recorded.rollout).label in wanted.labels:
            yield recorded
        else:
            left_out[OTHER_LABEL] += 1


def _kept(group: Sequence[Recorded], wanted: Wanted, left_out: Counter[str]) -> Iterator[Recorded]:
    """The rollouts kept by labels and rewards, and the corrected ones. Of several best ones, the
    first."""
    asked = wanted.min_reward is not None or wanted.best_of_group
    best = max(
        group, key=lambda recorded: -math.inf if recorded.reward is None else recorded.reward
    )
    grouped = group[0].rollout.group_id is not None
    for recorded in labelled(group, wanted, left_out):
        if annotation_of(recorded.rollout).answer is not None:
            yield recorded
        elif recorded.reward is None and asked:
            left_out[NO_REWARD] += 1
        elif (
            wanted.min_reward is not None
            and recorded.reward is not None
            and recorded.reward < wanted.min_reward
        ):
            left_out[LOW_REWARD] += 1
        elif wanted.best_of_group and grouped and recorded is not best:
            left_out[NOT_BEST] += 1
        else:
            yield recorded


def _calls(recorded: Recorded, wanted: Wanted, left_out: Counter[str]) -> list[ChatCall]:
    """A rollout's calls; those not learned from are counted."""
    agents = None if wanted.agents is None else agent_pattern(wanted.agents)
    calls, unread = read_calls(recorded.spans, wanted.models, agents)
    if not calls and not unread:
        left_out[NO_CALL] += 1
    elif not calls and set(unread) == {NOT_RECORDED}:
        left_out[NO_CONTENT] += 1
    else:
        reasons = [*unread, *(call.unlearnable for call in calls if call.unlearnable is not None)]
        left_out.update(f"calls ({reason})" for reason in reasons)
    return calls


def _divergence(
    better: Sequence[ChatCall], worse: Sequence[ChatCall]
) -> tuple[ChatCall, ChatCall] | None:
    """The first call of `better` that `worse` also got and answered differently, and that
    answer."""
    answered = {call.sent: call for call in reversed(worse) if call.unlearnable is None}
    for call in better:
        other = answered.get(call.sent) if call.unlearnable is None else None
        if other is not None and other.answered != call.answered:
            return call, other
    return None


def _tools(call: ChatCall) -> dict[str, Any]:
    return {"tools": call.tools} if call.tools else {}


def _add(found: Lines, unit: str, line: dict[str, Any], messages: Sequence[Message]) -> None:
    wrong = next(
        filter(None, map(_problem, messages)),
        _tools_problem(line.get("input", line).get("tools", ())),
    )
    if wrong is None:
        found.lines.append(line)
    else:
        found.left_out[f"{unit} with {wrong}"] += 1


def _problem(message: Message) -> str | None:
    """Why fine-tuning hosts would refuse a message."""
    role = message["role"]
    content = message["content"]
    if role not in _PARTS:
        return f"messages of role {role}"
    if (
        unknown := [part["type"] for part in content if part["type"] not in _PARTS[role]]
        if isinstance(content, list)
        else []
    ):
        return f"content of type {unknown[0]} in messages of role {role}"
    named = [call["function"]["name"] for call in message.get("tool_calls", ()) if call["id"]]
    if len(named) < len(message.get("tool_calls", ())) or not message.get("tool_call_id", True):
        return "tool calls without an id"
    return None if all(map(_NAME.match, named)) else "tool calls whose names hosts refuse"


def _tools_problem(tools: Sequence[dict[str, Any]]) -> str | None:
    if any(
        tool.get("type") != "function" or not _NAME.match(str(tool["function"].get("name")))
        for tool in tools
    ):
        return "tools that are not functions, or whose names hosts refuse"
    return f"more than {_MOST_TOOLS} tools" if len(tools) > _MOST_TOOLS else None


# --- annotations ----------------------------------------------------------------------------------


class Annotation(msgspec.Struct, frozen=True, omit_defaults=True):
    """None is not given. `answer` replaces the last answer in fine-tuning files."""

    label: str | None = None
    note: str | None = None
    answer: str | None = None


def annotation_of(rollout: Rollout) -> Annotation:
    """This rollout's annotation. InvalidError if its metadata has something else under that key."""
    try:
        return msgspec.convert(rollout.metadata.get(ANNOTATION, {}), Annotation)
    except msgspec.ValidationError as error:
        raise InvalidError(
            f"the annotation of rollout {rollout.rollout_id} is malformed: {error}"
        ) from None


def changed_annotation(**parts: str | None) -> dict[str, Any]:
    """The change that `update_rollout` merges into the metadata to change these parts; an empty
    text removes a part."""
    return {ANNOTATION: {name: text or None for name, text in parts.items() if text is not None}}
