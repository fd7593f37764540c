"""`agl import`: traces that other tools exported become rollouts, once, however often they are
imported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from agentlightning import semconv
from agentlightning.cli.main import run
from agentlightning.store.sql import SqlStore
from agentlightning.store.transfer import Record
from agentlightning.tracing.rewards import find_final_reward

TRACE = "5b8efff798038103d269b633813fc60c"


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue", bool: "boolValue"}
    return [
        {"key": name, "value": {kinds[type(value)]: value}} for name, value in attributes.items()
    ]


def span(number: int, parent: int | None = None, trace: str = TRACE, **more: Any) -> dict[str, Any]:
    """A span from second `number` on."""
    made = {
        "traceId": trace,
        "spanId": f"{number:016x}",
        "name": "step",
        "startTimeUnixNano": str(number * 10**9),
        "endTimeUnixNano": str((number + 1) * 10**9),
        "attributes": pairs(more.pop("attributes", {})),
    }
    return made | ({"parentSpanId": f"{parent:016x}"} if parent else {}) | more


def request(*spans: dict[str, Any], **resource: Any) -> dict[str, Any]:
    scopes = [{"scope": {"name": "tool"}, "spans": list(spans)}]
    return {"resourceSpans": [{"resource": {"attributes": pairs(resource)}, "scopeSpans": scopes}]}


LLM = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "gpt-5",
    "llm.token_count.prompt": 7,
    "llm.token_count.completion": 2,
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "Fly me",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Done",
}
ROOT = {"input.value": '{"question": "Fly me"}', "output.value": "Done"}
WHOLE = request(span(1, attributes=ROOT), span(2, parent=1, attributes=LLM))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *documents: Any) -> str:
    Path(name).write_text("\n".join(json.dumps(document) for document in documents))
    return name


def stored() -> list[Record]:
    async def work() -> list[Record]:
        store = await SqlStore.open("agentlightning.sqlite")
        found = [
            Record(
                rollout=rollout,
                attempts=await store.query_attempts(one),
                spans=await store.query_spans(one),
            )
            for one, rollout in [(each.rollout_id, each) for each in await store.query_rollouts()]
        ]
        await store.close()
        return found

    return asyncio.run(work())


def test_a_trace_becomes_a_rollout_with_its_input_its_calls_and_its_times() -> None:
    assert run(["import", write("a.json", WHOLE)]) == 0
    (record,) = stored()
    rollout, (attempt,), (root, call) = record.rollout, record.attempts, record.spans
    assert rollout.rollout_id == f"trace-{TRACE}" and rollout.input == {"question": "Fly me"}
    assert (rollout.status, rollout.mode, attempt.status) == ("succeeded", "train", "succeeded")
    assert (rollout.start_time, rollout.end_time) == (1.0, 3.0)
    assert (root.sequence_id, call.sequence_id) == (1, 2) and call.parent_id == root.span_id
    assert json.loads(str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES])) == [
        {"role": "user", "content": "Fly me"}
    ]
    assert json.loads(str(call.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))[0]["content"] == "Done"
    assert call.attributes[semconv.GEN_AI_RESPONSE_MODEL] == "gpt-5"
    assert call.attributes[semconv.GEN_AI_INPUT_TOKENS] == 7
    assert call.attributes["llm.model_name"] == "gpt-5"  # what the tool wrote stays


def test_importing_twice_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    file = write("a.json", WHOLE)
    assert run(["import", file]) == 0
    before = stored()
    assert run(["import", file, "--mode", "val"]) == 0
    assert stored() == before
    assert "stored 0 rollouts with 0 spans; 1 stored already" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["list", "lines", "snake", "indented"])
def test_all_forms_of_a_file_are_read_alike(form: str) -> None:
    first, second = request(span(1, attributes=ROOT)), request(span(2, parent=1, attributes=LLM))
    if form == "list":
        file = write("a.json", [first, second])
    elif form == "lines":  # as the collector's file exporter writes it, other signals too
        file = write("a.jsonl", first, {"resourceMetrics": []}, second, {"resourceLogs": []})
    elif form == "snake":
        names = {
            "resourceSpans": "resource_spans",
            "scopeSpans": "scope_spans",
            "traceId": "trace_id",
            "spanId": "span_id",
            "parentSpanId": "parent_span_id",
            "startTimeUnixNano": "start_time_unix_nano",
            "endTimeUnixNano": "end_time_unix_nano",
            "stringValue": "string_value",
            "intValue": "int_value",
        }
        text = json.dumps(WHOLE)
        for camel, snake in names.items():
            text = text.replace(f'"{camel}"', f'"{snake}"')
        file = write("a.json", json.loads(text))
    else:
        file = "a.json"
        Path(file).write_text(json.dumps(WHOLE, indent=2))
    assert run(["import", file]) == 0
    (record,) = stored()
    assert len(record.spans) == 2 and record.spans[1].parent_id == record.spans[0].span_id


def test_the_status_is_the_roots() -> None:
    failed = span(1, status={"code": 2, "message": "no seats"})
    tool = span(4, parent=3, trace="b" * 32, status={"code": "STATUS_CODE_ERROR"})
    assert (
        run(["import", write("a.json", request(failed), request(span(3, trace="b" * 32), tool))])
        == 0
    )
    first, second = stored()
    assert (first.rollout.status, first.attempts[0].metadata) == ("failed", {"reason": "no seats"})
    assert second.rollout.status == "succeeded"


def test_traces_of_one_session_become_one_rollout() -> None:
    sessions = [
        request(span(1), **{"session.id": "s"}),
        request(span(2, trace="b" * 32, attributes={"session.id": "s"})),
        request(span(3, trace="c" * 32)),
    ]
    assert run(["import", write("a.jsonl", *sessions), "--by", "session.id"]) == 0
    assert [(len(one.spans), one.rollout.rollout_id[:7]) for one in stored()] == [
        (2, "session"),
        (1, "trace-c"),
    ]


# --- rewards --------------------------------------------------------------------------------------


def evaluated(name: str, score: Any) -> dict[str, Any]:
    attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score}
    return {
        "name": "gen_ai.evaluation.result",
        "timeUnixNano": "1",
        "attributes": pairs(attributes),
    }


@pytest.mark.parametrize(
    ("more", "options", "reward"),
    [
        ({"events": [evaluated("correct", 0.5)]}, [], 0.5),
        ({"attributes": {"gen_ai.evaluation.score.value": 0.25}}, [], 0.25),
        (
            {"events": [evaluated("correct", 0.5), evaluated("short", 1.0)]},
            ["--reward", "short"],
            1.0,
        ),
        ({"attributes": {"user.feedback": True}}, ["--reward", "user.feedback"], 1.0),
        ({"attributes": {"user.feedback": "0.5"}}, ["--reward", "user.feedback"], 0.5),
        (
            {"attributes": {semconv.reward_name(0): "primary", semconv.reward_value(0): 0.75}},
            [],
            0.75,
        ),
        ({}, [], None),
    ],
)
def test_the_reward_is_a_score_of_the_trace(
    more: Any, options: list[str], reward: float | None
) -> None:
    assert run(["import", write("a.json", request(span(1, **more))), *options]) == 0
    assert find_final_reward(stored()[0].spans) == reward


BROKEN = request(
    span(1), span(2, traceId="zz"), span(3, startTimeUnixNano="soon"), {"name": "no ids"}
)
SCORED = request(span(1, attributes={"score": 0.5, "feedback": "good", "session.id": "s"}))


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (SCORED, ["--reward", "skore"], "no span has a number as 'skore'; did you mean 'score'?"),
        (
            SCORED,
            ["--by", "sesion.id"],
            "no span has the attribute 'sesion.id'; did you mean 'session.id'?",
        ),
        (BROKEN, [], "a.json, line 2: "),
        ("hello", [], "a.json, line 1: JSON is malformed"),
        (
            '{\n"resourceSpans": [\n{oops}]}',
            [],
            "a.json, line 3: JSON is malformed: object keys must be strings (byte",
        ),
        ('{"spans": []}', [], "a.json: it has no field resourceSpans"),
        ('{"resourceSpans": [5, {"scopeSpans": "x"}]}', [], "a.json: "),
        ('[{"resourceSpans": [5, {"scopeSpans": "x"}]}]', [], "a.json, entry 1: "),
        ("", [], "a.json, line 1: "),
        ("\x00\udcff", [], "a.json, line 1: "),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_is_stored(
    text: Any, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is BROKEN:
        write("a.json", WHOLE, BROKEN)
    elif text is SCORED:
        write("a.json", SCORED)
    else:
        Path("a.json").write_bytes(text.encode(errors="surrogateescape"))
    assert run(["import", "a.json", *options]) == 1
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
    assert not Path("agentlightning.sqlite").exists()


# --- other tools ----------------------------------------------------------------------------------

SENT = [{"role": "user", "content": "Fly me"}]
DONE = {"role": "assistant", "content": "Done"}
USAGE = {"gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 2}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.response.model": "m", **USAGE}
TOOLS: dict[str, dict[str, Any]] = {
    "langfuse": {
        "langfuse.observation.type": "generation",
        "langfuse.observation.model.name": "m",
        "langfuse.observation.input": json.dumps({"messages": SENT}),
        "langfuse.observation.output": "Done",
        "langfuse.observation.usage_details": '{"input": 7, "output": 2}',
    },
    "vercel": {
        "ai.operationId": "ai.generateText.doGenerate",
        "ai.model.id": "m",
        "ai.prompt.messages": json.dumps(SENT),
        "ai.response.text": "Done",
        "ai.usage.promptTokens": 7,
        "ai.usage.completionTokens": 2,
    },
    "langsmith": {
        "langsmith.span.kind": "LLM",
        "gen_ai.request.model": "m",
        "gen_ai.prompt": json.dumps(
            {"messages": [[{"lc": 1, "kwargs": {"type": "human", "content": "Fly me"}}]]}
        ),
        "gen_ai.completion": json.dumps(
            {"generations": [[{"message": {"type": "ai", "content": "Done"}}]]}
        ),
        **USAGE,
    },
    "mlflow": {
        "mlflow.spanType": '"CHAT_MODEL"',
        "mlflow.spanInputs": json.dumps({"messages": SENT, "model": "m"}),
        "mlflow.spanOutputs": json.dumps({"choices": [{"message": DONE}]}),
        "mlflow.chat.tokenUsage": '{"input_tokens": 7, "output_tokens": 2}',
    },
    "logfire": {
        **CHAT,
        "events": json.dumps(
            [
                {"event.name": "gen_ai.user.message", **SENT[0]},
                {"event.name": "gen_ai.choice", "index": 0, "message": DONE},
            ]
        ),
    },
}
EVENTS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"name": "gen_ai.user.message", "attributes": pairs({"content": "Fly me"})},
        {"name": "gen_ai.choice", "attributes": pairs({"index": 0, "message": json.dumps(DONE)})},
    ],
    "details": [
        {
            "name": "gen_ai.client.inference.operation.details",
            "attributes": pairs(
                {
                    "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "Fly me"}]}]',
                    "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "Done"}]}]',
                }
            ),
        }
    ],
}


@pytest.mark.parametrize("tool", [*TOOLS, *EVENTS])
def test_traces_of_other_tools_have_task_messages_model_and_tokens(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = span(2, parent=1, attributes=TOOLS.get(tool, CHAT), events=EVENTS.get(tool, []))
    assert run(["import", write("a.json", request(span(1), call))]) == 0
    (record,) = stored()
    attributes = record.spans[1].attributes
    assert record.rollout.input == SENT
    assert json.loads(str(attributes[semconv.GEN_AI_INPUT_MESSAGES])) == SENT
    assert json.loads(str(attributes[semconv.GEN_AI_OUTPUT_MESSAGES])) == [DONE]
    assert attributes[semconv.GEN_AI_RESPONSE_MODEL] == "m"
    assert (attributes[semconv.GEN_AI_INPUT_TOKENS], attributes[semconv.GEN_AI_OUTPUT_TOKENS]) == (
        7,
        2,
    )
    assert "warning" not in capsys.readouterr().err


def test_a_trace_without_messages_is_named_with_what_it_has_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(
        "a.json", WHOLE, request(span(3, trace="b" * 32), span(4, parent=3, trace="b" * 32))
    )
    assert run(["import", file]) == 0
    told = capsys.readouterr().err
    assert "no span of 1 of 2 traces has messages" in told
    assert f"trace-{'b' * 32}" in told and "2 'step' of tool" in told


ROW = {
    "context.trace_id": "c" * 32,
    "context.span_id": "d" * 16,
    "parent_id": None,
    "name": "call",
    "start_time": "2026-01-01T00:00:01+00:00",
    "end_time": "2026-01-01T00:00:02+00:00",
    "status_code": "OK",
    "attributes.openinference.span.kind": "LLM",
    "attributes.llm.model_name": "m",
    "attributes.llm.input_messages": [{"message.role": "user", "message.content": "Fly me"}],
    "attributes.llm.output_messages": [
        {"message.role": "assistant", "message.content": "é" * 200_000}
    ],
}


@pytest.mark.parametrize("form", ["a.csv", "a.parquet", "a.jsonl", "a.json"])
def test_a_table_of_spans_is_read_in_every_format_of_tasks(form: str) -> None:
    frame = pandas.DataFrame([ROW])
    if form == "a.parquet":
        frame.to_parquet(form)
    elif form == "a.csv":
        texts = {
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in ROW.items()
        }
        pandas.DataFrame([texts]).to_csv(
            form, index=False, encoding="utf-16", lineterminator="\r\n"
        )
    else:
        Path(form).write_text(
            json.dumps(ROW if form == "a.jsonl" else [ROW]) + "\r\n", encoding="utf-8-sig"
        )
    assert run(["import", form]) == 0
    (record,) = stored()
    (call,) = record.spans
    assert (call.end_time - call.start_time, call.parent_id, call.status.status_code) == (
        1.0,
        None,
        "OK",
    )
    assert json.loads(str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES])) == SENT
    assert "é" * 200_000 in str(call.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])


def test_an_export_of_imported_calls_as_token_ids_says_why_there_are_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.json").write_text(json.dumps(WHOLE))
    assert run(["import", "a.json"]) == 0
    assert run(["export", "a.parquet", "--format", "parquet"]) == 1
    error = capsys.readouterr().err
    assert "calls the gateway did not record" in error and "without a call" not in error
    assert run(["export", "a.jsonl", "--format", "sft"]) == 0
    assert run(["export", "b.jsonl", "--format", "sft", "--mode", "test"]) == 1
    assert "--mode val" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_traces_are_read_in_every_encoding_that_says_what_it_is(encoding: str) -> None:
    Path("a.json").write_bytes(json.dumps(WHOLE).encode(encoding))
    assert run(["import", "a.json"]) == 0 and len(stored()) == 1


def test_ids_may_be_base64_as_in_json_of_protobuf() -> None:
    made = span(1, attributes=ROOT) | {
        "traceId": "q80BAgMEBQYHCAkKCwwNDg==",
        "spanId": "q80BAgMEBQY=",
    }
    assert run(["import", write("a.json", request(made))]) == 0
    assert stored()[0].spans[0].span_id == "abcd010203040506"
