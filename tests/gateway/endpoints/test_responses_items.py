"""What an agent may send to the responses endpoint: the messages it stands for, and what is
refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Finished
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.request import CallRefused
from tests.gateway.talker import SEARCH_TOOL

TOOL = {"type": "function", **SEARCH_TOOL["function"]}


def messages_read(given: Any, **fields: Any) -> list[dict[str, Any]]:
    return (
        Responses()
        .read(json.dumps({"model": "policy", "input": given, **fields}).encode())
        .messages
    )


def call(call_id: str, name: str = "f") -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool call as an item, and in a message."""
    item = {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": "{}",
        "id": f"fc_{call_id}",
    }
    return item, {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def thought(text: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


A, A_CALL = call("a")
B, B_CALL = call("b")
RESULT_OF_A = {"type": "function_call_output", "call_id": "a", "output": "done"}
TOOL_MESSAGE = {"role": "tool", "tool_call_id": "a", "content": "done"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}


CUSTOM_RESULT = {**RESULT_OF_A, "type": "custom_tool_call_output"}
SHELL_RESULT = {"type": "local_shell_call_output", "id": "a", "output": "done"}
D = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}}
FILE = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aMOp"}
READ = [{"type": "text", "text": one} for one in ("hé", "!")]


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "input_text", "text": one} for one in texts]


def assistant(content: str | None = None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": [*calls]} if calls else {}),
        **more,
    }


SEEN = [
    {"type": "text", "text": "see"},
    {"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": "low"}},
]


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (
            [{"type": "message", "role": "user", "content": text("hi")}],
            [{"role": "user", "content": "hi"}],
        ),
        ([{"role": "user", "content": [*text("see"), IMAGE]}], [{"role": "user", "content": SEEN}]),
        ([said("x"), said("y")], [assistant("x"), assistant("y")]),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [assistant("no")],
        ),
        ([said("x"), A, B], [assistant("x", A_CALL, B_CALL)]),
        (
            [A, RESULT_OF_A, said("x"), B],
            [assistant(None, A_CALL), TOOL_MESSAGE, assistant("x", B_CALL)],
        ),
        ([said("x"), {"type": "reasoning", "id": "r", "summary": []}, A], [assistant("x", A_CALL)]),
        ([thought("hm"), said("x"), A], [assistant("x", A_CALL, reasoning_content="hm")]),
        (
            [said("x"), thought("hm"), A],
            [assistant("x"), assistant(None, A_CALL, reasoning_content="hm")],
        ),
        ([D, said("x")], [assistant("x")]),
        (
            [
                {"type": "custom_tool_call", "call_id": "a", "name": "p", "input": "X"},
                CUSTOM_RESULT,
            ],
            [assistant(None, called("p", '{"input":"X"}')), TOOL_MESSAGE],
        ),
        (
            [
                {
                    "type": "local_shell_call",
                    "call_id": "a",
                    "action": {"command": ["ls"], "env": None},
                },
                SHELL_RESULT,
            ],
            [assistant(None, called("local_shell", '{"command":["ls"]}')), TOOL_MESSAGE],
        ),
        (
            [{"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "done"}]}],
            [{**TOOL_MESSAGE, "content": '[{"stdout":"done"}]'}],
        ),
        ([{"type": "apply_patch_call_output", "call_id": "a", "status": "done"}], [TOOL_MESSAGE]),
        (
            [{"role": "user", "content": [FILE, {"type": "tomorrows", "text": "!"}]}],
            [{"role": "user", "content": READ}],
        ),
        (
            [{**RESULT_OF_A, "output": text("1", "2")}],
            [{**TOOL_MESSAGE, "content": [{"type": "text", "text": one} for one in "12"]}],
        ),
    ],
)
def test_items_are_read_as_messages(given: Any, messages: list[dict[str, Any]]) -> None:
    assert messages_read(given) == messages


@pytest.mark.parametrize("item", [said("x" * 1000), thought("x" * 1000)])
def test_a_turn_of_very_many_items_is_one_message(item: Any) -> None:
    (message,) = messages_read(
        [*[item] * 40_000, A] if item["type"] == "reasoning" else [A, *[item] * 40_000]
    )
    assert len(message["content"] or message["reasoning_content"]) == 40_000_000


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "empty"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input[0]",
            "send the messages",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]", "call_id"),
        (
            {"input": [said("x"), {"role": "user", "content": [{"type": "input_file"}]}]},
            "input[1].content[0]",
            "text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "image_url",
        ),
        ({"tools": [TOOL, {"type": "file_search"}]}, "tools[1]", "file_search"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, {"type": "mcp"}]}]},
            "tools[0].tools[1]",
            "mcp",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
        ({"background": True}, "background", "OpenAI's own API"),
        ({"messages": []}, "messages", "another name"),
        ({"stop": ["x"] * 101}, "stop", "length <= 100"),
        ({"tools": [TOOL] * 10_001}, "tools", "length <= 10000"),
        ({"input": [said("x")] * 100_001}, "input", "length <= 100000"),
        ({f"x{number}": 1 for number in range(1000)}, None, "length <= 1000"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str | None, says: str
) -> None:
    with pytest.raises(CallRefused, match=says) as caught:
        Responses().read(json.dumps({"model": "policy", "input": "hi", **fields}).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_tools_of_namespaces_become_functions() -> None:
    files = {"type": "namespace", "name": "files", "description": "", "tools": [TOOL]}
    items = [{**A, "namespace": "files"}, RESULT_OF_A]
    asked = {
        "model": "policy",
        "input": items,
        "tools": [TOOL, files, {"type": "web_search"}],
        "client_metadata": {},
    }
    read = Responses().read(json.dumps(asked).encode())
    assert [tool["function"]["name"] for tool in read.tools] == ["search", "files__search"]
    assert read.dropped == ("tools.web_search",)
    assert read.messages[0]["tool_calls"][0]["function"] == {"name": "files__f", "arguments": "{}"}
    assert read.messages[1] == TOOL_MESSAGE


def test_tools_among_the_items_are_offered_and_one_offered_again_is_there_once() -> None:
    later = {**TOOL, "description": "later"}
    functions = {"type": "namespace", "name": "functions", "tools": [later]}
    items = [
        {
            "type": "additional_tools",
            "id": "at_1",
            "role": "developer",
            "tools": [functions, later],
        },
        *text("x"),
    ]
    items[1] = {"role": "user", "content": "hi"}
    clash = {**TOOL, "name": "functions__search"}
    asked = {"model": "policy", "input": items, "tools": [TOOL, clash]}
    read = Responses().read(json.dumps(asked).encode())
    offered = [(tool["function"]["name"], tool["function"]["description"]) for tool in read.tools]
    assert offered == [
        ("search", "later"),
        ("functions__search", TOOL["description"]),
        ("functions__search_2", "later"),
    ]
    assert read.original.tools["functions__search_2"] == ("search", "functions", False)


def test_allowed_tools_are_the_ones_that_are_offered() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "search"}],
    }
    asked = {
        "model": "policy",
        "input": "hi",
        "tools": [TOOL, {**TOOL, "name": "other"}],
        "tool_choice": allowed,
    }
    read = Responses().read(json.dumps(asked).encode())
    assert [tool["function"]["name"] for tool in read.tools] == [
        "search"
    ] and read.tool_choice == "required"


PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}


@pytest.mark.parametrize(
    ("tool", "arguments", "own"),
    [
        (
            "files__search",
            "{}",
            {"type": "function_call", "name": "search", "namespace": "files", "arguments": "{}"},
        ),
        ("other", "{}", {"type": "function_call", "name": "other", "arguments": "{}"}),
        (
            "patch",
            '{"input": "a\\n"}',
            {"type": "custom_tool_call", "name": "patch", "input": "a\n"},
        ),
        (
            "files__patch",
            '{"input": 1}',
            {"type": "custom_tool_call", "namespace": "files", "input": '{"input": 1}'},
        ),
    ],
)
def test_calls_have_the_agents_own_names_and_forms(
    tool: str, arguments: str, own: dict[str, str]
) -> None:
    offered = [PATCH, {"type": "namespace", "name": "files", "tools": [TOOL, PATCH]}]
    read = Responses().read(
        json.dumps({"model": "policy", "input": "hi", "tools": offered}).encode()
    )
    assert "start: X" in read.tools[0]["function"]["description"]
    parts = [
        {"id": "c", "function": {"name": tool, "arguments": "{"}},
        {"function": {"arguments": arguments[1:]}},
    ]
    events = [Delta(0, {"tool_calls": [{"index": 0, **part}]}) for part in parts]
    answer = Answer(1, "resp_1", "policy")
    writer = Responses().writer(read, answer)
    sent = b"".join(writer.delta(event) for event in events)
    for event in (*events, Finished(0, "tool_calls")):
        answer.add(event)
    sent += writer.end()
    whole = json.loads(Responses().writer(read, answer).whole())
    assert whole["output"][0].items() >= {"call_id": "c", **own}.items()
    streamed = [
        json.loads(line[6:]) for line in sent.decode().split("\n") if line.startswith("data: ")
    ]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    if own["type"] == "custom_tool_call":
        pieces = [
            event["delta"]
            for event in streamed
            if event["type"] == "response.custom_tool_call_input.delta"
        ]
        assert "".join(pieces) == own["input"]
