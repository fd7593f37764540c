"""Images and files that an agent names by URL: a server behind the gateway fetches what is on the
web, and reads nothing from its own disk or with its own account."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from agentlightning.gateway.backends.http import Kind
from tests.gateway.test_passing_through import Hosted, before
from tests.gateway.upstream import GOOD, Upstream, gateway_before

pytestmark = pytest.mark.anyio

DATA = "data:image/png;base64,AA=="


def chat(*parts: dict[str, Any], role: str = "user") -> tuple[str, dict[str, Any]]:
    question = {"role": "user", "content": "look"}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    before = [] if role == "user" else [question, {"role": "assistant", "tool_calls": calls}]
    shown = {"role": role, "content": [*parts], **({} if role == "user" else {"tool_call_id": "c"})}
    return "v1/chat/completions", {"messages": [*before, shown]}


def responses(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "v1/responses", {"input": [{"role": "user", "content": [*parts]}]}


def output(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    shown = {"type": "function_call_output", "call_id": "c", "output": [*parts]}
    return "v1/responses", {"input": [{"role": "user", "content": "look"}, call, shown]}


def messages(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [*parts]}]}


def result(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    called = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
    }
    shown = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [*parts]}],
    }
    return "v1/messages", {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "look"}, called, shown],
    }


def gemini(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "v1beta/models/policy:generateContent", {
        "contents": [{"role": "user", "parts": [*parts]}]
    }


def naming(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests that name an image, a sound, a film or a file by its URL."""
    source = {"type": "image", "source": {"type": "url", "url": url}}
    googles = (
        []
        if url.startswith("data:")
        else [gemini({"fileData": {"fileUri": url, "mimeType": "image/png"}})]
    )
    return [
        *googles,
        chat({"type": "image_url", "image_url": {"url": url}}),
        chat({"type": "image_url", "image_url": url}),
        chat({"type": "video_url", "video_url": {"url": url}}),
        chat({"type": "image_url", "image_url": {"url": url}}, role="tool"),
        responses({"type": "input_image", "image_url": url}),
        output({"type": "input_image", "image_url": url}),
        messages(source),
        result(source),
        messages({"type": "document", "source": {"type": "content", "content": [source]}}),
    ]


FORBIDDEN = [
    *("file:///etc/passwd", "FILE:///etc/passwd", "/etc/passwd", "a.png"),
    *("gs://bucket/x.png", "s3://bucket/x.png"),
]


async def asked(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/{path}", json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_a_url_that_is_not_of_the_web_is_refused_and_asks_nobody(kind: Kind) -> None:
    upstream = Upstream(GOOD)
    async with gateway_before(upstream, kind=kind) as world:
        for url in FORBIDDEN:
            for path, body in naming(url):
                status, answer = await asked(world.url, path, {"model": "policy", **body})
                said = answer["error"]["message"]
                assert status == 400 and (url in said or "neither kept nor fetched" in said), (
                    path,
                    said,
                )
        assert upstream.asked == []


@pytest.mark.parametrize("url", ["https://example.org/x.png", "HTTP://example.org/x.png", DATA])
async def test_urls_of_the_web_and_data_are_passed_on(url: str) -> None:
    upstream = Upstream(GOOD)
    async with gateway_before(upstream, kind="openai") as world:
        for path, body in naming(url):
            status, answer = await asked(world.url, path, {"model": "policy", **body})
            assert status == 200, (path, body, answer)
    assert len(upstream.asked) == len(naming(url))
    assert all(url in str(each["messages"]) for each in upstream.asked)


async def test_what_calls_itself_a_searchs_result_names_no_images_either() -> None:
    url = "file:///etc/passwd"
    shown = {"type": "image_url", "image_url": {"url": url}}
    path, body = chat(shown)
    body["messages"][0]["type"] = "web_search_result"
    hidden = [
        (path, body),
        chat({"type": "web_search_result", "image_url": url, "uuid": "1"}),
        chat({"type": "image_url", "image_url": {"type": "web_search_result", "url": url}}),
        chat({"type": "web_search_tool_result", "content": [shown]}),
    ]
    quoted = chat({"type": "web_search_result", "url": "example.org/a", "title": "a"})
    upstream = Upstream(GOOD)
    async with gateway_before(upstream) as world:
        for path, body in hidden:
            status, answer = await asked(world.url, path, {"model": "policy", **body})
            assert status == 400 and url in answer["error"]["message"], body
        assert upstream.asked == []
        path, body = quoted
        assert (await asked(world.url, path, {"model": "policy", **body}))[0] == 200


async def test_what_a_tool_is_given_and_ids_of_files_are_no_urls_of_ours() -> None:
    hosted = Hosted()
    opened = {
        "type": "tool_use",
        "id": "c",
        "name": "open",
        "input": {"url": "file:///work/index.html"},
    }
    said = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": "a page"}],
    }
    turns = [
        {"role": "user", "content": "open it"},
        {"role": "assistant", "content": [opened]},
        said,
    ]
    async with before(hosted, kind="anthropic") as world:
        body = {"model": "hosted", "max_tokens": 5, "messages": turns}
        assert (await asked(world.url, "v1/messages", body))[0] == 200
        source = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
        path, body = messages(source)
        assert (await asked(world.url, path, {"model": "hosted", **body}))[0] == 200
    assert len(hosted.asked) == 2


@pytest.mark.parametrize("url", FORBIDDEN)
async def test_requests_that_are_passed_through_are_held_to_the_same(url: str) -> None:
    hosted = Hosted()
    async with before(hosted) as world:
        passed = [
            *(
                responses({"type": "input_image", "image_url": url}),
                output({"type": "input_image", "image_url": url}),
            ),
            responses({"type": "input_file", "file_url": url}),
            (
                "v1/embeddings",
                {"messages": chat({"type": "image_url", "image_url": {"url": url}})[1]["messages"]},
            ),
        ]
        for path, body in passed:
            status, answer = await asked(world.url, path, {"model": "hosted", **body})
            assert status == 400 and url in answer["error"]["message"], (path, answer)
    async with before(hosted, kind="anthropic") as world:
        for make in (messages, result):
            for kind in ("image", "document"):
                path, body = make({"type": kind, "source": {"type": "url", "url": url}})
                status, answer = await asked(world.url, path, {"model": "hosted", **body})
                assert status == 400 and url in answer["error"]["message"], (path, answer)
    assert hosted.asked == []
