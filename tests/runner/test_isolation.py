"""Agents in processes of their own: what one does wrong hurts its attempt and nothing else."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.runner.agent import LARGEST_COPIED, as_agent
from agentlightning.runner.isolation import resolve_isolation
from agentlightning.runner.main_thread import AlarmWatch
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, Attempt, RolloutConfig, Span
from tests.gateway.upstream import GOOD, Upstream, gateway_before
from tests.runner.agents import alarming, isolated, kept
from tests.runner.world import AGAIN, alive, enqueue, log_of, run_to_end, until

pytestmark = pytest.mark.anyio


class Ran:
    """How one rollout ended. Most agents here return their process as the reward."""

    def __init__(self, attempt: Attempt, spans: list[Span]) -> None:
        self.attempt, self.spans, self.status = attempt, spans, attempt.status
        self.reason = str(attempt.metadata.get("reason", ""))
        self.reward = self.pid = agl.find_final_reward(spans)

    def emitted(self) -> dict[str, Any]:
        (text,) = (
            span.attributes[semconv.OBJECT_JSON]
            for span in self.spans
            if span.name == semconv.OBJECT
        )
        return json.loads(str(text))

    def messages(self) -> list[Any]:
        return [
            span.attributes[semconv.MESSAGE_BODY]
            for span in self.spans
            if span.name == semconv.MESSAGE
        ]

    def calls(self) -> list[str]:
        calls = (span.attributes for span in self.spans if semconv.CALL_INDEX in span.attributes)
        return [str(attributes[semconv.GEN_AI_INPUT_MESSAGES]) for attributes in calls]


async def ran(
    store: SqlStore,
    *tasks: Any,
    agent: Any = isolated.acts,
    timeout: float | None = None,
    **options: Any,
) -> list[Ran]:
    """Run an agent on tasks, one after the other unless `concurrency` says otherwise."""
    options = {"concurrency": 1, "isolation": "process", **options}
    ended = await run_to_end(
        store, agent, *tasks, config=RolloutConfig(timeout_seconds=timeout), **options
    )
    return [await how_it_ended(store, one.rollout_id) for one in ended]


async def how_it_ended(store: SqlStore, rollout_id: str) -> Ran:
    attempt = await store.get_latest_attempt(rollout_id)
    assert attempt is not None
    return Ran(attempt, await store.query_spans(rollout_id))


def does(*whats: str) -> list[dict[str, str]]:
    return [{"do": what} for what in whats]


@pytest.fixture
async def front(store: SqlStore) -> AsyncIterator[None]:
    """A gateway before a server, as the store's `llm`."""
    async with gateway_before(Upstream(GOOD), store) as gateway:
        await store.add_resources(
            {"llm": LLM(endpoint=f"{gateway.url}/v1", model="policy", gateway=True)}
        )
        yield


@pytest.mark.parametrize("agent", [alarming.strict, alarming.swallows, alarming.in_loop])
async def test_a_grader_may_set_an_alarm_in_a_process(store: SqlStore, agent: Any) -> None:
    assert [one.reward for one in await ran(store, 1, 2, agent=agent)] == [1.0, 1.0]


async def test_a_grader_that_sets_an_alarm_in_a_thread_is_told_what_to_do(
    store: SqlStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.runner.execution.watch", AlarmWatch())
    (strict,) = await ran(store, 1, agent=alarming.strict, isolation="none")
    assert strict.status == "failed" and "isolation='process'" in strict.reason
    caplog.clear()
    monkeypatch.setattr("agentlightning.runner.execution.watch", AlarmWatch())
    await ran(store, 1, 2, agent=alarming.swallows, isolation="none")
    (warning,) = [
        record.getMessage() for record in caplog.records if "alarm" in record.getMessage()
    ]
    assert "alarming" in warning and "isolation='process'" in warning


def test_the_alarm_of_transformers_accuses_no_agent(caplog: pytest.LogCaptureFixture) -> None:
    import transformers.dynamic_module_utils  # which every training in one process has imported

    assert transformers.dynamic_module_utils.__name__ in sys.modules
    AlarmWatch().check("tests.runner.agents.isolated")
    accused = [
        record.getMessage() for record in caplog.records if "transformers" in record.getMessage()
    ]
    assert not accused


# --- processes ------------------------------------------------------------------------------------


async def test_a_process_runs_attempts_one_after_the_other_until_it_is_replaced(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_KEY", "which opens the store")
    monkeypatch.setattr("agentlightning.runner.isolation.ATTEMPTS_PER_PROCESS", 3)
    several = await ran(store, *does("count", "count", "numbers", "environment"))
    first, second, numbers, environment = several
    assert first.pid == second.pid == numbers.pid != os.getpid() and environment.pid != first.pid
    assert (first.emitted(), second.emitted()) == ({"count": 1}, {"count": 2})
    assert numbers.emitted() == {"group": True, "session": True}
    assert first.attempt.worker_id == second.attempt.worker_id
    assert str(first.attempt.worker_id).endswith("/1")
    ids = {
        "AGL_ROLLOUT_ID": environment.attempt.rollout_id,
        "AGL_ATTEMPT_ID": environment.attempt.attempt_id,
    }
    assert environment.emitted() == {"AGL_KEY": None, **ids}


@pytest.mark.slow
async def test_a_process_in_which_something_still_runs_serves_no_other_attempt(
    store: SqlStore,
) -> None:
    several = await ran(store, *does("leave thread", "leave process", "leave daemon", "nothing"))
    assert {one.status for one in several} == {"succeeded"}
    # What began a session of its own lives on, with the key of the old worker id.
    assert len({one.pid for one in several}) == len({one.attempt.worker_id for one in several}) == 4


# --- what goes wrong ------------------------------------------------------------------------------


CRASHES = {
    "exit": "ended with exit code 3 before the agent did",
    "segfault": "was killed by SIGSEGV",
    "kill": "was killed by SIGKILL, as happens when memory runs out",
    "abort": "was killed by SIGABRT",
}


async def test_a_crash_fails_its_attempt_keeps_what_was_recorded_and_says_what_happened(
    store: SqlStore,
) -> None:
    *crashed, after = await ran(store, *does(*CRASHES, "nothing"), concurrency=2)
    for one, reason in zip(crashed, CRASHES.values(), strict=True):
        assert one.status == "failed"
        assert reason in one.reason
    exited, segfault = crashed[:2]
    assert log_of(exited.spans) == "last words" and segfault.messages() == ["before"]
    assert "isolated.py" in log_of(segfault.spans, "stderr")  # where it crashed
    assert after.status == "succeeded"
    # What a crash may have left has the key of the old worker id.
    assert len({one.attempt.worker_id for one in [*crashed, after]}) == 5


async def test_a_process_that_cannot_be_started_costs_its_attempt_and_no_descriptors(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    before = len(os.listdir("/dev/fd"))
    assert {one.status for one in await ran(store, *does("nothing", "nothing"))} == {"failed"}
    assert len(os.listdir("/dev/fd")) == before


async def test_exceptions_output_and_log_records_are_those_of_their_attempt(
    store: SqlStore,
) -> None:
    raised, flooded, logged, silent = await ran(store, *does("raise", "flood", "log", "nothing"))
    assert (raised.status, raised.reason) == ("failed", "LookupError: nothing there")
    (span,) = (span for span in raised.spans if span.name == semconv.EXCEPTION)
    assert span.attributes[semconv.EXCEPTION_TYPE] == "LookupError"
    assert "isolated.py" in str(span.attributes[semconv.EXCEPTION_STACKTRACE])
    assert flooded.status == "succeeded" and log_of(flooded.spans, "stderr") == "the end"
    assert "bytes left out" in log_of(flooded.spans) and len(log_of(flooded.spans)) < 100_000
    assert "WARNING agent: be warned" in log_of(logged.spans, "log")
    assert log_of(logged.spans) == "past sys.stdout�"
    assert silent.status == "succeeded" and not log_of(silent.spans) + log_of(silent.spans, "log")


async def test_a_blocking_agent_is_killed_at_its_timeout_with_its_children_and_nobody_else(
    store: SqlStore,
) -> None:
    begun = time.monotonic()
    hung, *others = await ran(store, *does("hang", "count", "count"), timeout=1.5, concurrency=2)
    assert time.monotonic() - begun < 10
    assert (hung.status, hung.reason) == ("timeout", "the agent did not finish within 1.5 s")
    for pid in hung.emitted()["pids"]:
        await until(lambda pid=pid: not alive(pid))
    assert [one.status for one in others] == ["succeeded", "succeeded"]


async def begun(store: SqlStore, rollout_id: str) -> list[int]:
    """Wait until `hang` hangs; its processes."""

    async def objects() -> bool:
        return any(span.name == semconv.OBJECT for span in await store.query_spans(rollout_id))

    await until(objects)
    return (await how_it_ended(store, rollout_id)).emitted()["pids"]


# --- clients, and what an agent keeps -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("asks", 2), ("asks_async", 1)])
async def test_a_client_made_when_the_module_is_imported_belongs_to_each_attempt_in_turn(
    store: SqlStore, front: None, name: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the runner's own is not the agent's
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    before = set(sys.modules)
    questions = [f"question {n}" for n in range(6)]
    several = await ran(
        store, *questions, agent=f"tests.runner.agents.global_client:{name}", concurrency=processes
    )
    assert "tests.runner.agents.global_client" not in set(sys.modules) - before
    for question, one in zip(questions, several, strict=True):
        (call,) = one.calls()
        assert question in call
        assert (one.status, one.reward) == ("succeeded", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_rollouts_share_neither_what_their_agent_keeps_nor_a_client(
    store: SqlStore, front: None, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"isolation": isolation, "concurrency": 3 if isolation == "none" else 1}
    monkeypatch.setattr(kept, "together", asyncio.Barrier(3) if isolation == "none" else None)
    monkeypatch.setattr(kept, "shared", None)
    questions = [f"question {n}" for n in range(3)]
    several = await ran(store, *questions, agent="tests.runner.agents.kept:keeper", **options)
    for question, one in zip(questions, several, strict=True):
        assert (one.status, one.reward) == ("succeeded", 1.0), one.reason
        assert [question in call for call in one.calls()] == [True, True]
    # What is large, or cannot be copied, is everybody's.
    assert len({json.dumps(one.emitted()) for one in several}) == 1
    assert kept.keeper.client is None and not kept.keeper.history

    several = await ran(store, "a", "b", "c", agent=kept.first_comes, **options)
    if kept.shared is not None:
        await kept.shared.close()
    (whole,) = [one for one in several if one.status == "succeeded"]
    assert len(whole.calls()) == 1
    for one in several:
        if one is not whole:
            assert one.status == "failed" and not one.calls()
            assert "Make the client inside the agent" in one.reason


class Retriever:
    """Large, and with what pickle refuses and a copy does not."""

    def __init__(self) -> None:
        self.words: Callable[[str], list[str]] = lambda text: text.split()
        self.index = bytes(2 * LARGEST_COPIED)


class Limiter:
    def __init__(self) -> None:
        self.semaphore = asyncio.Semaphore(2)
        self.waited: list[float] = []


class Client:
    """Half a copy of it cannot be thrown away."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = True

    def __del__(self) -> None:
        assert self.open


class Copied(agl.LitAgent[Any]):
    def __init__(self) -> None:
        self.retriever, self.limiter, self.client = Retriever(), Limiter(), Client()
        self.history: list[str] = []
        self.memory: dict[str, Any] = {"messages": self.history}
        self.memory["self"] = self.memory
        self.bound = self.remember

    def remember(self) -> list[str]:
        return self.history


def test_each_rollout_has_what_its_agent_keeps_but_what_is_large_limits_all_or_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    agent = Copied()
    own = cast("Any", agent.own_copy())
    assert own.retriever is agent.retriever and own.client is agent.client
    assert own.limiter.semaphore is agent.limiter.semaphore
    assert own.limiter.waited is not agent.limiter.waited
    assert own.history is not agent.history and own.memory["messages"] is own.history
    assert own.memory["self"] is own.memory and own.bound() is own.history
    assert not unraisable
    partial = functools.partial(lambda task, history: 1.0, history=[])
    assert (
        cast("Any", as_agent(partial).own_copy()).function.keywords["history"]
        is not partial.keywords["history"]
    )


# --- which agents ---------------------------------------------------------------------------------


async def test_an_agent_that_no_other_process_can_import_is_refused_at_once(
    store: SqlStore,
) -> None:
    def local(task: Any) -> float:
        return 1.0

    for agent in (local, lambda task: 1.0, agl.rollout(local)):
        with pytest.raises(
            ConfigError, match=r"cannot be brought into another process.*Define it at the top level"
        ):
            Runner(store, agent, isolation="process")
    with pytest.raises(ConfigError, match="a command already runs in its own process"):
        Runner(store, agl.command("true"), isolation="process")


@pytest.mark.parametrize(
    ("agent", "place"),
    [
        (kept.plain, "process"),
        (kept.function, "none"),
        (kept.first_comes, "none"),
        (kept.keeper, "none"),
        (agl.command("true"), "none"),
        ("tests.runner.agents.kept:decorated", "none"),
        ("tests.runner.agents.kept:plain", "process"),
        ("tests.runner.agents.refuses:agent", "process"),  # to be imported here
    ],
)
def test_auto_gives_a_process_to_those_that_only_find_their_model_in_the_environment(
    agent: Any, place: str
) -> None:
    assert resolve_isolation(as_agent(agent), "auto") == place
    assert resolve_isolation(as_agent(agent), "auto", served=False) != "process"


async def test_without_a_process_such_an_agent_fails_rather_than_call_another_model(
    store: SqlStore,
) -> None:
    with pytest.raises(ConfigError, match="not defined"):
        resolve_isolation(as_agent("tests.runner.agents.broken:agent"), "auto")
    (fine,) = await ran(store, "task", agent=isolated.plain, isolation="auto")
    await store.add_resources(
        {"llm": LLM(endpoint="http://127.0.0.1:9/v1", model="policy", gateway=True)}
    )
    (refused,) = await ran(store, "task", agent=isolated.plain, isolation="auto")
    (allowed,) = await ran(store, "task", agent=isolated.plain, isolation="none")
    assert [fine.status, refused.status, allowed.status] == ["succeeded", "failed", "succeeded"]
    assert "isolation='process'" in refused.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests.runner.agents.isolated:nobody", "has no attribute 'nobody'"),
        ("tests.runner.agents.broken:agent", "NameError: name 'missing' is not defined"),
    ],
)
async def test_an_agent_that_fails_to_import_ends_the_runner_and_costs_no_rollout(
    store: SqlStore, name: str, reason: str
) -> None:
    (rollout_id,) = await enqueue(store, {}, config=AGAIN)
    with pytest.raises(ConfigError, match=reason):
        await asyncio.wait_for(Runner(store, name, concurrency=8, isolation="process").run(), 60)
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None and rollout.status == "requeuing"
    # no other process of the runner took it
    assert len(await store.query_attempts(rollout_id)) == 1


SCRIPT = """
import asyncio
import agentlightning as agl
from agentlightning.store.sql import SqlStore

async def agent(task):
    return 0.5

async def main():
    store = await SqlStore.open(":memory:")
    rollout = await agl.Runner(store, agent, isolation="process").run_one({})
    print(rollout.status, agl.find_final_reward(await store.query_spans(rollout.rollout_id)))

%s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ('if __name__ == "__main__":\n    asyncio.run(main())', "succeeded 0.5"),
        ("asyncio.run(main())", "put what starts it under `if __name__ == '__main__':`"),
    ],
)
async def test_an_agent_may_be_defined_in_the_main_script(
    tmp_path: Path, guard: str, said: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % guard)
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=pipe, stderr=both
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert said in output.decode()


# --- hooks and the end ----------------------------------------------------------------------------


async def test_hooks_run_beside_the_runner_and_see_the_agents_spans(store: SqlStore) -> None:
    seen: list[int] = []

    class Seen(agl.Hook):
        async def on_trace_end(self, *, tracer: Any, **_: Any) -> None:
            seen.append(len(tracer.get_last_trace()))
            agl.emit_message("from the hook")

    counted, crashed = await ran(store, *does("count", "exit"), hooks=[Seen()])
    assert seen == [1, 2]  # the crash: a reward and its output
    assert counted.messages() == crashed.messages() == ["from the hook"]
    assert counted.reward == counted.pid  # the returned reward is still the last word


async def test_a_runner_that_is_cancelled_kills_its_processes_and_hands_their_attempts_back(
    brief_store: SqlStore,
) -> None:
    (rollout_id,) = await enqueue(brief_store, *does("hang"), config=AGAIN)
    task = asyncio.create_task(
        Runner(brief_store, isolated.acts, concurrency=1, isolation="process").run()
    )
    pids = await begun(brief_store, rollout_id)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    ended = await how_it_ended(brief_store, rollout_id)
    assert (ended.status, ended.reason) == ("unresponsive", "its runner was stopped")
    for pid in pids:
        await until(lambda pid=pid: not alive(pid))


KILLED = """
import asyncio, sys
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from tests.runner.agents import isolated

async def main():
    store = await SqlStore.open(sys.argv[1])
    await store.enqueue_rollout({"do": "hang"})
    await Runner(store, isolated.acts, concurrency=1, isolation="process").run()

asyncio.run(main())
"""


async def test_the_processes_of_a_killed_runner_end_too(tmp_path: Path) -> None:
    command = (sys.executable, "-c", KILLED, str(tmp_path / "s.db"))
    runner = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )

    def below(pid: int) -> list[int]:
        return [
            int(one)
            for task in Path(f"/proc/{pid}/task").glob("*/children")
            for one in task.read_text().split()
        ]

    def family() -> list[int]:
        return [pid for child in below(runner.pid) for pid in (child, *below(child))]

    # the agent's process and its child, which heeds no SIGTERM
    await until(lambda: len(family()) == 2)
    pids = family()
    runner.send_signal(signal.SIGKILL)
    await runner.wait()
    for pid in pids:
        await until(lambda pid=pid: not alive(pid))


def test_auto_gives_a_process_to_a_plain_function_whose_module_handles_signals() -> None:
    assert resolve_isolation(as_agent(alarming.swallows), "auto", served=False) == "process"
    assert resolve_isolation(as_agent(alarming.in_loop), "auto", served=False) != "process"


def test_auto_gives_a_process_to_agents_whose_module_changes_what_rollouts_share() -> None:
    assert resolve_isolation(as_agent(isolated.stateful), "auto") == "process"
    assert (
        resolve_isolation(as_agent("tests.runner.agents.isolated:plain"), "auto", served=False)
        == "process"
    )
