"""Recorded calls are answered again: with the same bytes in every dialect, sampling nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.gateway.attribution import Attributor
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.store.redaction import redaction
from agentlightning.store.sources import forked
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    AttemptedRollout,
    Condition,
    ForkSource,
    Rollout,
    RolloutConfig,
    Span,
)
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.world import GREEDY, World, fronting, serving, talking, world
from tests.runner.world import until

pytestmark = pytest.mark.anyio

RETRIED = RolloutConfig(max_attempts=3, retry_condition=("failed",), retry="replay")


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as built:
        yield built


async def post(
    there: World,
    attempted: AttemptedRollout,
    path: str,
    body: dict[str, Any],
    retries: int = 0,
) -> tuple[int, bytes]:
    """The status and body of a call that the client has made so often before."""
    ids = f"rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    headers = {"authorization": f"Bearer {attempted.api_key}"}
    headers["x-stainless-retry-count"] = str(retries)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{there.url}/{ids}/{path}", json=body, headers=headers) as response,
    ):
        return response.status, await response.read()


def restart(there: World) -> None:
    """A gateway that knows only what is stored."""
    calls = there.gateway._calls  # pyright: ignore[reportPrivateUsage]
    calls.attributor = Attributor(there.store)
    calls._began = time.time()  # pyright: ignore[reportPrivateUsage]


async def end(there: World, attempted: AttemptedRollout, status: Any = "succeeded") -> None:
    await there.store.update_attempt(
        attempted.rollout_id, attempted.attempt.attempt_id, status=status
    )


async def fork(there: World, source: AttemptedRollout, at: int, **how: Any) -> AttemptedRollout:
    """A fork of an ended rollout, leased."""
    rollout = await there.store.get_rollout_by_id(source.rollout_id)
    assert rollout is not None
    request = forked(rollout, ForkSource(rollout_id=rollout.rollout_id, at=at, **how))
    await there.store.enqueue_many_rollouts([request])
    leased = await there.store.dequeue_rollout()
    assert leased is not None
    return leased


async def again(there: World, first: AttemptedRollout) -> AttemptedRollout:
    """The next attempt of a rollout whose last one failed."""
    await end(there, first, "failed")
    leased = await there.store.dequeue_rollout()
    assert leased is not None
    assert leased.rollout_id == first.rollout_id
    return leased


async def chat(
    there: World,
    attempted: AttemptedRollout,
    messages: list[Any],
    *,
    retries: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """The answer's message, or the error."""
    body = {"model": "policy", "messages": messages, **more}
    status, answer = await post(there, attempted, "v1/chat/completions", body, retries)
    read = msgspec.json.decode(answer)
    return read["choices"][0]["message"] if status == 200 else read["error"]


async def converse(
    there: World, attempted: AttemptedRollout, *said: str, tool: str = "It is 20 degrees."
) -> list[Any]:
    """The messages of a conversation in which the user says this, one call for each."""
    messages: list[Any] = []
    for text in said:
        messages += user(text)
        answer = await chat(there, attempted, messages, tools=[SEARCH_TOOL])
        messages.append(answer)
        for call in answer.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": tool})
    return messages


async def calls_of(there: World, attempted: AttemptedRollout) -> list[Span]:
    return sorted(
        await there.spans(attempted), key=lambda span: span.attributes[semconv.CALL_INDEX]
    )


async def ended(there: World, attempted: AttemptedRollout) -> Rollout:
    rollout = await there.store.get_rollout_by_id(attempted.rollout_id)
    assert rollout is not None
    return rollout


def ids_of(call: Span) -> tuple[Any, Any]:
    """Of a call's prompt and answer."""
    assert call.tokens is not None
    return call.tokens.prompt_token_ids, call.tokens.choices[0].token_ids


def json_of(text: Any) -> Any:
    return msgspec.json.decode(text)


def values(spans: list[Span], name: str) -> list[Any]:
    """An attribute of each call, in order."""
    calls = [span for span in spans if semconv.CALL_INDEX in span.attributes]
    calls.sort(key=lambda span: span.attributes[semconv.CALL_INDEX])
    return [span.attributes.get(name) for span in calls]


CHAT = {"messages": user("weather"), "tools": [SEARCH_TOOL], "model": "policy"}
FUNCTION: Any = SEARCH_TOOL["function"]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", CHAT),
    "chat streamed": (
        "v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "ids": ("v1/chat/completions", CHAT | {"return_token_ids": True}),
    "ids streamed": ("v1/chat/completions", CHAT | {"return_token_ids": True, "stream": True}),
    "logprobs": ("v1/chat/completions", CHAT | {"logprobs": True}),
    "stop": (
        "v1/chat/completions",
        {"model": "policy", "messages": user("count"), "stop": [" 5"]},
    ),
    "stop streamed": (
        "v1/chat/completions",
        {"model": "policy", "messages": user("count"), "stop": [" 5"], "stream": True},
    ),
    "limit": (
        "v1/chat/completions",
        {"model": "policy", "messages": user("count"), "max_tokens": 3},
    ),
    "two choices": ("v1/chat/completions", CHAT | {"n": 2}),
    "responses": (
        "v1/responses",
        {"model": "policy", "input": "weather", "tools": [{"type": "function", **FUNCTION}]},
    ),
    "messages": (
        "v1/messages",
        {
            "model": "policy",
            "max_tokens": 100,
            "messages": user("weather"),
            "tools": [{"name": "search", "input_schema": FUNCTION["parameters"]}],
        },
    ),
    "gemini": (
        "v1beta/models/policy:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "weather"}]}],
            "tools": [{"functionDeclarations": [FUNCTION]}],
        },
    ),
    "gemini streamed": (
        "v1beta/models/policy:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
    ),
    "completion": ("v1/completions", {"model": "policy", "prompt": "hello", "max_tokens": 5}),
    "completion of ids": ("v1/completions", {"model": "policy", "prompt": [1, 2], "max_tokens": 5}),
}
for name in ("responses", "messages"):
    path, body = DIALECTS[name]
    DIALECTS[f"{name} streamed"] = (path, body | {"stream": True})


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_recorded_answer_comes_again_byte_for_byte(there: World, name: str) -> None:
    path, body = DIALECTS[name]
    source = await there.attempt()
    status, first = await post(there, source, path, body)
    assert status == 200, first
    await converse(there, source, "hello")
    await end(there, source)
    there.gateway.hold("policy")  # what is sampled waits
    assert await post(there, await fork(there, source, 1), path, body) == (200, first)


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_retry_repeats_the_calls_of_the_attempt_before_it(there: World, name: str) -> None:
    path, body = DIALECTS[name]
    first = await there.attempt(config=RETRIED)
    said = [await post(there, first, path, body)]
    second = await again(there, first)
    there.gateway.hold("policy")
    assert [await post(there, second, path, body)] == said
    there.gateway.release("policy")
    third = await again(there, second)
    there.gateway.hold("policy")
    assert [await post(there, third, path, body)] == said
    (before,), (after,) = await there.spans(first), await there.spans(third)
    assert after.tokens == before.tokens
    assert semconv.CALL_FLAG not in after.attributes
    assert after.attributes[semconv.CALL_REPLAYED_ATTEMPT] == first.attempt.attempt_id


async def test_a_fork_samples_from_its_call_on_and_refers_to_what_came_before(
    there: World,
) -> None:
    source = await there.attempt()
    said = await converse(there, source, "weather", "hello", "count")
    await end(there, source)
    forks = await fork(there, source, 1)
    assert await converse(there, forks, "weather", "hello", "count") == said
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_FLAG) == [semconv.REPLAYED, None, None]
    assert values(spans, semconv.CALL_CONTINUES) == [-1, 0, 1]
    assert values(spans, semconv.CALL_TOKENS_AGREE) == values(
        await there.spans(source), semconv.CALL_TOKENS_AGREE
    )
    reference = spans[0]
    assert reference.tokens is None
    assert semconv.GEN_AI_INPUT_MESSAGES not in reference.attributes
    assert reference.attributes[semconv.CALL_REPLAYED_ROLLOUT] == source.rollout_id
    assert forks.metadata["sample"] == f"{source.rollout_id}/fork 1.0"
    await end(there, forks)
    assert trace_rollout(await ended(there, forks), spans).prefix_version == 0


async def test_the_prompt_of_the_live_call_is_the_recorded_one_token_for_token(
    there: World,
) -> None:
    source = await there.attempt()
    await converse(there, source, "weather", "hello", "count")
    await end(there, source)
    forks = await fork(there, source, 2)
    await converse(there, forks, "weather", "hello", "count")
    theirs = (await calls_of(there, source))[2]
    ours = (await calls_of(there, forks))[2]
    assert ids_of(ours) == ids_of(theirs)
    spliced = theirs.attributes[semconv.RECORDED_SPLICE]
    assert ours.attributes[semconv.RECORDED_SPLICE] == spliced


async def test_a_call_that_differs_from_the_record_is_refused_and_the_difference_is_named(
    there: World,
) -> None:
    source = await there.attempt()
    await converse(there, source, "weather", "hello", tool="It was 20 degrees at 12:03:55.")
    await end(there, source)
    forks = await fork(there, source, 1)
    *_, error = await converse(there, forks, "weather", "hello", tool="It was 20 degrees at 18:30.")
    assert error["code"] == "replay_diverged"
    assert "message 3 is" in error["message"]
    assert "12:03:55" in error["message"]
    assert "18:30" in error["message"]
    assert error["message"].endswith("They differ in dates alone: fork with replace: [dates]")
    refusal = (await there.spans(forks))[-1]
    assert refusal.attributes[semconv.ERROR_TYPE] == "replay_diverged"


async def test_what_varies_is_sent_as_recorded_from_there_on(there: World) -> None:
    source = await there.attempt()
    said = await converse(
        there, source, "weather", "hello", "count", tool="It is 12:03, 3.4 s, /tmp/tmp7izai8a_."
    )
    await end(there, source)
    forks = await fork(there, source, 1, replace=("dates", "durations", "folders"))
    ours = await converse(
        there, forks, "weather", "hello", "count", tool="It is 18:30, 20 ms, /tmp/tmpjc6gq38x."
    )
    assert ours[-1] == said[-1]
    theirs = await calls_of(there, source)
    for before, after in zip(theirs[1:], (await calls_of(there, forks))[1:], strict=True):
        assert ids_of(before) == ids_of(after)
        recorded = json_of(after.attributes[semconv.GEN_AI_INPUT_MESSAGES])
        assert recorded[2]["content"] == "It is 12:03, 3.4 s, /tmp/tmp7izai8a_."


async def test_a_fork_may_go_on_from_a_divergence_and_is_then_not_trained(there: World) -> None:
    source = await there.attempt()
    await converse(there, source, "weather", "hello", "count")
    await end(there, source)
    forks = await fork(there, source, 2, on_divergence="live")
    await converse(there, forks, "weather", "hello", "count", tool="It rains.")
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_FLAG) == [
        semconv.REPLAYED,
        semconv.DIVERGED,
        semconv.DIVERGED,
    ]
    first, why, last = values(spans, semconv.CALL_DIVERGED)
    assert first is last is None
    assert "It rains." in why


async def test_a_retry_that_diverges_starts_over_and_what_it_copied_does_not_count(
    there: World,
) -> None:
    first = await there.attempt(config=RETRIED)
    await converse(there, first, "weather", "hello")
    second = await again(there, first)
    await converse(there, second, "weather", "hello", "count", tool="It rains.")
    spans = await there.spans(second)
    assert values(spans, semconv.CALL_FLAG) == [None, None, None]
    assert values(spans, semconv.CALL_DISCARDS) == [None, [0], None]
    assert "It rains." in values(spans, semconv.CALL_DIVERGED)[1]


async def test_a_retry_goes_on_where_the_record_ends(there: World) -> None:
    first = await there.attempt(config=RETRIED)
    said = await converse(there, first, "weather", "hello")
    second = await again(there, first)
    assert (await converse(there, second, "weather", "hello", "count"))[: len(said)] == said
    third = await again(there, second)
    there.gateway.hold("policy")
    await converse(there, third, "weather", "hello", "count")
    spans = await there.spans(third)
    assert values(spans, semconv.CALL_REPLAYED_ATTEMPT) == [
        first.attempt.attempt_id,
        first.attempt.attempt_id,
        second.attempt.attempt_id,
    ]
    assert values(spans, semconv.CALL_FLAG) == [None] * 3
    await end(there, third)
    traced = trace_rollout(await ended(there, third), spans)
    assert len(traced.transitions) == 3
    assert not traced.excluded.total()


async def test_an_attempt_that_was_interrupted_in_its_own_replay_loses_nothing(
    there: World,
) -> None:
    first = await there.attempt(config=RETRIED)
    said = await converse(there, first, "weather", "hello", "count")
    second = await again(there, first)
    await converse(there, second, "weather")
    third = await again(there, second)
    there.gateway.hold("policy")
    assert await converse(there, third, "weather", "hello", "count") == said


async def test_agents_side_by_side_are_cut_by_what_they_go_on_from(there: World) -> None:
    """Two conversations in turn; a fork of the first one leaves the second as it was."""
    source = await there.attempt()
    hello = await converse(there, source, "hello")
    count = await converse(there, source, "count")
    one = [*hello, *user("and then?")]
    two = [*count, *user("and then?")]
    last = await chat(there, source, one)
    other = await chat(there, source, two)
    await end(there, source)
    forks = await fork(there, source, 2)
    there.gateway.hold("policy")
    assert await converse(there, forks, "count") == count
    assert await chat(there, forks, two) == other
    assert await converse(there, forks, "hello") == hello
    there.gateway.release("policy")
    assert await chat(there, forks, one) == last
    flags = values(await there.spans(forks), semconv.CALL_FLAG)
    assert flags == [semconv.REPLAYED] * 3 + [None]


async def test_equal_calls_are_answered_in_the_order_of_the_record(there: World) -> None:
    source = await there.attempt()
    for _ in range(3):
        await chat(there, source, user("hello"))
    await end(there, source)
    forks = await fork(there, source, 1)
    for _ in range(3):
        await chat(there, forks, user("hello"))
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_REPLAYED_INDEX) == [0, None, 2]


async def test_a_fork_can_be_given_the_answer_of_its_call(there: World) -> None:
    source = await there.attempt()
    await converse(there, source, "weather", "hello")
    await end(there, source)
    forks = await fork(there, source, 1, answer="Good day.")
    said = await converse(there, forks, "weather", "hello", "count")
    assert said[-3]["content"] == "Good day."
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_FLAG) == [semconv.REPLAYED, semconv.GIVEN, None]
    await end(there, forks)
    traced = trace_rollout(await ended(there, forks), spans)
    assert [call.call_index for call in traced.transitions] == [2]
    assert traced.excluded == {semconv.REPLAYED: 1, semconv.GIVEN: 1}


async def test_answers_that_nobody_received_are_not_in_the_record(there: World) -> None:
    source = await there.attempt()
    await chat(there, source, user("hello"))
    await chat(there, source, user("hello"))
    first = (await there.spans(source))[0]
    attributes = {semconv.CALL_DISCARDS: [0]}
    discard = msgspec.structs.replace(
        first, span_id="f" * 16, name=semconv.UNDELIVERED, attributes=attributes, tokens=None
    )
    await there.store.add_span(discard)
    await chat(there, source, user("count"))
    await end(there, source)
    forks = await fork(there, source, 2)
    await chat(there, forks, user("hello"))
    await chat(there, forks, user("count"))
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_REPLAYED_INDEX) == [1, None]


async def test_a_fork_of_a_fork_names_the_calls_that_were_sampled(there: World) -> None:
    source = await there.attempt()
    said = await converse(there, source, "weather", "hello", "count")
    await end(there, source)
    child = await fork(there, source, 1)
    await converse(there, child, "weather", "hello", "count")
    await end(there, child)
    grandchild = await fork(there, child, 2)
    assert await converse(there, grandchild, "weather", "hello", "count") == said
    spans = await there.spans(grandchild)
    assert values(spans, semconv.CALL_REPLAYED_ROLLOUT) == [
        source.rollout_id,
        child.rollout_id,
        None,
    ]


async def test_a_fork_that_is_retried_walks_its_own_calls_again(there: World) -> None:
    source = await there.attempt(config=RETRIED)
    said = await converse(there, source, "weather", "hello")
    await end(there, source)
    first = await fork(there, source, 1)
    await converse(there, first, "weather", "hello")
    second = await again(there, first)
    there.gateway.hold("policy")
    assert await converse(there, second, "weather", "hello") == said
    there.gateway.release("policy")
    await chat(there, second, [*said, *user("count")])
    flags = values(await there.spans(second), semconv.CALL_FLAG)
    assert flags == [semconv.REPLAYED, None, None]


async def test_a_gateway_that_restarts_goes_on_in_the_walk(there: World) -> None:
    source = await there.attempt()
    for _ in range(2):
        await chat(there, source, user("hello"))
    await chat(there, source, user("count"))
    await end(there, source)
    forks = await fork(there, source, 2)
    await chat(there, forks, user("hello"))

    async def is_stored() -> bool:
        return bool(await there.spans(forks))

    await until(is_stored)  # a reference is written behind its answer
    restart(there)
    await chat(there, forks, user("hello"))
    await chat(there, forks, user("count"))
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_REPLAYED_INDEX) == [0, 1, None]


async def test_an_answer_that_a_gateway_wrote_as_it_died_was_not_received(there: World) -> None:
    """The client makes the call again, and goes on from what it gets then: in a retry too."""
    source = await there.attempt(config=RETRIED)
    said = user("hello")
    await chat(there, source, said)
    await chat(there, source, said, retries=1)  # of an error; the gateway knows what it has sent
    restart(there)
    said += [await chat(there, source, said, retries=2), *user("count")]
    said += [await chat(there, source, said)]
    calls = await calls_of(there, source)
    assert [call.attributes.get(semconv.CALL_DISCARDS) for call in calls] == [None, None, [1], None]
    second = await again(there, source)
    assert [await chat(there, second, user("hello")) for _ in range(2)][1] == said[1]
    restart(there)  # and the client of that one had no answer
    assert await chat(there, second, user("hello"), retries=1) == said[1]
    assert await chat(there, second, said[:3]) == said[3]
    copies = await calls_of(there, second)
    assert values(copies, semconv.CALL_REPLAYED_INDEX) == [0, 2, 2, 3]
    traced = trace_rollout(await ended(there, second), copies)
    assert [call.call_index for call in traced.transitions] == [0, 2, 3]


async def test_an_agents_ids_order_of_keys_and_spacing_do_not_matter(there: World) -> None:
    source = await there.attempt()
    said = await converse(there, source, "weather", "hello")
    await end(there, source)
    forks = await fork(there, source, 1)
    there.gateway.hold("policy")
    messages = msgspec.json.decode(msgspec.json.encode(said[:-1]))
    (call,) = messages[1]["tool_calls"]
    call["id"] = messages[2]["tool_call_id"] = "my own"
    call["function"]["arguments"] = ' { "q" :"sun"}'
    messages[1] = dict(reversed(messages[1].items()))
    await chat(there, forks, said[:1], tools=[SEARCH_TOOL])
    there.gateway.release("policy")
    answer = await chat(there, forks, messages, tools=[SEARCH_TOOL])
    assert answer["content"] == said[-1]["content"]


async def test_a_deleted_source_is_named_to_the_agent(there: World) -> None:
    source = await there.attempt()
    await converse(there, source, "weather", "hello")
    await end(there, source)
    forks = await fork(there, source, 1)
    sources = Condition("rollout_id", "eq", source.rollout_id)
    assert (await there.store.delete_rollouts(sources)).rollouts == 2
    status, _ = await post(there, forks, "v1/chat/completions", CHAT)
    assert status == 404


@pytest.mark.parametrize("capture", ["full", "tokens"])
async def test_a_record_without_texts_is_compared_by_token_ids(
    tmp_path: Path, capture: Any
) -> None:
    store = await SqlStore.open(tmp_path / "store.sqlite", redact=redaction(capture))
    async with talking() as (backend, _):
        entry = ModelEntry("policy", backend, train=GREEDY)
        async with fronting(entry, store=store) as there:
            source = await there.attempt()
            said = await converse(there, source, "weather", "hello")
            await end(there, source)
            forks = await fork(there, source, 1)
            there.gateway.hold("policy")
            await converse(there, forks, "weather")
            there.gateway.release("policy")
            assert await chat(there, forks, said[:-1], tools=[SEARCH_TOOL]) == said[-1]
            other = await fork(there, source, 1)
            error = await chat(there, other, user("count"))
            assert error["code"] == "replay_diverged"
    await store.close()


async def test_a_request_is_redacted_before_it_is_compared(tmp_path: Path) -> None:
    secret = "sk-proj-8f7d6e5c4b3a29181716"
    async with world(tmp_path) as there:
        source = await there.attempt()
        await converse(there, source, "weather", "hello", tool=f"The key is {secret}.")
        await end(there, source)
        assert secret not in str(await there.spans(source))
        forks = await fork(there, source, 1)
        said = await converse(there, forks, "weather", "hello", tool=f"The key is {secret}.")
        assert "code" not in said[-1]


async def test_a_record_that_was_converted_is_compared_as_it_was_converted(there: World) -> None:
    """A new gateway does not know yet that the model server has chat completions alone."""

    async def chats(request: Request) -> JSONResponse:
        said = {"role": "assistant", "content": f"heard {len((await request.json())['messages'])}"}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "choices": [choice]})

    app = Starlette(routes=[Route("/v1/chat/completions", chats, methods=["POST"])])

    async def ask(front: World, attempted: AttemptedRollout, *texts: str) -> list[bytes]:
        items = [{"role": "user", "content": text} for text in texts]
        bodies = [{"model": "m", "input": items[: n + 1]} for n in range(len(items))]
        return [(await post(front, attempted, "v1/responses", body))[1] for body in bodies]

    async with serving(app) as url:

        def entry() -> ModelEntry:
            return ModelEntry("m", HttpBackend(f"{url}/v1", kind="openai"), trainable=False)

        async with fronting(entry(), store=there.store) as front:
            source = await front.attempt()
            first = await ask(front, source, "one", "two")
            await end(front, source)
        async with fronting(entry(), store=there.store) as front:
            forks = await fork(front, source, 1)
            assert await ask(front, forks, "one", "three") != first
            spans = await front.spans(forks)
    assert values(spans, semconv.CALL_REPLAYED_INDEX)[0] == 0


async def test_an_answer_that_was_on_its_way_when_the_worker_was_lost_is_given(
    there: World,
) -> None:
    config = RolloutConfig(max_attempts=3, retry_condition=("unresponsive",), retry="replay")
    first = await there.attempt(config=config)
    said = await converse(there, first, "weather", "hello")
    lost = (await calls_of(there, first))[-1]
    attributes = {semconv.CALL_DISCARDS: [lost.attributes[semconv.CALL_INDEX]]}
    note = msgspec.structs.replace(
        lost, span_id="f" * 16, name=semconv.UNDELIVERED, attributes=attributes, tokens=None
    )
    await there.store.add_span(note)
    await end(there, first, "unresponsive")
    second = await there.store.dequeue_rollout()
    assert second is not None
    there.gateway.hold("policy")
    assert await converse(there, second, "weather", "hello") == said


async def test_a_fork_that_diverges_does_so_in_its_retry_too(there: World) -> None:
    source = await there.attempt()
    await converse(there, source, "weather", "hello", "count")
    await end(there, source)
    rollout = await there.store.get_rollout_by_id(source.rollout_id)
    assert rollout is not None
    walked = ForkSource(rollout_id=rollout.rollout_id, at=2)
    await there.store.enqueue_many_rollouts([forked(rollout, walked, config=RETRIED)])
    forks = await there.store.dequeue_rollout()
    assert forks is not None
    for _ in range(2):
        messages = (await converse(there, forks, "weather"))[:]
        error = await chat(there, forks, [*messages, *user("bye")], tools=[SEARCH_TOOL])
        assert error.get("code") == "replay_diverged"
        forks = await again(there, forks)


async def test_a_retry_that_started_over_can_be_forked(there: World) -> None:
    first = await there.attempt(config=RETRIED)
    await converse(there, first, "weather", "hello")
    second = await again(there, first)
    said = await converse(there, second, "weather", "hello", "count", tool="It rains.")
    await end(there, second)
    forks = await fork(there, second, 2)
    assert (await converse(there, forks, "weather", "hello", "count", tool="It rains.")) == said
    spans = await there.spans(forks)
    assert values(spans, semconv.CALL_FLAG) == [semconv.REPLAYED, semconv.REPLAYED, None]
