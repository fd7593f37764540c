"""Part `store`: recorded rollouts → transitions → a packed batch, against the adapters of Agent
Lightning 0.3.

Each rollout has six calls, whose prompts grow from 1,750 tokens to 2,250, the five tools they asked
for, and a reward; its spans are what the gateway and a tracer record, messages included. The eight
rollouts of a group share their first prompt. Stages are timed in CPU seconds, threads of the store
included: `read` (spans from SQLite), `trace` (spans → transitions and reward), `credit` (GRPO,
level tree), `pack` (micro-batches). The floor is the same file with nothing done to it: columns
read, tokens viewed as arrays.

The adapters get the same rollouts as their own instrumentation would have recorded them, as spans
in memory; they are compared with `trace_rollout` of spans in memory. Everything runs on one core.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentlightning import semconv
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.rl.batch import make_batches
from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.call_filter import CallFilter
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.sequences import micro_batches
from agentlightning.data.transitions import trace_rollout
from agentlightning.learner.policy_config import AdamW
from agentlightning.store.sql import SqlStore
from agentlightning.types import EnqueueRolloutRequest, SampledChoice, Span, TokenCapture

CALLS, FIRST_PROMPT, ANSWER, RESULT, GROUP = 6, 1750, 60, 40, 8
VOCABULARY = 150_000
TRACER, PROXY = "TracerTraceToTriplet", "LlmProxyTraceToTriplet"
WITHOUT_LOGPROBS = f"{TRACER}, no logprobs"
ADAPTED = {TRACER: 200, WITHOUT_LOGPROBS: 200, PROXY: 50}  # rollouts
ENVIRONMENT = ".venv-agentlightning-0.3"


# --- what is recorded ---


def _words(token_ids: np.ndarray) -> str:
    """Text of about four letters a token."""
    return " ".join(format(token_id % 4096, "x") for token_id in token_ids.tolist())


def rollout_spans(number: int, rollout_id: str, attempt_id: str) -> Iterator[Span]:
    """The spans of one attempt."""
    random, shared = np.random.default_rng((1, number)), np.random.default_rng((0, number // GROUP))
    history = shared.integers(1000, VOCABULARY, FIRST_PROMPT).astype(np.int32)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are the travel agent. {_words(history[:1500])}"},
        {"role": "user", "content": _words(history[1500:])},
    ]
    own: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "trace_id": f"{number:032x}",
    }
    root, begin = f"{number:08x}{0:08x}", 1_760_000_000.0 + number
    yield Span(
        **own,
        sequence_id=1,
        span_id=root,
        name="agent run",
        start_time=begin,
        end_time=begin + CALLS,
    )
    for call in range(CALLS):
        answer = random.integers(1000, VOCABULARY, ANSWER).astype(np.int32)
        result = random.integers(1000, VOCABULARY, RESULT).astype(np.int32)
        last = call == CALLS - 1
        tool: dict[str, Any] = {
            "name": "search",
            "arguments": json.dumps({"query": _words(answer[40:])}),
        }
        said: dict[str, Any] = {"role": "assistant", "content": _words(answer[:40])}
        if not last:
            said["tool_calls"] = [
                {"id": f"call_{number}_{call}", "type": "function", "function": tool}
            ]
        at = {"start_time": begin + call, "end_time": begin + call + 0.5}
        yield Span(
            **own,
            **at,
            sequence_id=2 * call + 2,
            span_id=f"{number:08x}{2 * call + 1:08x}",
            parent_id=root,
            name="chat policy",
            attributes=_call_attributes(number, call, messages, said, len(history)),
            tokens=TokenCapture(
                prompt_token_ids=tuple(history.tolist()),
                choices=(
                    SampledChoice(
                        token_ids=tuple(answer.tolist()),
                        logprobs=tuple((-random.exponential(size=ANSWER)).tolist()),
                        finish_reason="stop" if last else "tool_calls",
                        versions=((1, ANSWER),),
                    ),
                ),
            ),
        )
        if not last:
            said_by_tool = _words(result)
            yield Span(
                **own,
                start_time=at["end_time"],
                end_time=at["end_time"] + 0.4,
                sequence_id=2 * call + 3,
                span_id=f"{number:08x}{2 * call + 2:08x}",
                parent_id=root,
                name="execute_tool search",
                attributes={
                    semconv.GEN_AI_OPERATION: "execute_tool",
                    "gen_ai.tool.name": "search",
                    "gen_ai.tool.call.id": f"call_{number}_{call}",
                    "gen_ai.tool.call.arguments": tool["arguments"],
                    "gen_ai.tool.call.result": said_by_tool,
                },
            )
            messages = [
                *messages,
                said,
                {"role": "tool", "tool_call_id": f"call_{number}_{call}", "content": said_by_tool},
            ]
            history = np.concatenate([history, answer, result])
    yield Span(
        **own,
        sequence_id=2 * CALLS + 1,
        span_id=f"{number:08x}{2 * CALLS:08x}",
        parent_id=root,
        name=semconv.ANNOTATION,
        start_time=begin + CALLS,
        end_time=begin + CALLS,
        attributes={
            semconv.reward_name(0): "primary",
            semconv.reward_value(0): float(random.random()),
        },
    )


def _call_attributes(
    number: int, call: int, messages: list[dict[str, Any]], said: dict[str, Any], prompt: int
) -> dict[str, Any]:
    """As the gateway writes them."""
    return {
        semconv.GEN_AI_OPERATION: "chat",
        semconv.GEN_AI_REQUEST_MODEL: "policy",
        semconv.GEN_AI_RESPONSE_MODEL: "policy",
        semconv.GEN_AI_RESPONSE_ID: f"chatcmpl-{number}-{call}",
        semconv.GEN_AI_FINISH_REASONS: ["stop"],
        semconv.GEN_AI_INPUT_TOKENS: prompt,
        semconv.GEN_AI_OUTPUT_TOKENS: ANSWER,
        semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([said]),
        semconv.CALL_ENDPOINT: "chat/completions",
        semconv.CALL_STREAM: False,
        semconv.CALL_REQUEST: '{"model":"policy","temperature":1.0}',
        semconv.CALL_SAMPLING: '{"temperature":1.0,"top_p":1.0,"max_tokens":512}',
        semconv.CALL_BACKEND: "vllm",
        semconv.CALL_TRAINABLE: True,
        semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
        semconv.GEN_AI_TEMPERATURE: 1.0,
        semconv.GEN_AI_TOP_P: 1.0,
        semconv.GEN_AI_MAX_TOKENS: 512,
        semconv.CALL_INDEX: call,
        semconv.CALL_FIRST_VERSION: 1,
        semconv.CALL_LAST_VERSION: 1,
    }


async def record(path: Path, rollouts: int) -> None:
    """Fill a new store with finished rollouts."""
    store = await SqlStore.open(path, synchronous="NORMAL")
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=n, rollout_id=f"ro-{n:06}") for n in range(rollouts)]
    )
    for leased in await store.dequeue_many_rollouts(worker_id="w", limit=rollouts):
        rollout_id, attempt_id = leased.rollout_id, leased.attempt.attempt_id
        await store.add_many_spans(list(rollout_spans(int(rollout_id[3:]), rollout_id, attempt_id)))
        await store.update_attempt(rollout_id, attempt_id, status="succeeded")
    await store.close()


# --- what is measured ---


async def pipeline(path: Path) -> dict[str, float]:
    """CPU seconds of each stage, and what came of it."""
    seconds = dict.fromkeys(("read", "trace", "credit", "pack"), 0.0)
    clock = time.process_time()

    def lap(stage: str) -> None:
        nonlocal clock
        now = time.process_time()
        seconds[stage] += now - clock
        clock = now

    store = await SqlStore.open(path)
    lap("read")
    traced = []
    for rollout in sorted(await store.query_rollouts(), key=lambda rollout: rollout.rollout_id):
        spans = await store.query_spans(rollout.rollout_id, "latest")
        lap("read")
        traced.append(trace_rollout(rollout, spans, calls=CallFilter(models=("policy",))))
        lap("trace")
    groups = [traced[start : start + GROUP] for start in range(0, len(traced), GROUP)]
    rewarded = [rewarded_group(group, "exclude") for group in groups]
    batch = make_batches(GRPO(group_size=GROUP, level="tree"), rewarded, {"policy": None})[
        "policy"
    ].sequences
    lap("credit")
    weights = aggregation_weights(batch, "token-mean")
    micro = list(micro_batches(batch, weights, AdamW().micro_batch_tokens))
    lap("pack")
    await store.close()
    transitions = [one for rollout in traced for one in rollout.transitions]
    return seconds | {
        "together": sum(seconds.values()),
        "rollouts": len(traced),
        "transitions": len(transitions),
        "prompt_tokens": sum(len(one.prompt_ids) for one in transitions),
        "micro_batches": len(micro),
        "packed_tokens": sum(one.tokens for one in micro),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def adapter(path: Path) -> dict[str, float]:
    """Rollouts a CPU second from spans in memory to transitions."""
    store = await SqlStore.open(path)
    rollouts = (await store.query_rollouts())[: ADAPTED[TRACER]]
    given = [
        (rollout, await store.query_spans(rollout.rollout_id, "latest")) for rollout in rollouts
    ]
    await store.close()
    wanted = CallFilter(models=("policy",))
    started = time.process_time()
    traced = [trace_rollout(rollout, spans, calls=wanted) for rollout, spans in given]
    seconds = time.process_time() - started
    assert all(
        len(rollout.transitions) == CALLS and rollout.reward is not None for rollout in traced
    )
    return {"rollouts_per_cpu_second": len(traced) / seconds}


async def floor(path: Path) -> dict[str, float]:
    """CPU seconds of reading the columns of all spans, and of viewing their tokens as arrays."""
    started = time.process_time()
    connection = sqlite3.connect(path)
    tokens = 0
    for *_, prompt, sampled, logprobs in connection.execute(
        "SELECT name, start_time, end_time, attributes, prompt_token_ids, token_ids, logprobs "
        "FROM spans"
    ):
        if prompt is not None:
            tokens += len(np.frombuffer(prompt, "<i4")) + len(np.frombuffer(sampled, "<i4"))
            np.frombuffer(logprobs, "<f4")
    connection.close()
    return {"floor": time.process_time() - started}


MEASURED = {"pipeline": pipeline, "adapter": adapter, "floor": floor}


# --- the adapters of 0.3 ---


def _as_span(
    span: Span, name: str | None = None, attributes: dict[str, Any] | None = None
) -> dict[str, Any]:
    fields = (
        "rollout_id",
        "attempt_id",
        "sequence_id",
        "trace_id",
        "span_id",
        "parent_id",
        "start_time",
        "end_time",
    )
    said = {
        "name": name or span.name,
        "attributes": span.attributes if attributes is None else attributes,
    }
    return {field: getattr(span, field) for field in fields} | said


def as_tracer(span: Span, logprobs: bool = True) -> dict[str, Any]:
    """The span as the instrumentation of 0.3's tracer writes it: an attribute for each part of a
    message, ids as lists, logprobs as OpenAI's JSON."""
    if span.tokens is None:
        return _as_span(span)
    (answer,) = json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    choice = span.tokens.choices[0]
    sampled = [
        {
            "token": format(token_id, "x"),
            "logprob": logprob,
            "bytes": list(b"%x" % token_id),
            "top_logprobs": [],
        }
        for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
    ]
    attributes: dict[str, Any] = {
        "gen_ai.request.model": "policy",
        "gen_ai.response.id": span.attributes[semconv.GEN_AI_RESPONSE_ID],
        "prompt_token_ids": span.tokens.prompt_token_ids,
        "response_token_ids": choice.token_ids,
        **({"logprobs.content": json.dumps(sampled)} if logprobs else {}),
        **_flat("gen_ai.completion.0", answer),
    }
    for number, message in enumerate(
        json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]))
    ):
        attributes |= _flat(f"gen_ai.prompt.{number}", message)
    return _as_span(span, "openai.chat.completion", attributes)


def _flat(name: str, message: dict[str, Any]) -> dict[str, str]:
    texts = {f"{name}.{key}": value for key, value in message.items() if isinstance(value, str)}
    for number, call in enumerate(message.get("tool_calls", ())):
        asked = {"id": call["id"], "type": call["type"], **call["function"]}
        texts |= {f"{name}.tool_calls.{number}.{key}": value for key, value in asked.items()}
    return texts


def as_proxy(span: Span) -> dict[str, Any]:
    """The span as LiteLLM writes it for a vLLM server: each field of request and answer as the text
    of a literal."""
    if span.tokens is None:
        return _as_span(span)
    attributes = {
        "llm.hosted_vllm.id": span.attributes[semconv.GEN_AI_RESPONSE_ID],
        "llm.hosted_vllm.messages": span.attributes[semconv.GEN_AI_INPUT_MESSAGES],
        "llm.hosted_vllm.prompt_token_ids": str(list(span.tokens.prompt_token_ids)),
        "llm.hosted_vllm.response_token_ids": str([list(span.tokens.choices[0].token_ids)]),
    }
    return _as_span(span, "raw_gen_ai_request", attributes)


def adapters_of_0_3(directory: Path) -> dict[str, Any]:
    """Rollouts a CPU second of each adapter, in an environment of their own, which is made if it is
    not there."""
    root = Path(__file__).parent.parent
    if not (root / ENVIRONMENT).exists():
        script = root / "scripts" / "environment.sh"
        subprocess.run(
            [script, ENVIRONMENT.removeprefix(".venv-"), sys.prefix], cwd=root, check=True
        )
    words = {
        TRACER: as_tracer,
        WITHOUT_LOGPROBS: lambda span: as_tracer(span, logprobs=False),
        PROXY: as_proxy,
    }
    file = directory / "spans.jsonl"
    with file.open("wb") as out:
        for number in range(max(ADAPTED.values())):
            spans = list(rollout_spans(number, f"ro-{number:06}", "a"))
            said = {name: list(map(words[name], spans)) for name in words if number < ADAPTED[name]}
            out.write(msgspec.json.encode(said) + b"\n")
    script = Path(__file__).with_name("_adapters_0_3.py")
    command = [root / ENVIRONMENT / "bin" / "python", "-P", script, file]
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, check=True, text=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    for name, rollouts in ADAPTED.items():
        assert measured[name]["triplets"] == rollouts * CALLS, measured
        assert measured[name]["rewarded"] == rollouts, measured
    return measured


# --- the table ---


def run(rollouts: int, rounds: int, alone: Any) -> dict[str, Any]:
    """Measure, print and return the part. `alone` runs one of `MEASURED` in a process of its
    own."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / "store.sqlite"
        asyncio.run(record(path, rollouts))
        best = min(
            (alone("pipeline", path) for _ in range(rounds)), key=lambda one: one["together"]
        )
        best |= min((alone("floor", path) for _ in range(rounds)), key=lambda one: one["floor"])
        ours = max(alone("adapter", path)["rollouts_per_cpu_second"] for _ in range(rounds))
        theirs = adapters_of_0_3(directory)
    print(
        f"{best['rollouts']:,} rollouts, {best['transitions']:,} transitions, "
        f"{best['prompt_tokens']:,} prompt tokens"
    )
    for stage in ("read", "trace", "credit", "pack", "together", "floor"):
        print(f"{stage:>9} {best[stage]:>7.2f} CPU s")
    print(f"     peak {best['peak_mib']:>7,.0f} MiB; {best['micro_batches']} micro-batches")
    print(f"{'trace_rollout':>36} {ours:>8,.0f} rollouts / CPU s")
    for adapter_name, one in theirs.items():
        speed = one["rollouts_per_cpu_second"]
        print(
            f"{adapter_name:>36} {speed:>8,.0f} rollouts / CPU s   {ours / speed:>6.1f}x",
            flush=True,
        )
    return {"stages": best, "trace_rollout": ours, "agentlightning-0.3": theirs}
