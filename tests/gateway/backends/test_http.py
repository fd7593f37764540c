"""A remote server as a backend: our own gateway over HTTP, and servers that answer badly."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.arrays import int32
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import (
    BackendEvent,
    Delta,
    Finished,
    ModelCall,
    Sampling,
    Started,
    Usage,
)
from agentlightning.gateway.backends.http import HttpBackend
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk, gateway_before, piece

pytestmark = pytest.mark.anyio


def simple_call(**fields: Any) -> ModelCall:
    return ModelCall(**{"request_id": "r", "model": "m", "messages": user("hello"), **fields})


async def events_of(
    upstream: Upstream, call: ModelCall | None = None, **options: Any
) -> list[BackendEvent]:
    async with upstream.backend(**options) as backend:
        return [event async for event in backend.answer(call or simple_call())]


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_logprobs_and_usage_are_asked_for_and_read(stream: bool) -> None:
    upstream = Upstream(GOOD)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, stop=("x",), seed=9)
    call = simple_call(stream=stream, sampling=sampling, tools=[SEARCH_TOOL])
    events = await events_of(upstream, call, api_key="secret", model="upstream-name")
    assert events[0] == Started(int32((1, 2, 3)))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [4, 5, 6]
    assert [logprob for delta in deltas for logprob in delta.logprobs] == [-0.5, -0.25, -0.125]
    assert events[-2:] == [Finished(0, "stop"), Usage(3, 3)]
    (asked,) = upstream.asked
    expected = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "max_tokens": 7,
        "stop": ["x"],
        "seed": 9,
    }
    assert asked.items() >= {**expected, "model": "upstream-name", "tools": [SEARCH_TOOL]}.items()
    assert (asked["stream"], asked["return_token_ids"], asked["logprobs"]) == (stream, True, True)
    assert asked.get("stream_options") == ({"include_usage": True} if stream else None)
    assert upstream.headers[0]["authorization"] == "Bearer secret"


async def test_a_grammar_and_a_stop_string_of_unknown_ids_are_flagged() -> None:
    """The ids of a stop string are known where the server says how many tokens it sampled."""
    stopped = [
        GOOD[0],
        chunk(piece("Hi", [4, 5], [-0.5, -1.0], finish_reason="stop", stop_reason="x")),
    ]
    counted = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2})
    for stream in (True, False):
        events = await events_of(Upstream([*stopped, DONE]), simple_call(stream=stream))
        assert events[-1] == Finished(0, "stop", "ended by a stop string", "x")
        events = await events_of(Upstream([*stopped, counted, DONE]), simple_call(stream=stream))
        assert events[-2:] == [Finished(0, "stop", None, "x"), Usage(3, 2)]
    for extra in (
        {"response_format": {"type": "json_object"}},
        {"bad_words": ["x"]},
        {"min_tokens": 3},
    ):
        events = await events_of(Upstream(GOOD), simple_call(extra=extra))
        assert events[-2] == Finished(0, "stop", "constrained by a grammar")


async def test_no_secret_of_the_backends_is_told() -> None:
    with pytest.raises(BackendError) as caught:
        await events_of(
            Upstream([], 401, {"error": {"message": "sk-secret is no key"}}), simple_call()
        )
    assert "sk-secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="use api_key"):
        HttpBackend("http://user:sk-secret@localhost/v1")


@pytest.mark.slow
async def test_an_unreachable_upstream_is_a_503_after_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = HttpBackend("http://127.0.0.1:9/v1")
    with pytest.raises(BackendError, match="cannot be reached") as caught:
        [event async for event in backend.answer(simple_call())]
    assert caught.value.status == 503 and "trying again" in caplog.text


@pytest.mark.parametrize(
    ("events", "flag"),
    [
        (GOOD, None),
        (
            [*GOOD[:3], chunk(usage={"prompt_tokens": 3, "completion_tokens": 4}), GOOD[-1]],
            "ids and reported usage differ",
        ),
        (
            [GOOD[0], chunk(piece("Hi", [4, 5], [-0.5], finish_reason="stop")), GOOD[-1]],
            "ids and logprobs differ in length",
        ),
        (
            [chunk({"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}), GOOD[-1]],
            "backend returns no token ids",
        ),
    ],
)
async def test_a_call_whose_counts_disagree_is_flagged_and_counted(
    events: list[str], flag: str | None
) -> None:
    async with gateway_before(Upstream(events)) as front:
        attempted = await front.attempt()
        await front.client(attempted).chat.completions.create(
            model="policy", messages=user("hello")
        )
        (span,) = await front.spans(attempted)
        assert span.attributes.get(semconv.CALL_FLAG) == flag
        assert front.gateway.statistics.untrainable == ({flag: 1} if flag else {})


async def test_a_hosted_model_keeps_the_agents_sampling_and_is_not_trained() -> None:
    upstream = Upstream(GOOD)
    async with gateway_before(upstream, kind="openai") as front:
        attempted = await front.attempt()
        client = front.client(attempted)
        await client.chat.completions.create(model="policy", messages=user("hello"))
        await client.chat.completions.create(
            model="policy",
            messages=user("hello"),
            temperature=0.3,
            max_tokens=9,
            presence_penalty=0.5,
        )
        spans = await front.spans(attempted)
    assert {span.attributes[semconv.CALL_FLAG] for span in spans} == {
        "backend returns no token ids"
    }
    silent, outspoken = upstream.asked
    assert not {"temperature", "top_p", "top_k", "seed", "logprobs", "n"} & silent.keys()
    # by the name that the agent gave it
    assert (outspoken["temperature"], outspoken["max_tokens"]) == (0.3, 9)
    assert outspoken["presence_penalty"] == 0.5
