"""Draws the pictures of docs/how-it-works.md and prints its table, all computed by the package's
own functions.

Usage: python scripts/draw_forest.py [DIRECTORY, default docs/images]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import agentlightning as agl
from agentlightning import semconv
from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.forest import Forest
from agentlightning.data.sequences import (
    CreditedTransition,
    MicroBatch,
    TrainingSequence,
    build_sequences,
    micro_batches,
)
from agentlightning.data.transitions import TracedRollout, Transition, trace_rollout
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

TASK = "tttt"  # a token a letter
TURNS = {"memory": ("mm", "oo"), "search": ("ss", "pp"), "right": ("aa", ""), "wrong": ("xx", "")}
FLIGHTS = {
    "one": ("memory", "search", "right"),
    "two": ("memory", "wrong"),
    "three": ("search", "right"),
}

CELL, ROW = 15, 24  # pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .in { font-size: 10px; text-anchor: middle }
.card { fill: #fff } .read { fill: #d0d7de } .sampled { fill: #8c9eff } .path { fill: #ffcc80 } .none { fill: #f3f4f6 }
.line { stroke: #57606a; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .card { fill: #161b22 } .read { fill: #484f58 }
 .sampled { fill: #5063d4 } .path { fill: #9a6412 } .none { fill: #21262d } .line { stroke: #9198a1 } }
"""


def flight(name: str) -> tuple[Rollout, list[Span]]:
    """What the store holds of one rollout: a span for each call and each tool, and one for the
    reward."""
    spans: list[Span] = []
    prompt = TASK

    def add(kind: str, attributes: dict[str, Any], tokens: TokenCapture | None = None) -> None:
        number = len(spans)
        span = Span(
            rollout_id=name,
            attempt_id="a",
            sequence_id=number,
            trace_id=name,
            span_id=f"{name}-{number}",
            name=kind,
            start_time=float(number),
            end_time=number + 0.5,
            attributes=attributes,
            tokens=tokens,
        )
        spans.append(span)

    for index, turn in enumerate(FLIGHTS[name]):
        said, observed = TURNS[turn]
        call = {
            "id": f"t{index}",
            "type": "function",
            "function": {"name": turn, "arguments": "{}"},
        }
        answer = {"role": "assistant", "content": said} | (
            {"tool_calls": [call]} if observed else {}
        )
        choice = SampledChoice(
            token_ids=ids(said), logprobs=(-0.7, -0.7), finish_reason="stop", versions=((0, 2),)
        )
        about = {semconv.CALL_INDEX: index, semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([answer])}
        add("chat", about, TokenCapture(prompt_token_ids=ids(prompt), choices=(choice,)))
        if observed:
            add(
                turn,
                {
                    semconv.GEN_AI_OPERATION: "execute_tool",
                    "gen_ai.tool.name": turn,
                    "gen_ai.tool.call.id": f"t{index}",
                },
            )
        prompt += said + observed
    reward = float(FLIGHTS[name][-1] == "right")
    add(semconv.REWARD, {semconv.reward_name(0): "primary", semconv.reward_value(0): reward})
    about = {"rollout_id": name, "input": "fly", "start_time": 0.0, "reward": reward}
    return Rollout(status="succeeded", **about), spans


def ids(letters: str) -> tuple[int, ...]:
    return tuple(map(ord, letters))


def credited(flights: Sequence[TracedRollout], **algorithm: Any) -> list[list[CreditedTransition]]:
    group = RewardedGroup(
        [one.transitions for one in flights], [one.reward or 0.0 for one in flights]
    )
    return agl.GRPO(**algorithm).advantages([group])[0]


def planted(calls: Sequence[CreditedTransition]) -> tuple[MicroBatch, Forest]:
    sequences = build_sequences(calls, "tree")
    (micro,) = micro_batches(sequences, aggregation_weights(sequences, "token-mean"), 1000)
    assert micro.forest is not None
    return micro, micro.forest


# --- the table ---


def table(flights: Sequence[TracedRollout]) -> str:
    """From each call to its advantage, under two settings."""
    weights = {
        "returns": "discounted",
        "returns_options": {"gamma": 1.0, "tool_weights": {"memory": 0.3, "search": 0.2}},
    }
    plain, x, added = (
        [float(call.advantages[0]) for calls in credited(flights, **settings) for call in calls]
        for settings in ({}, weights | {"baseline": "none"}, weights | {"baseline": "rloo"})
    )
    lines = [
        "| rollout | R | call | tool | `identical`, `grpo`: A | `discounted`: x | `discounted`, "
        "`rloo`: A |",
        "|" + "---|" * 7,
    ]
    calls = [(one, call) for one in flights for call in one.transitions]
    for (one, call), *numbers in zip(calls, plain, x, added, strict=True):
        name = FLIGHTS[one.rollout.rollout_id][call.call_index]
        status = "".join(f"{tool.status:+d}" for tool in call.tools)
        values = " | ".join(f"{number:.3f}" for number in numbers)
        lines.append(
            f"| {one.rollout.rollout_id} | {one.reward:g} | {name} | {status} | {values} |"
        )
    return "\n".join(lines) + "\n"


# --- the pictures ---


def svg(width: int, height: int, parts: Iterator[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}">'
    )
    card = '<rect class="card" width="100%" height="100%" rx="6"/>'
    return "\n".join([f"{head}<style>{STYLE}</style>", card, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def cell(x: float, y: float, kind: str, letter: str = "") -> str:
    square = f'<rect x="{x:g}" y="{y:g}" width="{CELL - 1}" height="{CELL - 1}" class="{kind}"/>'
    return square + (text(x + CELL / 2 - 0.5, y + 11, letter, "in") if letter else "")


def row(tokens: Iterable[int], sampled: Collection[int], x: float, y: float) -> Iterator[str]:
    for place, token in enumerate(tokens):
        yield cell(x + CELL * place, y, "sampled" if place in sampled else "read", chr(token))


def rows(sequences: Sequence[TrainingSequence], x: float, y: float) -> Iterator[str]:
    for number, sequence in enumerate(sequences):
        yield from row(sequence.token_ids, sequence.positions, x, y + ROW * number)


def branches(micro: MicroBatch, forest: Forest, x: float, y: float) -> Iterator[str]:
    """Each branch below the token it follows."""
    tops: dict[int, float] = {}
    for number, branch in enumerate(forest.branches):
        left, top = x + CELL * len(branch.before), y + ROW * number
        if len(branch.before):
            above = tops[int(branch.before[-1])] + CELL - 1
            yield (
                f'<path class="line" d="M{left - CELL / 2:g} '
                f'{above:g}V{top + CELL / 2:g}H{left:g}"/>'
            )
        slots = range(branch.start, branch.stop)
        tops |= dict.fromkeys(slots, top)
        sampled = (
            micro.positions[(micro.positions >= branch.start) & (micro.positions < branch.stop)]
            - branch.start
        )
        yield from row(forest.token_ids[branch.start : branch.stop], sampled, left, top)


def forest_picture(calls: Sequence[CreditedTransition]) -> str:
    alone = build_sequences(calls, "transition")
    micro, forest = planted(calls)
    left = CELL * 4
    right = left + CELL * (max(map(len, alone)) + 2)
    bottom = 42 + ROW * len(forest.branches)
    occurrences = np.bincount(micro.positions)

    def parts() -> Iterator[str]:
        yield text(CELL, 22, f"{len(alone)} calls of three rollouts: {sum(map(len, alone))} tokens")
        names = [sequence.rollout_id for sequence in alone]
        yield from (text(CELL, 45 + ROW * names.index(name), name) for name in dict.fromkeys(names))
        yield from rows(alone, left, 34)
        yield text(right, 22, f"their forest: {micro.tokens} tokens")
        yield from branches(micro, forest, right, 34)
        yield text(
            right,
            bottom + 16,
            f"{len(micro.positions)} loss rows on {(occurrences > 0).sum()} sampled tokens:",
        )
        yield text(
            right, bottom + 34, f"{(occurrences > 1).sum()} were sampled twice, and have two each"
        )
        yield cell(right, bottom + 48, "read") + text(right + 20, bottom + 59, "read")
        yield cell(right + 64, bottom + 48, "sampled") + text(right + 84, bottom + 59, "sampled")

    return svg(right + 270, int(max(34 + ROW * len(alone), bottom + 63)) + CELL, parts())


def mask_picture(calls: Sequence[CreditedTransition]) -> str:
    _, forest = planted(calls)
    size = len(forest.token_ids)
    branch = np.repeat(
        np.arange(len(forest.branches)), [one.stop - one.start for one in forest.branches]
    )
    x, y = CELL * 2, CELL * 2.5
    ends = np.arange(1, size + 1)  # what follows a slot stands right after it, up to here
    for slot in reversed(range(size)):
        if forest.previous[slot] >= 0:
            ends[forest.previous[slot]] = max(ends[forest.previous[slot]], ends[slot])

    def parts() -> Iterator[str]:
        for slot in range(size):
            letter = chr(forest.token_ids[slot])
            yield text(x + CELL * (slot + 0.5), y - 5, letter, "in") + text(
                x - 10, y + CELL * slot + 11, letter, "in"
            )
        for query in range(size):
            for key in range(size):
                seen = key <= query < ends[key]
                kind = ("sampled" if branch[query] == branch[key] else "path") if seen else "none"
                yield cell(x + CELL * key, y + CELL * query, kind)
        for stop in (one.stop for one in forest.branches[:-1]):
            yield f'<path class="line" d="M{x:g} {y + CELL * stop - 0.5:g}h{CELL * size}"/>'
            yield f'<path class="line" d="M{x + CELL * stop - 0.5:g} {y:g}v{CELL * size}"/>'
        right = x + CELL * (size + 1)
        legend = (
            ("sampled", "its own branch: causal"),
            ("path", "its path: all of it"),
            ("none", "not seen"),
        )
        yield text(right, y + 11, "each row sees:")
        for line, (kind, words) in enumerate(legend, 1):
            yield cell(right, y + 22 * line, kind) + text(right + 20, y + 22 * line + 11, words)
        yield text(right, y + 115, f"{forest.pairs} pairs of {size * size}")

    return svg(int(x + CELL * (size + 1)) + 180, int(y + CELL * (size + 1)), parts())


def levels_picture() -> str:
    """A planner's calls A1 A2 A3 and between them those of a searcher, S1 S2; both begin with the
    same two tokens."""
    histories = {"A": "··pp", "S": "··s"}
    calls: list[CreditedTransition] = []
    for answer in ("A1", "S1", "A2", "S2", "A3"):
        call = _transition(histories[answer[0]], answer, f"{answer[0]}{int(answer[1]) - 1}")
        calls.append(CreditedTransition(call, np.ones(2, np.float32)))
        histories[answer[0]] += answer + "o"
    heights = [22.0]

    def parts() -> Iterator[str]:
        for level in ("transition", "trajectory", "tree"):
            y = heights[-1]
            if level == "tree":
                micro, forest = planted(calls)
                count, tokens, noun = len(forest.branches), micro.tokens, "branches"
                yield from branches(micro, forest, CELL, y + 8)
            else:
                sequences = build_sequences(calls, level)
                count, tokens, noun = len(sequences), sum(map(len, sequences)), "rows"
                yield from rows(sequences, CELL, y + 8)
            yield text(CELL, y, f"{level}: {count} {noun if count > 1 else 'row'}, {tokens} tokens")
            heights.append(y + ROW * count + 34)

    body = list(parts())
    return svg(
        CELL * (max(map(len, build_sequences(calls, "transition"))) * 2 + 2),
        int(heights[-1]) - 20,
        iter(body),
    )


def _transition(prompt: str, answer: str, continues: str | None) -> Transition:
    return Transition(
        rollout_id="r",
        attempt_id="a",
        span_id=answer,
        continues=continues,
        call_index=0,
        choice=0,
        model="policy",
        prompt_ids=np.array(ids(prompt), np.int32),
        response_ids=np.array(ids(answer), np.int32),
        logprobs=np.zeros(len(answer), np.float32),
        versions=np.zeros(len(answer), np.int32),
        finish_reason="stop",
    )


def pictures(flights: Sequence[TracedRollout]) -> dict[str, str]:
    """The text of each picture by its file's name."""
    calls = [call for rollout in credited(flights) for call in rollout]
    drawn = {
        "forest": forest_picture(calls),
        "packed-mask": mask_picture(calls),
        "levels": levels_picture(),
    }
    return {f"{name}.svg": picture for name, picture in drawn.items()}


def group() -> list[TracedRollout]:
    return [trace_rollout(*flight(name)) for name in FLIGHTS]


if __name__ == "__main__":
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    for name, picture in pictures(group()).items():
        (directory / name).write_text(picture)
    print(table(group()), end="")
