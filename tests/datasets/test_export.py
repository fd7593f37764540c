"""What fine-tuning files are made of: conversations to imitate, pairs to prefer, and rows of
transitions."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from pyarrow import parquet

from agentlightning.data.call_filter import FROZEN, TRUNCATED
from agentlightning.data.recordings import Recorded
from agentlightning.datasets import export
from agentlightning.datasets.export import OTHER_LABEL, Wanted, dpo_lines, sft_lines
from agentlightning.datasets.parquet import (
    COLUMNS,
    TransitionFile,
    transition_lines,
    transition_rows,
)
from agentlightning.errors import InvalidError
from agentlightning.types import Span, TokenCapture
from tests.data.recordings import SYSTEM, TOOL, asks_for, call, recorded, reward, says, tool_says

USER = says("user", "hello")
HI, NO = says("assistant", "hi"), says("assistant", "no")
TOOLS = json.dumps([TOOL])
ANYTHING = Wanted()


def answering(answer: Any, value: float | None, index: int = 0, **attributes: Any) -> Recorded:
    """A rollout of one call and its reward."""
    spans = [call(0, [SYSTEM, USER], answer, **attributes)]
    return recorded(*spans, *([] if value is None else [reward(value)]), index=index)


def annotated(of: Recorded, **annotation: str) -> Recorded:
    return replace(
        of, rollout=msgspec.structs.replace(of.rollout, metadata={"annotation": annotation})
    )


# --- sft ------------------------------------------------------------------------------------------


def test_a_conversation_is_one_line_and_interleaved_ones_are_one_each() -> None:
    call_1, result = asks_for("c1"), tool_says("c1", "warm")
    spans = [
        call(0, [USER], call_1, GEN_AI_TOOL_DEFINITIONS=TOOLS),
        call(1, [says("user", "aside")], HI),
        call(2, [USER, call_1, result], HI, GEN_AI_TOOL_DEFINITIONS=TOOLS),
    ]
    found = sft_lines([recorded(*spans)], ANYTHING)
    assert found.lines == [
        {"messages": [USER, call_1, result, HI], "tools": [TOOL]},
        {"messages": [says("user", "aside"), HI]},
    ]
    assert not found.left_out


def test_what_is_not_to_be_learned_has_no_weight_and_ends_no_conversation() -> None:
    shown = [USER, says("assistant", "an example"), USER]
    frozen = [*shown, HI, USER]
    spans = [
        call(0, shown, HI),
        call(1, frozen, NO, CALL_TRAINABLE=False),
        call(2, [*frozen, NO, USER], HI),
        call(3, [*frozen, NO, USER, HI, USER], NO, CALL_TRAINABLE=False),
    ]
    found = sft_lines([recorded(*spans)], ANYTHING)
    assert [message.get("weight", 1) for message in found.lines[0]["messages"]] == [
        1,
        0,
        1,
        1,
        1,
        0,
        1,
        1,
    ]
    assert found.left_out == {f"calls ({FROZEN})": 2}


def test_an_answer_has_weight_in_one_line_only() -> None:
    branches = [[USER, HI, says("user", text)] for text in ("left", "right")]
    spans = [call(0, [USER], HI), call(1, branches[0], NO), call(2, branches[1], NO)]
    lines = sft_lines([recorded(*spans)], ANYTHING).lines
    assert [[one.get("weight", 1) for one in line["messages"]] for line in lines] == [
        [1, 1, 1, 1],
        [1, 0, 1, 1],
    ]


def test_rewards_choose_the_rollouts() -> None:
    group = [answering(HI, value, index) for index, value in enumerate([0.2, 1.0, 1.0, None])]
    assert len(sft_lines(group, ANYTHING).lines) == 4
    kept = sft_lines(group, Wanted(min_reward=0.5))
    assert len(kept.lines) == 2 and kept.left_out == {export.NO_REWARD: 1, export.LOW_REWARD: 1}
    best = sft_lines(group, Wanted(best_of_group=True))
    assert len(best.lines) == 1 and best.left_out == {export.NO_REWARD: 1, export.NOT_BEST: 2}


def test_what_gives_no_line_is_counted() -> None:
    unseen = recorded(call(0, [USER], HI, GEN_AI_INPUT_MESSAGES=None))
    cut = recorded(call(0, [USER], HI, GEN_AI_FINISH_REASONS=["length"]))
    broken = recorded(call(0, [USER, asks_for(""), USER], HI))
    left_out = [sft_lines([one], ANYTHING).left_out for one in (unseen, recorded(), cut, broken)]
    assert left_out == [
        {export.NO_CONTENT: 1},
        {export.NO_CALL: 1},
        {f"calls ({TRUNCATED})": 1},
        {"conversations with tool calls without an id": 1},
    ]


@pytest.mark.parametrize(
    ("messages", "tool", "wrong"),
    [
        ([says("narrator", "once")], TOOL, "messages of role narrator"),
        (
            [says("user", None) | {"content": [{"type": "input_audio"}]}],
            TOOL,
            "content of type input_audio",
        ),
        ([USER], {"type": "web_search"}, "tools that are not functions"),
        (
            [USER],
            {"type": "function", "function": {"name": "two words"}},
            "whose names hosts refuse",
        ),
    ],
)
def test_what_hosts_of_fine_tuning_refuse_is_left_out(messages: Any, tool: Any, wrong: str) -> None:
    made = recorded(call(0, messages, HI, GEN_AI_TOOL_DEFINITIONS=json.dumps([tool])))
    (reason,) = sft_lines([made], ANYTHING).left_out
    assert wrong in reason


# --- dpo ------------------------------------------------------------------------------------------


def test_the_pair_of_a_prompt_that_differs_most_is_taken() -> None:
    answers = [(HI, 0.5, 0), (NO, 0.0, 1), (says("assistant", "best"), 1.0, 2), (NO, 0.5, 3)]
    group = [answering(*one) for one in answers]
    found = dpo_lines(group, ANYTHING)
    assert found.lines == [
        {
            "input": {"messages": [SYSTEM, USER]},
            "preferred_output": [says("assistant", "best")],
            "non_preferred_output": [NO],
        }
    ]
    # The two of reward 0.5 tie; NO against NO differs in reward alone.
    assert found.left_out == {export.TIE: 1, export.NOT_COMPARABLE: 1, export.LESSER_PAIR: 3}
    assert not dpo_lines(group, Wanted(min_reward=2.0)).lines


def test_a_pair_parts_where_the_same_prompt_was_first_answered_differently() -> None:
    """Both searched first; ids of tool calls are drawn anew in every rollout."""

    def searched(call_id: str, answer: Any) -> list[Span]:
        history = [USER, asks_for(call_id), tool_says(call_id, "warm")]
        return [call(0, [USER], asks_for(call_id)), call(1, history, answer)]

    group = [
        recorded(*searched("x", HI), reward(1.0)),
        recorded(*searched("y", NO), reward(0.0), index=1),
    ]
    (line,) = dpo_lines(group, ANYTHING).lines
    assert line["input"]["messages"] == [USER, asks_for("x"), tool_says("x", "warm")]
    assert (line["preferred_output"], line["non_preferred_output"]) == ([HI], [NO])


def test_rollouts_without_others_of_their_task_or_without_rewards_give_no_pair() -> None:
    assert dpo_lines([recorded(group=None)], ANYTHING).left_out == {export.NO_GROUP: 1}
    group = [answering(HI, 1.0), answering(NO, None, 1)]
    assert dpo_lines(group, ANYTHING).left_out == {export.NO_REWARD: 1}
    frozen = [answering(HI, 1.0, CALL_TRAINABLE=False), answering(NO, 0.0, 1)]
    assert not dpo_lines(frozen, ANYTHING).lines


# --- parquet --------------------------------------------------------------------------------------


def test_each_sampled_answer_is_a_row_trained_or_with_the_reason_why_not() -> None:
    wide = call(3, [USER], HI)
    assert wide.tokens is not None
    two = TokenCapture(prompt_token_ids=(1,), choices=(*wide.tokens.choices, *wide.tokens.choices))
    spans = [
        call(0, [USER], HI),
        call(1, [USER], HI, CALL_FLAG="call failed"),
        call(2, [USER], HI, tokens=False),
        msgspec.structs.replace(wide, tokens=two),
        reward(0.5),
    ]
    rows = transition_rows(recorded(*spans), ANYTHING)
    assert [(row["call_index"], row["choice"], row["excluded"]) for row in rows] == [
        (0, 0, None),
        (1, 0, "call failed"),
        (2, 0, "no token ids"),
        (3, 0, None),
        (3, 1, "unused choice"),
    ]
    assert all(row.keys() == COLUMNS.keys() for row in rows)
    assert rows[0]["reward"] == 0.5 and rows[0]["input"] == '{"task":1}'


def test_rows_are_read_back_from_a_file_with_their_types_and_what_they_mean() -> None:
    file = io.BytesIO()
    table = TransitionFile(file)
    for index in range(3):
        table.write(
            transition_rows(recorded(call(0, [USER], HI), reward(1.0), index=index), ANYTHING)
        )
    table.close()
    read = parquet.read_table(file)
    assert read.schema.names == list(COLUMNS)
    assert read.schema.metadata[b"agentlightning.transitions"] == b"2"
    assert read.schema.field("versions").metadata[b"description"].startswith(b"policy version")
    rows = read.to_pylist()
    assert [row["rollout_id"] for row in rows] == ["r0", "r1", "r2"]
    assert (rows[0]["prompt_ids"], rows[0]["response_ids"], rows[0]["versions"]) == (
        [1, 2, 0],
        [7, 8],
        [3, 4],
    )
    assert np.float32(rows[0]["logprobs"]).tolist() == [-0.5, -0.25]


# --- annotations ----------------------------------------------------------------------------------


def test_a_corrected_answer_is_trained_on_whatever_the_reward_and_preferred_to_the_one_given() -> (
    None
):
    group = [annotated(answering(NO, 0.0), answer="of course"), answering(HI, 1.0, 1)]
    assert sft_lines(group, Wanted(min_reward=0.5)).lines == [
        {"messages": [SYSTEM, USER, says("assistant", text)]} for text in ("of course", "hi")
    ]
    first, second = dpo_lines(group, ANYTHING).lines
    assert (first["preferred_output"], first["non_preferred_output"]) == (
        [says("assistant", "of course")],
        [NO],
    )
    assert (second["preferred_output"], second["non_preferred_output"]) == ([HI], [NO])
    alone = recorded(call(0, [USER], NO), group=None)
    assert len(dpo_lines([annotated(alone, answer="yes")], ANYTHING).lines) == 1


def test_only_rollouts_with_a_label_are_taken_and_the_others_counted() -> None:
    group = [annotated(answering(NO, 0.0), label="bad"), answering(HI, 1.0, 1)]
    wanted = Wanted(labels=frozenset({"bad"}))
    for lines_of in (sft_lines, dpo_lines, transition_lines):
        assert lines_of(group, wanted).left_out[OTHER_LABEL] == 1
    (line,) = sft_lines(group, wanted).lines
    assert line["messages"][-1] == NO
    (row,) = transition_lines(group, wanted).lines
    assert (row["label"], row["note"], row["corrected_answer"]) == ("bad", None, None)


def test_an_annotation_of_another_kind_is_refused_with_the_rollout() -> None:
    with pytest.raises(InvalidError, match=r"annotation of rollout .* is malformed"):
        sft_lines([annotated(answering(HI, 1.0), label=5)], ANYTHING)  # pyright: ignore[reportArgumentType]
