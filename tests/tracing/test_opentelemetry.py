"""What OpenTelemetry's own SDK traces in the code of an attempt becomes spans of that attempt, and
of no other."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

import agentlightning as agl
from agentlightning.runner.runner import Runner
from agentlightning.semconv import MESSAGE_BODY, OPERATION, UNFINISHED
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.instrument import tracer_class
from agentlightning.tracing.opentelemetry import OpenTelemetryTracer
from agentlightning.types import EnqueueRolloutRequest, Span
from tests.runner.world import running

# made before there is a provider, as libraries do
library = trace.get_tracer("some.library", "1.2")


def tracer_of(name: str = "a") -> OpenTelemetryTracer:
    return OpenTelemetryTracer("rollout", name)


def named(tracer: AttemptTracer) -> dict[str, Span]:
    return {span.name: span for span in tracer.get_last_trace()}


def run_program(source: str) -> str:
    """What a program of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.anyio
async def test_two_hundred_rollouts_at_once_in_one_process_do_not_mix(tmp_path: Path) -> None:
    everybody = asyncio.Barrier(200)

    def search(task: int) -> None:
        with library.start_as_current_span("search", attributes={"task": task}):
            agl.emit_message(str(task))

    @agl.rollout
    async def agent(task: int) -> float:
        with library.start_as_current_span("plan", attributes={"task": task}):
            await everybody.wait()
            await asyncio.gather(
                asyncio.to_thread(search, task),
                asyncio.create_task(asyncio.to_thread(search, task)),
            )
        return float(task)

    store = await SqlStore.open(tmp_path / "store.db")
    rollouts = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=task) for task in range(200)]
    )
    async with running(Runner(store, agent, concurrency=200)):
        await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts], timeout=30)
    for task, rollout in enumerate(rollouts):
        spans = await store.query_spans(rollout.rollout_id)
        assert sorted(span.name for span in spans) == [
            "agentlightning.annotation",
            *["agentlightning.message"] * 2,
            "plan",
            "search",
            "search",
        ]
        told = {span.attributes["task"] for span in spans if "task" in span.attributes}
        told |= {
            int(span.attributes[MESSAGE_BODY]) for span in spans if MESSAGE_BODY in span.attributes
        }  # type: ignore[arg-type]
        assert told == {task}
        plan = next(span for span in spans if span.name == "plan")
        assert {span.parent_id for span in spans if span.name == "search"} == {plan.span_id}
        assert len({span.trace_id for span in spans}) == 1
    await store.close()


def test_operations_and_spans_of_the_sdk_are_each_others_children() -> None:
    with bind(tracer_of()) as tracer:  # noqa: SIM117 - one level each is what is shown
        with library.start_as_current_span("agent"):
            with agl.operation(name="plan"):
                with library.start_as_current_span("tool"):
                    agl.emit_reward(1.0)
                agl.emit_message("planned")
    spans = named(tracer)
    assert spans["agent"].parent_id is None
    assert spans[OPERATION].parent_id == spans["agent"].span_id
    assert spans["tool"].parent_id == spans[OPERATION].span_id
    assert spans["agentlightning.annotation"].parent_id == spans["tool"].span_id
    assert spans["agentlightning.message"].parent_id == spans[OPERATION].span_id
    assert {span.trace_id for span in spans.values()} == {tracer.trace_id}


def test_threads_are_attributed_by_the_parent_they_are_given_and_without_one_are_nobodys() -> None:
    def work(context: contexts.Context | None) -> None:
        library.start_span("in a thread", context=context).end()

    first, second = tracer_of("first"), tracer_of("second")
    with ThreadPoolExecutor(1) as pool:
        with bind(first):
            # What a library does that starts its worker in the first call: it keeps that call's
            # context for ever.
            keeper = contexts.get_current()
            pool.submit(contexts.attach, keeper).result()
        with bind(second), library.start_as_current_span("agent"):
            handed = contexts.get_current()
            pool.submit(work, handed).result()
            thread = threading.Thread(target=work, args=(None,))
            thread.start()
            thread.join()
    assert first.get_last_trace() == []
    in_thread, agent = second.get_last_trace()
    assert (in_thread.name, in_thread.parent_id) == ("in a thread", agent.span_id)


def test_a_surrounding_trace_that_is_not_sampled_costs_no_span_nor_does_the_number_of_attributes() -> (
    None
):
    unsampled = NonRecordingSpan(SpanContext(trace_id=7, span_id=7, is_remote=True))
    said = {f"llm.input_messages.{index}.message.content": "text" for index in range(500)}
    token = contexts.attach(trace.set_span_in_context(unsampled))
    with library.start_as_current_span("outside"), bind(tracer_of()) as tracer:
        library.start_span("llm", attributes={"openinference.span.kind": "LLM", **said}).end()
    contexts.detach(token)
    (span,) = tracer.get_last_trace()  # what is traced outside rollouts is nobody's
    assert span.attributes.items() >= {"openinference.span.kind": "LLM", **said}.items()


def test_a_span_still_open_at_the_end_is_kept_as_unfinished(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bind(tracer_of()) as tracer:
        left = library.start_span("stream", attributes={"chunks": 3})
        library.start_span("tool").end()
    tracer.close()
    spans = named(tracer)
    assert spans["stream"].attributes[UNFINISHED] is True
    assert spans["stream"].attributes["chunks"] == 3
    assert UNFINISHED not in spans["tool"].attributes
    with caplog.at_level(logging.WARNING):
        left.end()
    assert "after the attempt had ended" in caplog.text
    assert len(tracer.get_last_trace()) == 2


@pytest.mark.anyio
async def test_no_text_and_no_number_of_a_span_fails_its_attempt(tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: int) -> float:
        library.start_span("bad \ud800", attributes={"key \udfff": "\ud800", "count": 2**70}).end()
        return 1.0

    store = await SqlStore.open(tmp_path / "store.db")
    rollout = await Runner(store, agent).run_one(1)
    assert rollout.status == "succeeded"
    odd = next(span for span in await store.query_spans(rollout.rollout_id) if span.name == "bad ?")
    assert (odd.attributes["key ?"], odd.attributes["count"]) == ("?", str(2**70))
    await store.close()


OWN_PROVIDER = """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    from agentlightning.tracing.context import bind
    from agentlightning.tracing.instrument import tracer_class

    library = trace.get_tracer("library")
    for name in "ab":
        with bind(tracer_class()("rollout", name)) as tracer:
            library.start_span(name).end()
        print(*[span.name for span in tracer.get_last_trace()])
    library.start_span("outside").end()
    print(*[span.name for span in exporter.get_finished_spans()], trace.get_tracer_provider() is provider)
"""


def test_a_programs_own_provider_stays_and_its_exporter_gets_what_it_always_did() -> None:
    assert run_program(OWN_PROVIDER).splitlines() == ["a", "b", "a b outside True"]


WITHOUT_SDK = """
    import sys
    sys.modules["opentelemetry"] = None  # whoever imports it gets an ImportError

    from agentlightning.tracing.context import bind
    from agentlightning.tracing.instrument import tracer_class
    import agentlightning as agl

    with bind(tracer_class()("rollout", "a")) as tracer, agl.operation(name="plan"):
        agl.emit_reward(1.0)
    print(*[span.name for span in tracer.get_last_trace()])
"""


def test_without_opentelemetry_everything_else_is_the_same() -> None:
    assert run_program(WITHOUT_SDK) == "agentlightning.annotation agentlightning.operation\n"


def test_a_disabled_sdk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracer_class() is OpenTelemetryTracer
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer_class() is AttemptTracer
