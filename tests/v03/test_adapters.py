"""Agent Lightning 0.3's adapters on our spans give what 0.3 gave on its own.

`tests/oracles/adapters_0_3.json` is what 0.3.0 made of random traces: see
scripts/record_adapters_0_3.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import Attributes, SampledChoice, Span, TokenCapture
from tests.tracing.recorded import ALL, WITH_AGENTS, recorded

RECORDED: list[dict[str, Any]] = msgspec.json.decode(
    (Path(__file__).parents[1] / "oracles" / "adapters_0_3.json").read_bytes()
)
OPTIONS: dict[str, dict[str, Any]] = {
    "first_occurrence": {},
    "agent_match": {"agent_match": "^(re)?writer"},
}


def text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def span(
    span_id: str,
    name: str,
    start: float,
    end: float,
    attributes: Attributes,
    *,
    parent: str | None = None,
    number: int = 1,
) -> Span:
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=number,
        trace_id="5b" * 16,
        span_id=span_id,
        parent_id=parent,
        name=name,
        start_time=start,
        end_time=end,
        attributes=attributes,
    )


def call(span_id: str, index: int, start: float, end: float, **more: Any) -> Span:
    attributes: Attributes = {
        semconv.CALL_INDEX: index,
        semconv.CALL_ENDPOINT: "chat/completions",
        semconv.GEN_AI_REQUEST_MODEL: "policy",
        semconv.GEN_AI_RESPONSE_MODEL: "policy",
        semconv.GEN_AI_RESPONSE_ID: f"chatcmpl-{span_id}",
    }
    choice = SampledChoice(token_ids=(3, 4), logprobs=(-0.5, -0.25), finish_reason="stop")
    made = span(span_id, "chat policy", start, end, attributes | more.pop("attributes", {}), **more)
    return msgspec.structs.replace(
        made, tokens=TokenCapture(prompt_token_ids=(1, 2), choices=(choice,))
    )


def ours(rows: Sequence[list[Any]]) -> list[Span]:
    """The spans of a recorded trace as they are here; 0.3 had them in the order of their ends."""
    calls = sorted((row for row in rows if row[1] == "call"), key=lambda row: row[2])
    index = {row[0]: number for number, row in enumerate(calls)}
    spans: list[Span] = []
    for number, (span_id, kind, start, end, parent, more) in enumerate(rows):
        if kind == "call":
            spans.append(call(span_id, index[span_id], start, end, parent=parent, number=number))
            continue
        said: Attributes = {}
        if kind == "agent":
            said = {semconv.GEN_AI_OPERATION: "invoke_agent", semconv.GEN_AI_AGENT_NAME: more}
        elif kind in ("reward", "judged"):
            said = reward_attributes(more) | (
                {semconv.OPERATION_NAME: semconv.REWARD} if kind == "judged" else {}
            )
        name = {"reward": semconv.ANNOTATION, "judged": semconv.OPERATION}.get(kind, kind)
        spans.append(span(span_id, name, start, end, said, parent=parent, number=number))
    return spans


def response_id(triplet: agl.Triplet) -> str:
    return str(triplet.metadata["response_id"]).removeprefix("chatcmpl-")


@pytest.mark.parametrize("option", OPTIONS)
def test_agents_calls_and_their_rewards_are_those_that_0_3_found(option: str) -> None:
    compared = 0
    for trace in RECORDED:
        if option in trace:
            found = agl.TracerTraceToTriplet(**OPTIONS[option])(ours(trace["spans"]))
            told = [[response_id(one), one.metadata["agent_name"], one.reward] for one in found]
            assert sorted(told) == sorted(trace[option])
            compared += len(told)
    assert compared > 20


def test_the_proxys_adapter_goes_by_the_order_in_which_spans_were_stored() -> None:
    for trace in RECORDED:
        found = agl.LlmProxyTraceToTriplet().adapt(ours(trace["spans"]))
        assert [[response_id(one), one.reward] for one in found] == trace["proxy"]
        assert all(
            one.prompt == {"token_ids": [1, 2]} and one.response == {"token_ids": [3, 4]}
            for one in found
        )


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/oslo.png"}}
SENT = [
    {"role": "system", "content": "You are the planner."},
    {"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]},
]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
ASKED = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"to":"Oslo"}'},
}
ANSWER = {"role": "assistant", "content": None, "tool_calls": [ASKED]}
TALK: Attributes = {
    semconv.GEN_AI_INPUT_MESSAGES: text(SENT),
    semconv.GEN_AI_OUTPUT_MESSAGES: text([ANSWER]),
    semconv.GEN_AI_TOOL_DEFINITIONS: text([TOOL]),
}


def test_a_triplet_has_the_shape_of_0_3() -> None:
    rewarded = span("s2", semconv.ANNOTATION, 3.0, 3.0, reward_attributes(1.0))
    (triplet,) = agl.TracerTraceToTriplet().adapt(
        [rewarded, call("s1", 0, 1.0, 2.0, attributes=TALK)]
    )
    assert triplet == agl.Triplet(
        prompt={"token_ids": [1, 2], "raw_content": SENT},
        response={
            "token_ids": [3, 4],
            "raw_content": [ANSWER],
            "logprobs": [{"logprob": -0.5}, {"logprob": -0.25}],
        },
        reward=1.0,
        metadata={
            "request": {"model": "policy"},
            "response": {"model": "policy", "id": "chatcmpl-s1"},
            "response_id": "chatcmpl-s1",
            "agent_name": "planner",  # its role, where no framework names it
        },
    )


def test_of_several_attempts_the_last_is_adapted_and_what_must_not_train_is_left_out() -> None:
    failed = msgspec.structs.replace(call("s0", 0, 0.0, 0.5), attempt_id="earlier")
    flagged = call("s2", 1, 3.0, 4.0, attributes={semconv.CALL_FLAG: "call failed"})
    assert [
        response_id(one)
        for one in agl.TracerTraceToTriplet()([flagged, failed, call("s1", 0, 1.0, 2.0)])
    ] == ["s1"]
    assert (
        agl.TracerTraceToTriplet()([])
        == agl.LlmProxyTraceToTriplet()([])
        == agl.TraceToMessages()([])
        == []
    )
    with pytest.raises(InvalidError, match="of 2 rollouts"):
        agl.TracerTraceToTriplet()([failed, msgspec.structs.replace(failed, rollout_id="another")])


@pytest.mark.parametrize("framework", WITH_AGENTS)
def test_agents_of_real_frameworks_are_found(framework: str) -> None:
    found = agl.TracerTraceToTriplet(agent_match="^rewriter$")(recorded(framework))
    assert [one.metadata["agent_name"] for one in found] == ["rewriter"]


def test_messages_of_a_call_are_those_of_chat_completions_with_its_tools() -> None:
    # the second one's were not recorded
    spans = [call("s1", 0, 1.0, 2.0, attributes=TALK), call("s2", 1, 3.0, 4.0)]
    assert agl.TraceToMessages()(spans) == [{"messages": [*SENT, ANSWER], "tools": [TOOL]}]


def answer(conversation: dict[str, Any]) -> tuple[str, str | None, list[Any]]:
    """Who said what in the last message, and called what with which arguments."""
    last = conversation["messages"][-1]
    calls = [one["function"] for one in last.get("tool_calls", ())]
    called = [(one["name"], msgspec.json.decode(one["arguments"])) for one in calls]
    return last["role"], last["content"] or None, called


# reprs; one span for several calls; no messages
UNTOLD = ("openai-agents-v2", "google-adk", "llama-index")


@pytest.mark.parametrize("instrumentation", [one for one in ALL if one not in UNTOLD])
def test_messages_are_read_from_the_gateway_or_from_other_instrumentation_alone(
    instrumentation: str,
) -> None:
    spans = recorded(instrumentation)
    told = agl.TraceToMessages()(spans)
    assert len(told) == sum(one.tokens is not None for one in spans)
    foreign = agl.TraceToMessages()([one for one in spans if one.tokens is None])
    assert [answer(one) for one in foreign] == [answer(one) for one in told]


def test_adapters_of_ones_own_derive_from_the_same_bases() -> None:
    class Names(agl.TraceAdapter[list[str]]):  # type: ignore[name-defined, misc]
        def adapt(self, source: Sequence[Span], /) -> list[str]:
            return [one.name for one in source]

    assert Names()([call("s1", 0, 1.0, 2.0)]) == ["chat policy"]
    assert issubclass(agl.TracerTraceToTriplet, agl.TraceToTripletBase) and issubclass(
        agl.TraceAdapter, agl.Adapter
    )
    with pytest.raises(NotImplementedError, match="no method adapt"):
        agl.Adapter()(1)
    with pytest.raises(ConfigError, match="no regular expression"):
        agl.TracerTraceToTriplet(agent_match="(writer")
