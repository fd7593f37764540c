"""Converts recorded rollouts to rows of a Parquet file, one per sampled answer, trained or not.

It knows transitions and columns, but no stores; pyarrow is imported only to write.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, Final

import msgspec

from agentlightning import semconv
from agentlightning.data.agents import agent_of
from agentlightning.data.call_filter import UNUSED_CHOICE, CallFilter
from agentlightning.data.recordings import GroupCredit, Recorded, Training, credit_of
from agentlightning.data.transitions import TracedRollout, compare_costs, trace_rollout
from agentlightning.datasets.export import (
    LOW_REWARD,
    NO_CALL,
    Lines,
    Wanted,
    annotation_of,
    labelled,
)
from agentlightning.errors import imported
from agentlightning.tracing.dialects import finish_reasons, model_name
from agentlightning.tracing.steps import read_steps
from agentlightning.types import SampledChoice, Span

SCHEMA_VERSION: Final = "2"

NO_CREDIT: Final = GroupCredit({}, {})
NO_GATEWAY: Final = (
    "rollouts whose calls the gateway did not record, as of imported traces: --format sft takes "
    "them"
)

# Column → (its type, what it holds); null where there is none.
COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "rollout_id": ("string", "the rollout"),
    "attempt_id": ("string", "its last attempt, the only one exported"),
    "run_id": ("string", "the run it belongs to"),
    "step": ("int32", "the step of the run that asked for it"),
    "group_id": ("string", "the group of rollouts of one task"),
    "group_index": ("int32", "its place in the group"),
    "input": ("string", "the task, as JSON"),
    "mode": ("string", "train, val or test"),
    "status": ("string", "how the rollout ended"),
    "reward": ("float64", "R, the rollout's reward"),
    "span_id": ("string", "the span of the call"),
    "call_index": ("int32", "0, 1, 2 … within the attempt"),
    "choice": ("int32", "which answer, where several were asked for"),
    "agent": ("string", "the agent that asked"),
    "model": ("string", "the model that answered"),
    "prompt_ids": ("list<int32>", "token ids of the prompt"),
    "response_ids": ("list<int32>", "token ids of the answer"),
    "logprobs": (
        "list<float32>",
        "log-probability of each token of the answer when it was sampled",
    ),
    "versions": ("list<int32>", "policy version of each token of the answer; −1 unknown"),
    "finish_reason": ("string", "why the answer ended: stop, length, tool_calls …"),
    "call_reward": ("float64", "intermediate rewards of the call, added up"),
    "return": ("float64", "x_t, what the call was worth"),
    "advantages": (
        "list<float32>",
        "what its run made of it for each token of the answer, if one group tells",
    ),
    "tools": (
        "list<tool>",
        "its tool calls: tool, status (1 returned, −1 failed), duration in seconds",
    ),
    "trained": ("bool", "whether training would use it"),
    "excluded": ("string", "why it would not"),
    "label": ("string", "the rollout's annotation: its label"),
    "note": ("string", "a note"),
    "corrected_answer": ("string", "the answer that it should have given last"),
}

_SAMPLE: Final = re.compile(r"train-(\d+)-")  # as the loop names its rollouts
_OF_A_ROLLOUT: Final = ("rollout_id", "run_id", "group_id", "group_index", "mode", "status")


def transition_lines(
    group: Sequence[Recorded], wanted: Wanted, credit: GroupCredit = NO_CREDIT
) -> Lines:
    """The rows of a group's rollouts with at least the wanted reward."""
    found = Lines()
    for recorded in labelled(group, wanted, found.left_out):
        rows = transition_rows(recorded, wanted, credit)
        reward = rows[0]["reward"] if rows else None
        if not rows:
            called = any(step.kind == "call" for step in read_steps(recorded.spans))
            found.left_out[NO_GATEWAY if called else NO_CALL] += 1
        elif wanted.min_reward is not None and (reward is None or reward < wanted.min_reward):
            found.left_out[LOW_REWARD] += 1
        else:
            found.lines.extend(rows)
    return found


def group_credit(group: Sequence[Recorded], training: Training) -> GroupCredit:
    """The credit that a run gave a whole group, as it traced its rewards."""
    traced = [
        trace_rollout(one.rollout, one.spans, calls=training.calls, reward=training.reward)
        for one in group
    ]
    return credit_of(compare_costs(traced, training.reward), training)


def transition_rows(
    recorded: Recorded, wanted: Wanted, credit: GroupCredit = NO_CREDIT
) -> list[dict[str, Any]]:
    """The rows of a rollout, in call order; token ids are arrays or sequences. Empty if it made no
    call."""
    rollout = recorded.rollout
    traced = trace_rollout(
        rollout, recorded.spans, calls=CallFilter(models=wanted.models, agents=wanted.agents)
    )
    common = {name: getattr(rollout, name) for name in _OF_A_ROLLOUT}
    annotation = annotation_of(rollout)
    common |= {
        "label": annotation.label,
        "note": annotation.note,
        "corrected_answer": annotation.answer,
    }
    common |= {"input": msgspec.json.encode(rollout.input).decode(), "reward": traced.reward}
    sample = _SAMPLE.match(str(rollout.metadata.get("sample", "")))
    common["step"] = int(sample[1]) if sample else None
    rows = [{**common, **row} for row in _calls(recorded.spans, traced)]
    for row in rows:
        if row["trained"] and (returns := credit.returns.get(row["span_id"])) is not None:
            row["return"] = float(returns[0])
            row["advantages"] = credit.advantages.get(row["span_id"])
    return sorted(rows, key=lambda row: (row["call_index"], row["choice"]))


def _calls(spans: Sequence[Span], traced: TracedRollout) -> Iterator[dict[str, Any]]:
    """A row for each answer of a call. Of trained calls, the first: the one that agents read."""
    left_out = (
        [step for step in read_steps(spans) if step.kind == "call"] if traced.left_out else []
    )
    agents = {step.span.span_id: agent_of(step).name for step in left_out}
    trained = {transition.span_id: transition for transition in traced.transitions}
    for span in spans:
        transition = trained.get(span.span_id)
        reason = traced.left_out.get(span.span_id)
        if transition is None and reason is None:
            continue
        agent = agents.get(span.span_id) if transition is None else transition.agent
        for index, choice in enumerate(span.tokens.choices if span.tokens else [None]):
            row = _row(span, index, choice, agent, reason or UNUSED_CHOICE)
            if transition is not None and index == 0:
                row |= {"trained": True, "excluded": None, "versions": transition.versions}
                row |= {
                    "call_reward": transition.reward,
                    "tools": [asdict(tool) for tool in transition.tools],
                }
            yield row


def _row(
    span: Span, index: int, choice: SampledChoice | None, agent: str | None, reason: str
) -> dict[str, Any]:
    """The row of an answer that does not train, with the reason."""
    ended = [*finish_reasons(span.attributes), ""]
    return {
        "attempt_id": span.attempt_id,
        "span_id": span.span_id,
        "call_index": span.attributes.get(semconv.CALL_INDEX, 0),
        "choice": index,
        "agent": agent,
        "model": model_name(span.attributes),
        "prompt_ids": span.tokens.prompt_token_ids if span.tokens else (),
        "response_ids": choice.token_ids if choice else (),
        "logprobs": choice.logprobs if choice else (),
        "versions": [version for version, count in choice.versions for _ in range(count)]
        if choice
        else (),
        "finish_reason": choice.finish_reason if choice else ended[min(index, len(ended) - 1)],
        "call_reward": None,
        "return": None,
        "advantages": None,
        "tools": [],
        "trained": False,
        "excluded": reason,
    }


class TransitionFile:
    """Writes rows to a Parquet file, one row group at a time. ConfigError if pyarrow is not
    installed."""

    _TOKENS: Final = 4_000_000  # of a row group, or its rows: what is held in memory
    _ROWS: Final = 10_000

    def __init__(self, file: BinaryIO) -> None:
        parquet = imported("pyarrow.parquet", "a Parquet file", "agent-lightning-next[datasets]")
        self._arrow = pyarrow = importlib.import_module("pyarrow")
        self._schema = _schema(pyarrow)
        self._writer: Any = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        self.filled: set[str] = set()  # columns with a value in some row

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows += rows
        self.filled.update(name for row in rows for name, value in row.items() if value is not None)
        self._tokens += sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
        if self._tokens >= self._TOKENS or len(self._rows) >= self._ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []
        self._tokens = 0


def _schema(arrow: Any) -> Any:
    tool = arrow.struct(
        [("tool", arrow.string()), ("status", arrow.int8()), ("duration", arrow.float64())]
    )

    def type_of(kind: str) -> Any:
        inner = kind.removeprefix("list<").removesuffix(">")
        item = tool if inner == "tool" else arrow.type_for_alias(inner)
        return item if inner == kind else arrow.list_(item)

    fields = [
        arrow.field(name, type_of(kind), metadata={"description": meaning})
        for name, (kind, meaning) in COLUMNS.items()
    ]
    return arrow.schema(fields, metadata={"agentlightning.transitions": SCHEMA_VERSION})
