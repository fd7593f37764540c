"""The link of a call is recorded when it is captured, in every protocol, and is what a reader would
find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.gateway import attribution
from agentlightning.gateway.models import ModelEntry
from agentlightning.tracing.links import _Prefixes, read_links
from agentlightning.types import AttemptedRollout, Span
from tests.corpus.test_corpus import Hosted, connected
from tests.gateway.talker import PLAIN, user
from tests.gateway.upstream import GOOD
from tests.gateway.world import World, fronting, world

pytestmark = pytest.mark.anyio

HELLO, OTHER = "hello", next(text for text in PLAIN if text != "hello")


async def ask(there: World, attempted: AttemptedRollout, path: str, **body: Any) -> dict[str, Any]:
    """The answer, or nothing of a stream."""
    url = f"{there.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}/v1/{path}"
    headers = {
        "x-api-key": attempted.api_key or "EMPTY",
        "authorization": f"Bearer {attempted.api_key}",
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"model": "policy", **body}, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        body = await response.read()
        return msgspec.json.decode(body) if response.content_type == "application/json" else {}


async def chat(
    there: World, attempted: AttemptedRollout, messages: list[Any], **body: Any
) -> list[Any]:
    """The messages with the answer and what is asked next."""
    await ask(there, attempted, "chat/completions", messages=messages, **body)
    said = (await there.spans(attempted))[-1].attributes[semconv.GEN_AI_OUTPUT_MESSAGES]
    return [*messages, msgspec.json.decode(str(said))[0], *user("and then?")]


async def anthropic(
    there: World, attempted: AttemptedRollout, messages: list[Any], **body: Any
) -> list[Any]:
    answer = await ask(there, attempted, "messages", messages=messages, max_tokens=100, **body)
    return [*messages, {"role": "assistant", "content": answer["content"]}, *user("and then?")]


async def responses(
    there: World, attempted: AttemptedRollout, items: list[Any], **body: Any
) -> list[Any]:
    answer = await ask(there, attempted, "responses", input=items, **body)
    return [*items, *answer["output"], *user("and then?")]


def recorded(spans: list[Span]) -> list[int | None]:
    """The call that each goes on from, as recorded; AssertionError if a reader finds another."""
    plain = [
        msgspec.structs.replace(
            span,
            attributes={name: value for name, value in span.attributes.items() if name not in LINK},
        )
        for span in spans
    ]
    found, read = read_links(spans), read_links(plain)
    assert {name: link for name, (_, link) in found.items()} == {
        name: link for name, (_, link) in read.items()
    }
    return [span.attributes.get(semconv.CALL_CONTINUES) for span in spans]  # type: ignore[misc]


@given(
    st.sampled_from(["ab", "aé漢", b"\0\1"]),
    st.lists(st.integers(0, 5000), min_size=4, max_size=4),
)
def test_a_prompt_begins_with_what_it_begins_with(letters: Any, lengths: list[int]) -> None:
    text = (letters * 5000)[:7000]
    earlier, answered, prompt, answer = (text[:length] for length in lengths)
    known, asked = _Prefixes(earlier, answered), _Prefixes(prompt, answer)
    assert (known.whole in asked) == prompt.startswith(earlier + answered)
    assert (known.prompt in asked) == prompt.startswith(earlier)
    other = _Prefixes(letters[:1] + prompt, answer)
    assert (known.whole in other) == (letters[:1] + prompt).startswith(earlier + answered)


LINK = (semconv.CALL_CONTINUES, semconv.CALL_SHARED_MESSAGES, semconv.CALL_TOKENS_AGREE)


@pytest.mark.parametrize("speak", [chat, anthropic, responses])
async def test_agents_by_turns_each_go_on_with_their_own(gateway_world: World, speak: Any) -> None:
    attempted = await gateway_world.attempt()
    writer, search = user(HELLO), user(OTHER)
    for _ in range(2):
        writer = await speak(gateway_world, attempted, writer)
        search = await speak(gateway_world, attempted, search)
    await speak(gateway_world, attempted, [*user("no"), *user("start")])
    spans = await gateway_world.spans(attempted)
    assert recorded(spans) == [-1, -1, 0, 1, -1]
    assert [span.attributes[semconv.CALL_SHARED_MESSAGES] for span in spans[2:4]] == [2, 2]
    assert [span.attributes[semconv.CALL_TOKENS_AGREE] for span in spans[2:4]] == [True, True]


async def test_streams_several_choices_and_responses_by_id_are_linked(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    history = await chat(gateway_world, attempted, user(HELLO), stream=True)
    await chat(gateway_world, attempted, history, n=2)
    first = await ask(gateway_world, attempted, "responses", input=OTHER)
    await ask(
        gateway_world, attempted, "responses", input="and then?", previous_response_id=first["id"]
    )
    await ask(
        gateway_world, attempted, "responses", input=[*user("no")], previous_response_id=first["id"]
    )
    assert recorded(await gateway_world.spans(attempted)) == [-1, 0, -1, 2, 2]


async def test_what_is_passed_through_is_linked_by_its_messages() -> None:
    routes = [Route("/v1/responses", Hosted(GOOD).own, methods=["POST"])]
    async with (
        connected(routes, "openai") as backend,
        fronting(ModelEntry("policy", backend, trainable=False)) as there,
    ):
        attempted = await there.attempt()
        items = await responses(there, attempted, user(HELLO))
        await responses(there, attempted, items)
        await responses(
            there, attempted, [*items[:1], {"role": "assistant", "content": "No."}, *user("and?")]
        )
        spans = await there.spans(attempted)
    assert semconv.CALL_RESPONSE in spans[0].attributes
    assert recorded(spans) == [-1, 0, 0]
    assert [span.attributes[semconv.CALL_SHARED_MESSAGES] for span in spans[1:]] == [2, 1]


async def test_a_gateway_that_has_not_seen_an_attempts_first_calls_leaves_its_links_to_the_reader(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        attempted = await there.attempt()
        history = await chat(there, attempted, user(HELLO))
        entry = there.gateway.entry("policy")
        async with fronting(entry, store=there.store) as restarted:
            history = await chat(restarted, attempted, history)
            await chat(restarted, attempted, history)
        spans = await there.spans(attempted)
    assert [span.attributes.get(semconv.CALL_CONTINUES) for span in spans] == [-1, None, None]
    assert [link.call for _, link in read_links(spans).values()] == [0, 1]


async def test_of_very_many_attempts_the_latest_are_linked(
    gateway_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "_LINKING", 1)
    first, second = [await gateway_world.attempt() for _ in range(2)]
    histories = [await chat(gateway_world, attempted, user(HELLO)) for attempted in (first, second)]
    for attempted, history in zip((first, second), histories, strict=True):
        await chat(gateway_world, attempted, history)
    found = [recorded(await gateway_world.spans(attempted)) for attempted in (first, second)]
    assert found == [[-1, None], [-1, 0]]
