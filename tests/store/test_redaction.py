"""What is written of a span: never a secret, its content only if that is wanted, and what the
user's hook leaves."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.arrays import plain
from agentlightning.errors import InvalidError
from agentlightning.semconv import REDACTED
from agentlightning.store import keys
from agentlightning.store.redaction import (
    is_credential,
    metadata_without_secrets,
    redaction,
    settings_without_secrets,
    text_without_secrets,
    without_secrets,
)
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    Attempt,
    Rollout,
    SampledChoice,
    Span,
    SpanEvent,
    SpanLink,
    SpanStatus,
    TokenCapture,
)

pytestmark = pytest.mark.anyio

ATTEMPT_KEY = keys.sign(b"s" * 32, "ro-5f0c5f0c5f0c5f0c", "at-5f0c5f0c5f0c5f0c")
ISSUED_KEY = "aglk-h3Yp0q9Vb_1-K2mZr7T5wXcDfGhJkLnPqRsTuVwXyZ0"
OPENAI_KEY = "sk-proj-h3Yp0q9Vb1K2mZr7T5wXcDfG"
TOKENS = TokenCapture(
    prompt_token_ids=(1, 2),
    choices=(SampledChoice(token_ids=(3,), logprobs=(-0.5,), finish_reason="stop"),),
)


def span_of(*, rollout_id: str = "ro-1", attempt_id: str = "at-1", **fields) -> Span:
    ids = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "trace_id": "t",
        "span_id": "s",
        "sequence_id": 1,
    }
    return Span(**{**ids, "name": "n", "start_time": 1.0, "end_time": 2.0, **fields})


CREDENTIALS = [
    "authorization",
    "Authorization",
    "http.request.header.authorization",
    "http.request.header.proxy-authorization",
    "http.response.header.set-cookie",
    "http.request.header.cookie.0",
    "x-api-key",
    "api_key",
    "apiKey",
    "OPENAI_API_KEY",
    "config.db_password",
    "client_secret",
    "aws_secret_access_key",
    "oauth.access_token",
    "refreshToken",
]
OTHERS = [
    "gen_ai.usage.input_tokens",
    "gen_ai.token.type",
    "token",
    "next_token",
    "agentlightning.call.time_to_first_token",
    "agentlightning.call.spliced_tokens",
    "authorization.scheme",
    "keyboard",
    "api_key.count",
    "primary_key",
    "password_strength",
]


@pytest.mark.parametrize("name", CREDENTIALS)
def test_what_is_called_a_credential_is_one(name):
    assert is_credential(name)
    assert without_secrets(span_of(attributes={name: "hunter2"})).attributes == {name: REDACTED}
    assert without_secrets(span_of(resource={name: ["a", "b"]})).resource == {name: REDACTED}


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_not(name):
    assert not is_credential(name)
    assert without_secrets(span_of(attributes={"uses.api_key": True})).attributes == {
        "uses.api_key": True
    }


SECRETS = [
    (ATTEMPT_KEY, REDACTED),
    (ISSUED_KEY, REDACTED),
    (keys.sign_worker(b"s" * 32, "w"), REDACTED),
    (OPENAI_KEY, REDACTED),
    ("sk-ant-api03-h3Yp0q9Vb-1K2mZr7T5wXcDfG", REDACTED),
    ("sk_live_h3Yp0q9Vb1K2mZr7T5wX", REDACTED),
    ("ghp_h3Yp0q9Vb1K2mZr7T5wXcDfGhJkLnPqRsTuV", REDACTED),
    ("github_pat_h3Yp0q9Vb1K2mZr7T5wXcDfGhJkLnPqRsTuV", REDACTED),
    ("glpat-h3Yp0q9Vb1K2mZr7T5wX", REDACTED),
    ("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", REDACTED),
    ("AKIAIOSFODNN7EXAMPLE", REDACTED),
    ("Bearer 8kd0f7g6s5", f"Bearer {REDACTED}"),
    ("authorization: bearer abcdefghijklmnopqrstuvwxyz", f"authorization: bearer {REDACTED}"),
    (
        "GET /\r\nAuthorization: Bearer correct-horse\r\n",
        f"GET /\r\nAuthorization: Bearer {REDACTED}\r\n",
    ),
    ("curl -H 'Authorization: Token letmein-please'", f"curl -H 'Authorization: Token {REDACTED}'"),
    ("Basic dXNlcjpwYXNzd29yZA==", f"Basic {REDACTED}"),
    ("postgresql://agl:hunter2@db:5432/agl", f"postgresql://agl:{REDACTED}@db:5432/agl"),
    ('{"api_key": "hunter2", "n": 1}', f'{{"api_key": "{REDACTED}", "n": 1}}'),
    ('{"a":{"x-api-key":"hunt\\"er\\\\"},"n":1}', f'{{"a":{{"x-api-key":"{REDACTED}"}},"n":1}}'),
    ('{"Authorization": ["hunter2"]}', f'{{"Authorization": ["{REDACTED}"]}}'),
    ('{"set-cookie": ["a=1", "b=2"], "n": 1}', f'{{"set-cookie": ["{REDACTED}"], "n": 1}}'),
    ("""{'password': "it's", 'n': 1}""", f"""{{'password': "{REDACTED}", 'n': 1}}"""),
    (
        "KeyError: {'password': 'hunter2', 'user': 'me'}",
        f"KeyError: {{'password': '{REDACTED}', 'user': 'me'}}",
    ),
    ('cut off: {"password": "hunt', f'cut off: {{"password": "{REDACTED}'),
]


@pytest.mark.parametrize(("secret", "left"), SECRETS, ids=[secret[:16] for secret, _ in SECRETS])
def test_a_key_in_a_text_is_taken_out_wherever_the_text_is(secret, left):
    before, after = f"Ö [{secret}]", f"Ö [{left}]"
    if secret.startswith("cut"):
        before, after = secret, left
    attributes = {"a": before, "b": ["x", before], "n": 1}
    cleaned = {"a": after, "b": ["x", after], "n": 1}
    span = span_of(
        name=before,
        attributes=attributes,
        resource=attributes,
        status=SpanStatus(status_code="ERROR", description=before),
        events=(
            SpanEvent(
                name="exception", attributes={semconv.EXCEPTION_MESSAGE: before}, timestamp=1.5
            ),
        ),
        links=(SpanLink(trace_id="t", span_id="u", attributes={"a": before}),),
        tokens=TOKENS,
    )
    for one in (
        span,
        *(
            span_of(**{part: getattr(span, part)})
            for part in ("name", "attributes", "status", "events")
        ),
    ):
        expected = json.loads(msgspec.json.encode(one, enc_hook=plain))
        text = json.dumps(expected).replace(json.dumps(before)[1:-1], json.dumps(after)[1:-1])
        assert json.loads(msgspec.json.encode(without_secrets(one), enc_hook=plain)) == json.loads(
            text
        )
    assert cleaned == without_secrets(span).attributes


@pytest.mark.parametrize(
    "text",
    [
        "pip install sk-learn; sk-estimators-version-2 and task-2024-10-31-run-0007",
        "Bearer of bad news, and the bearer authentication scheme",
        "Basic understanding of Basic Instructions, basic architecture",
        "the agl-store-writer thread; agl- and aglk- begin our keys",
        "AKIA is a prefix, MAKIAIOSFODNN7EXAMPLEX is not",
        "write to me@example.com or see https://example.com:8000/a@b",
        '{"role": "user", "content": "what is an api_key? what is a \\"password\\": anything?"}',
        '{"max_tokens": 100, "token": "Hello", "primary_key": "id"}',
        "SECRET agents, a cookie recipe, the key: C major",
        "",
    ],
)
def test_harmless_text_stays(text):
    assert text_without_secrets(text) == text
    span = span_of(attributes={"a": text}, tokens=TOKENS)
    assert redaction()(span) == span


values = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(password=values, other=values, depth=st.integers(0, 2), ascii_only=st.booleans())
def test_json_within_json_stays_json_and_loses_only_the_secret(password, other, depth, ascii_only):
    def nested(secret: str) -> str:
        text = json.dumps(
            {"a": other, "config": {"db_password": secret, "z": [other]}}, ensure_ascii=ascii_only
        )
        for _ in range(depth):
            text = json.dumps([{"arguments": text, "a": other}], ensure_ascii=ascii_only)
        return text

    assert text_without_secrets(nested(password)) == text_without_secrets(nested(REDACTED))
    if text_without_secrets(other) == other and '"' not in other and "'" not in other:
        assert text_without_secrets(nested(password)) == nested(REDACTED)


# What the patterns look for, and what they may run on through.
FRAGMENTS = [
    '"password":',
    "'cookie': '",
    '\\"api_key\\": \\"',
    '"secret": ["',
    "password",
    '"',
    "'",
    "\\",
    '\\"',
    " ",
    "\n",
    ":",
    "[",
    ",",
    "bearer ",
    "Authorization: Basic ",
    "basic ",
    "sk-",
    "agl-aaaaaaaa.",
    "agl-",
    "aglk-",
    "glpat-",
    "hf_",
    "ghp_",
    "github_pat_",
    "sk_live_",
    "AKIA",
    ";base64,",
    "://",
    "://a:",
    "@",
    "a",
    "1",
    "=",
    "cookie.1",
    ".1",
]


def cost(text: str) -> float:
    """Seconds of this thread that it takes to clean a text, and a span with an attribute of that
    name."""
    costs = []
    for _ in range(3):
        begin = time.thread_time()
        text_without_secrets(text)
        without_secrets(span_of(attributes={text: '"password"'}))
        costs.append(time.thread_time() - begin)
    return min(costs)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=2),
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=3),
)
def test_a_text_of_repeated_fragments_takes_time_in_proportion(start, unit):
    repeated = "".join(unit)
    short, long = ("".join(start) + repeated * (size // len(repeated)) for size in (2**12, 2**14))
    assert cost(long) < 10 * cost(short) + 0.002


async def test_others_are_served_while_a_long_span_is_cleaned():
    store = await SqlStore.open(":memory:")
    leased = await store.start_rollout(1)
    ids = {"rollout_id": leased.rollout_id, "attempt_id": leased.attempt.attempt_id}
    span = span_of(**ids, attributes={"text": '{"api_key": "x"} ' * 40_000})
    adding = asyncio.create_task(store.add_span(span))
    served = 0
    while not adding.done():
        await asyncio.sleep(0)  # as one who serves others does
        served += 1
    assert served > 10
    (kept,) = await store.query_spans(leased.rollout_id)
    assert kept.attributes["text"] == f'{{"api_key": "{REDACTED}"}} ' * 40_000
    await store.close()


@pytest.mark.parametrize("place", ["before", "behind", "at its end", "no base64"])
def test_secrets_beside_an_image_are_found(place):
    secret = "Bearer 8kd0Aq3vX2mN7pR9tY1w"
    image = base64.b64encode(bytes(range(256)) * 40).decode()
    text = {
        "before": f"{secret} data:image/png;base64,{image}",
        "behind": f'data:image/png;base64,{image}" {secret}',
        "at its end": f'"data:image/png;base64,{image}password": "{secret}"',
        "no base64": f"data:image/png;base64,{image[:5000]} {secret} {image[5000:]}",
    }[place]
    (kept,) = [redaction()(span_of(attributes={"text": text}))]
    assert kept is not None and secret.split()[1] not in str(kept) and image[:5000] in str(kept)


async def test_secrets_reach_the_store_on_no_way(store, caplog):
    caplog.set_level(logging.INFO, "agentlightning.audit")
    leased = await store.start_rollout({"api_key": "the user's own input stays"})
    ids = {"rollout_id": leased.rollout_id, "attempt_id": leased.attempt.attempt_id}
    await store.add_span(span_of(**ids, attributes={"authorization": "x", "text": OPENAI_KEY}))
    elsewhere = Rollout(
        rollout_id="ro-e", input=1, start_time=1.0, end_time=2.0, status="succeeded"
    )
    attempt = Attempt(
        rollout_id="ro-e", attempt_id="at-e", sequence_id=1, start_time=1.0, status="succeeded"
    )
    secret = span_of(
        rollout_id="ro-e", attempt_id="at-e", attributes={"authorization": "x", "text": OPENAI_KEY}
    )
    await store.import_rollout(rollout=elsewhere, attempts=[attempt], spans=[secret])
    for rollout_id in (leased.rollout_id, "ro-e"):
        (kept,) = await store.query_spans(rollout_id)
        assert kept.attributes == {"authorization": REDACTED, "text": REDACTED}
    assert (await store.get_rollout_by_id(leased.rollout_id)).input == {
        "api_key": "the user's own input stays"
    }
    assert OPENAI_KEY not in caplog.text


CONTENT = {
    semconv.GEN_AI_INPUT_MESSAGES: "[]",
    semconv.GEN_AI_OUTPUT_MESSAGES: "[]",
    semconv.GEN_AI_TOOL_DEFINITIONS: "[]",
    semconv.CALL_OVERRIDDEN: '{"stop": "the answer"}',
    semconv.OPERATION_INPUT: "{}",
    semconv.OPERATION_OUTPUT: "{}",
    f"{semconv.OPERATION_INPUT}.account": 4711,
    f"{semconv.OPERATION_OUTPUT}.Ada.paid": True,
    semconv.OBJECT_JSON: "{}",
    semconv.MESSAGE_BODY: "hello",
    semconv.EXCEPTION_MESSAGE: "no such user: Ada",
    semconv.EXCEPTION_STACKTRACE: "Traceback",
    "gen_ai.system_instructions": "be kind",
    "llm.prompts": ["hello"],
    "input.value": "hello",
    "anything.new": "hello",
}
FACTS = {
    semconv.GEN_AI_OPERATION: "chat",
    semconv.GEN_AI_REQUEST_MODEL: "policy",
    semconv.GEN_AI_FINISH_REASONS: ["stop"],
    semconv.GEN_AI_INPUT_TOKENS: 2,
    semconv.GEN_AI_AGENT_NAME: "planner",
    semconv.CALL_SAMPLING: '{"temperature": 0.7}',
    semconv.CALL_FLAG: "call failed",
    semconv.CALL_TRAINABLE: True,
    semconv.OPERATION_NAME: "search",
    semconv.EXCEPTION_TYPE: "KeyError",
    semconv.reward_name(0): "primary",
    semconv.reward_value(0): 0.3,
    "gen_ai.tool.name": "search",
    "service.name": "travel",
}


def talking(**more) -> Span:
    return span_of(
        attributes={**CONTENT, **FACTS, **more},
        resource={"service.name": "travel", "process.command_line": "agent --city Köln"},
        status=SpanStatus(status_code="ERROR", description="no such user: Ada"),
        events=(
            SpanEvent(
                name="exception", attributes={**CONTENT, semconv.EXCEPTION_TYPE: "E"}, timestamp=1.5
            ),
        ),
        tokens=TOKENS,
    )


def test_capture_of_tokens_keeps_facts_and_tokens_and_no_content():
    kept = redaction("tokens")(talking(**{"token.ids": [1, 2]}))
    assert kept == span_of(
        attributes={**FACTS, "token.ids": [1, 2]},
        resource={"service.name": "travel"},
        status=SpanStatus(status_code="ERROR"),
        events=(
            SpanEvent(name="exception", attributes={semconv.EXCEPTION_TYPE: "E"}, timestamp=1.5),
        ),
        tokens=TOKENS,
    )
    off = redaction("off")(talking(**{"token.ids": [1, 2]}))
    assert off is not None and (off.attributes, off.tokens) == (FACTS, None)


def test_secrets_are_removed_from_what_is_kept_of_content():
    span = span_of(name=f"GET {OPENAI_KEY}", attributes={"gen_ai.tool.name": OPENAI_KEY})
    for capture in ("full", "tokens", "off"):
        kept = redaction(capture)(span)
        assert (kept.name, kept.attributes) == (f"GET {REDACTED}", {"gen_ai.tool.name": REDACTED})


def without_ada(span: Span) -> Span | None:
    if span.name == "private":
        return None
    attributes = {name: str(value).replace("Ada", "A.") for name, value in span.attributes.items()}
    return msgspec.structs.replace(span, attributes=attributes)


async def started(hook) -> tuple[SqlStore, dict[str, str]]:
    store = await SqlStore.open(":memory:", redact=redaction("full", hook))
    leased = await store.start_rollout(1)
    return store, {"rollout_id": leased.rollout_id, "attempt_id": leased.attempt.attempt_id}


async def test_the_hook_comes_last_and_may_drop_a_span():
    store, ids = await started(without_ada)
    first = span_of(**ids, attributes={"who": f"Ada {OPENAI_KEY}"})
    second = span_of(**ids, span_id="p", name="private", sequence_id=2)
    await store.add_many_spans([first, second])
    (kept,) = await store.query_spans(ids["rollout_id"])
    assert kept.attributes == {"who": f"A. {REDACTED}"}
    await store.close()


def failing(span: Span) -> Span:
    raise KeyError(span.span_id)


def renaming(span: Span) -> Span:
    return msgspec.structs.replace(span, rollout_id="another")


def forgetful(span: Span):
    return span.attributes


@pytest.mark.parametrize(
    ("hook", "fault"), [(failing, "KeyError"), (renaming, "rollout_id"), (forgetful, "dict")]
)
async def test_nothing_is_written_if_the_hook_fails(hook, fault):
    def careful(span: Span):
        return span if span.span_id == "s" else hook(span)

    careful.__qualname__ = hook.__qualname__
    store, ids = await started(careful)
    with pytest.raises(InvalidError, match=rf"hook {hook.__name__} .*{fault}"):
        await store.add_many_spans([span_of(**ids), span_of(**ids, span_id="2", sequence_id=2)])
    assert await store.query_spans(ids["rollout_id"]) == []
    await store.close()


PIECES = st.sampled_from(
    [
        OPENAI_KEY,
        ISSUED_KEY,
        '"password": "p"',
        "Authorization: Basic dTpw",
        "https://u:p@h/x",
        "a word",
        "\\",
        '"',
        "[]",
    ]
)
TURNS = st.lists(
    st.tuples(st.sampled_from(["at-1", "at-2"]), st.booleans(), PIECES), min_size=1, max_size=12
)


@given(turns=TURNS)
def test_a_conversation_is_cleaned_as_if_each_call_came_first(
    turns: list[tuple[str, bool, str]],
) -> None:
    redact = redaction()
    history: dict[str, list[dict[str, str]]] = {}
    for attempt_id, again, text in turns:
        if again:  # another conversation of the attempt
            history.pop(attempt_id, None)
        messages = history.setdefault(attempt_id, [{"role": "system", "content": "x" * 2500}])
        messages.append({"role": "user", "content": text})
        called = span_of(
            attempt_id=attempt_id,
            attributes={
                semconv.CALL_ENDPOINT: "chat/completions",
                semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            },
        )
        assert redact(called) == without_secrets(called)


@given(text=st.lists(PIECES, min_size=1, max_size=2).map(",".join))
@example(text="https://u:p,q@h/x")
def test_a_secret_that_the_next_call_ends_is_found(text: str) -> None:
    for cut in range(len(text)):
        redact = redaction()
        for messages in ("x" * 2500 + text[:cut] + "]", "x" * 2500 + text):  # JSON or not
            attributes = {
                semconv.CALL_ENDPOINT: "chat/completions",
                semconv.GEN_AI_INPUT_MESSAGES: messages,
            }
            called = span_of(attributes=attributes)
            assert redact(called) == without_secrets(called)


async def test_the_users_hook_sees_why_an_attempt_ended_and_its_failure_ends_it_all_the_same():
    seen = []

    def hook(span: Span) -> Span | None:
        message = str(span.attributes[semconv.EXCEPTION_MESSAGE])
        seen.append((span.name, span.attributes[semconv.EXCEPTION_TYPE], message))
        if "drop" in message:
            return None
        if "fail" in message:
            raise KeyError(message)
        attributes = {
            **span.attributes,
            semconv.EXCEPTION_MESSAGE: message.replace("Ada", "[name]"),
        }
        return msgspec.structs.replace(span, attributes=attributes)

    store = await SqlStore.open(":memory:", redact=redaction(hook=hook))
    try:
        reasons = (
            "ValueError: Ada has no bed",
            "ValueError: drop this",
            "ValueError: fail",
            "drop",
            "hunter2 failed",
        )
        for reason, left in zip(
            reasons,
            ("ValueError: [name] has no bed", "ValueError", "ValueError", "failed", "failed"),
            strict=True,
        ):
            begun = await store.start_rollout("task")
            ids = begun.rollout_id, begun.attempt.attempt_id
            await store.end_attempt(*ids, "failed", metadata={"reason": reason})
            ended = await store.get_latest_attempt(begun.rollout_id)
            assert ended is not None
            assert (ended.status, ended.metadata) == ("failed", {"reason": left})
    finally:
        await store.close()
    assert seen[0] == ("agentlightning.exception", "ValueError", "ValueError: Ada has no bed")
    assert {kind for _, kind, _ in seen[3:]} == {"failed"}


def test_what_a_reason_calls_its_type_is_no_secret_even_where_that_is_all_that_stays():
    def failing(span: Span) -> Span | None:
        raise KeyError

    key = "hf_" + "a1B2" * 10
    for redact in (redaction(), redaction("off"), redaction(hook=failing)):
        reason = {"reason": f"{key}: not accepted"}
        left = metadata_without_secrets(redact, ("r", "a"), "failed", reason)
        assert left["reason"].startswith(REDACTED), left


def test_settings_hold_no_password_of_a_url():
    command = ["agl", "train", "--store", "postgresql://me:geheim@db/agl", "--name", "a"]
    clean = ["agl", "train", "--store", f"postgresql://me:{REDACTED}@db/agl", "--name", "a"]
    assert settings_without_secrets({"command": command, "lr": 0.1}) == {
        "command": clean,
        "lr": 0.1,
    }
