"""What is written into columns comes back as it was."""

from __future__ import annotations

import math
import pickle
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import InvalidError
from agentlightning.store import codec
from agentlightning.types import SampledChoice, TokenCapture

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


@given(
    st.builds(
        TokenCapture, prompt_token_ids=token_ids, choices=st.lists(choices, max_size=4).map(tuple)
    )
)
def test_tokens_come_back_bit_by_bit(tokens):
    read = codec.tokens_from_columns(codec.token_columns(tokens))
    assert read.prompt_token_ids == tokens.prompt_token_ids
    for one, other in zip(read.choices, tokens.choices, strict=True):
        assert (one.token_ids, one.finish_reason, one.versions) == (
            other.token_ids,
            other.finish_reason,
            other.versions,
        )
        assert [_bits(value) for value in one.logprobs] == [
            _bits(value) for value in other.logprobs
        ]


def _bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("f", value)


def test_numpy_takes_tokens_from_the_column_without_a_copy():
    choice = SampledChoice(token_ids=(4, 5), logprobs=(-0.5, -0.25), finish_reason="stop")
    columns = codec.token_columns(TokenCapture(prompt_token_ids=(1, 2, 3), choices=(choice,)))
    read = codec.tokens_from_columns(columns)
    prompt = np.asarray(read.prompt_token_ids, np.int32)
    assert prompt.tolist() == [1, 2, 3]
    assert np.shares_memory(prompt, np.frombuffer(columns.prompt_token_ids, np.int32))
    assert np.asarray(read.choices[0].logprobs, np.float32).tolist() == [-0.5, -0.25]


def test_a_column_is_as_good_as_the_tuple_of_its_numbers():
    choice = SampledChoice(token_ids=(4, 5), logprobs=(-0.5, -0.25), finish_reason="stop")
    written = TokenCapture(prompt_token_ids=(1, 2, 3), choices=(choice,))
    read = codec.tokens_from_columns(codec.token_columns(written))
    assert read == written == read == pickle.loads(pickle.dumps(read))
    assert (hash(read), repr(read)) == (hash(written), repr(written))
    assert (*read.prompt_token_ids, read.prompt_token_ids[-1], read.prompt_token_ids[:2]) == (
        1,
        2,
        3,
        3,
        (1, 2),
    )
    assert read.prompt_token_ids != [1, 2, 3]
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        assert encode(read, enc_hook=codec.plain) == encode(written)
    assert codec.token_columns(read) == codec.token_columns(written)


def test_tokens_are_written_as_little_endian_int32_and_float32():
    choice = SampledChoice(
        token_ids=(258,), logprobs=(-0.5,), finish_reason="stop", versions=((1, 1),)
    )
    columns = codec.token_columns(TokenCapture(prompt_token_ids=(1, 2), choices=(choice,)))
    assert columns.prompt_token_ids == b"\x01\0\0\0\x02\0\0\0"
    assert (columns.token_ids, columns.logprobs) == (b"\x02\x01\0\0", b"\0\0\0\xbf")


@pytest.mark.parametrize("value", ["\ud800", {1j}, {"x": object()}, math.inf, [{"y": math.nan}]])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(InvalidError, match="the input"):
        codec.to_json(value, "the input")
