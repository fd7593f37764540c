"""What is written into columns comes back as it was."""

from __future__ import annotations

import math
import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.arrays import int32, plain
from agentlightning.errors import InvalidError
from agentlightning.store import codec
from agentlightning.types import SampledChoice, Span, TokenCapture

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
choices = st.builds(
    SampledChoice,
    token_ids=token_ids,
    logprobs=st.lists(st.floats(width=32), max_size=20).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "content_filter", "abort"]),
    versions=st.lists(
        st.tuples(st.integers(0, 2**63), st.integers(0, 2**63)).map(tuple), max_size=3
    ).map(tuple),
)


def columns_of(tokens: TokenCapture) -> codec.SpanColumns:
    span = Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=1,
        trace_id="t",
        span_id="s",
        name="call",
        start_time=0.0,
        end_time=1.0,
        tokens=tokens,
    )
    return codec.span_columns(span)


def read(columns: codec.SpanColumns) -> TokenCapture:
    tokens = codec.span_from_columns("ro-1", "at-1", columns).tokens
    assert tokens is not None
    return tokens


@given(
    st.builds(
        TokenCapture, prompt_token_ids=token_ids, choices=st.lists(choices, max_size=4).map(tuple)
    )
)
def test_tokens_come_back_bit_by_bit(tokens):
    back = read(columns_of(tokens))
    assert back.prompt_token_ids == tokens.prompt_token_ids
    for one, other in zip(back.choices, tokens.choices, strict=True):
        assert (one.token_ids, one.finish_reason, one.versions) == (
            other.token_ids,
            other.finish_reason,
            other.versions,
        )
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_tokens_are_the_same_arrays_from_the_choice_to_numpy():
    choice = SampledChoice(token_ids=[4, 5], logprobs=[-0.5, -0.25], finish_reason="stop")
    made = TokenCapture(prompt_token_ids=int32([1, 2, 3]), choices=(choice,))
    back = read(columns_of(made))
    assert made == back == pickle.loads(pickle.dumps(back))
    for tokens in (made, back):
        one = tokens.choices[0]
        for numbers, kind in (
            (tokens.prompt_token_ids, np.int32),
            (one.token_ids, np.int32),
            (one.logprobs, np.float32),
        ):
            seen = np.asarray(numbers)
            assert seen.dtype == kind and seen.tolist() == numbers.tolist()
            assert np.shares_memory(seen, np.frombuffer(numbers, kind))
    again = SampledChoice(
        token_ids=choice.token_ids, logprobs=choice.logprobs, finish_reason="length"
    )
    assert again.token_ids is choice.token_ids and again.logprobs is choice.logprobs


@pytest.mark.parametrize("coder", [msgspec.json, msgspec.msgpack])
def test_arrays_are_lists_between_processes(coder):
    choice = SampledChoice(token_ids=(4, 5), logprobs=(-0.5, -0.25), finish_reason="stop")
    tokens = TokenCapture(prompt_token_ids=(1, 2, 3), choices=(choice,))
    sent = coder.encode(tokens, enc_hook=plain)
    assert coder.decode(sent)["prompt_token_ids"] == [1, 2, 3]
    assert coder.decode(sent, type=TokenCapture) == tokens
    with pytest.raises(TypeError, match="a set cannot be encoded"):
        plain({1})


@pytest.mark.parametrize("ids", [[2**31], [0.5], ["1"]])
def test_only_32_bits_are_token_ids(ids):
    with pytest.raises(InvalidError, match="32 bits"):
        TokenCapture(prompt_token_ids=ids, choices=())


def test_tokens_are_written_as_little_endian_int32_and_float32():
    choice = SampledChoice(
        token_ids=(258,), logprobs=(-0.5,), finish_reason="stop", versions=((1, 1),)
    )
    columns = columns_of(TokenCapture(prompt_token_ids=(1, 2), choices=(choice,)))
    assert columns.prompt_token_ids == b"\x01\0\0\0\x02\0\0\0"
    assert (columns.token_ids, columns.logprobs) == (b"\x02\x01\0\0", b"\0\0\0\xbf")
    assert columns.choices == '[[1,1,"stop",[[1,1]]]]'


@pytest.mark.parametrize("value", ["\ud800", {1j}, {"x": object()}, math.inf, [{"y": math.nan}]])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(InvalidError, match="the input"):
        codec.to_json(value, "the input")
