"""Agents in processes of their own: what one does wrong hurts its attempt and nothing else."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.runner.agent import LARGEST_COPIED, as_agent, own_copies
from agentlightning.runner.isolation import place_of
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, Attempt, EnqueueRolloutRequest, RolloutConfig, Span
from tests.gateway.upstream import GOOD, Upstream, gateway_before
from tests.runner.agents import isolated, kept
from tests.runner.world import running

pytestmark = pytest.mark.anyio


class Ran:
    """How one rollout ended."""

    def __init__(self, attempt: Attempt, spans: list[Span]) -> None:
        self.attempt = attempt
        self.spans = spans
        self.status = attempt.status
        self.reason = str(attempt.metadata.get("reason", ""))
        self.reward = agl.find_final_reward(spans)

    @property
    def pid(self) -> float | None:
        """Of the process, which the agents here return as the reward."""
        return self.reward

    def log(self, stream: str) -> str:
        texts = [span.attributes for span in self.spans if span.attributes.get(semconv.LOG_STREAM) == stream]
        return "".join(str(attributes[semconv.LOG_TEXT]) for attributes in texts)

    def emitted(self) -> dict[str, Any]:
        (text,) = (span.attributes[semconv.OBJECT_JSON] for span in self.spans if span.name == semconv.OBJECT)
        return json.loads(str(text))

    def messages(self) -> list[Any]:
        return [span.attributes[semconv.MESSAGE_BODY] for span in self.spans if span.name == semconv.MESSAGE]


async def ran(
    store: SqlStore,
    *tasks: Any,
    agent: Any = isolated.acts,
    timeout: float | None = None,
    concurrency: int = 1,
    isolation: Any = "process",
    **options: Any,
) -> list[Ran]:
    """Run an agent on tasks, one after the other unless `concurrency` says otherwise."""
    config = RolloutConfig(timeout_seconds=timeout)
    requests = [EnqueueRolloutRequest(input=task, config=config) for task in tasks]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    async with running(Runner(store, agent, concurrency=concurrency, isolation=isolation, **options)):
        assert len(await store.wait_for_rollouts(ids, timeout=30)) == len(ids)
    return [await how_it_ended(store, rollout_id) for rollout_id in ids]


async def how_it_ended(store: SqlStore, rollout_id: str) -> Ran:
    attempt = await store.get_latest_attempt(rollout_id)
    assert attempt is not None
    return Ran(attempt, await store.query_spans(rollout_id))


def does(*whats: str) -> list[dict[str, str]]:
    return [{"do": what} for what in whats]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(true: Callable[[], Any]) -> None:
    """Wait for what only another process knows."""
    async with asyncio.timeout(60):
        while not (await found if inspect.isawaitable(found := true()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# --- processes -------------------------------------------------------------------------------------------------------


async def test_attempts_run_in_another_process_that_is_used_again_and_keeps_its_modules(store: SqlStore) -> None:
    first, second, numbers = await ran(store, *does("count", "count", "numbers"))
    assert first.pid == second.pid == numbers.pid != os.getpid()
    assert (first.emitted(), second.emitted()) == ({"count": 1}, {"count": 2})
    assert numbers.emitted() == {"group": True, "session": True}
    assert first.attempt.worker_id == second.attempt.worker_id
    assert str(first.attempt.worker_id).endswith("/1")


async def test_a_process_is_replaced_after_so_many_attempts(store: SqlStore) -> None:
    pids = [one.pid for one in await ran(store, *does(*["nothing"] * 3), max_attempts_per_process=2)]
    assert pids[0] == pids[1] != pids[2]


@pytest.mark.slow
async def test_several_processes_work_at_once_each_under_a_worker_id_of_its_own(store: SqlStore) -> None:
    both = await ran(store, *does("wait", "wait"), concurrency=2)
    assert len({one.pid for one in both}) == len({one.attempt.worker_id for one in both}) == 2


@pytest.mark.slow
async def test_a_process_in_which_something_still_runs_serves_no_other_attempt(store: SqlStore) -> None:
    several = await ran(store, *does("leave thread", "leave process", "leave daemon", "nothing"))
    assert {one.status for one in several} == {"succeeded"}
    assert len({one.pid for one in several}) == 4
    # What began a session of its own lives on, with the key of the old worker id.
    assert len({one.attempt.worker_id for one in several}) == 4


# --- what goes wrong -------------------------------------------------------------------------------------------------


CRASHES = {
    "exit": "ended with exit code 3 before the agent did",
    "segfault": "was killed by SIGSEGV",
    "kill": "was killed by SIGKILL, as happens when memory runs out",
    "abort": "was killed by SIGABRT",
}


async def test_a_crash_fails_its_attempt_and_says_what_happened(store: SqlStore) -> None:
    *crashed, after = await ran(store, *does(*CRASHES, "nothing"), concurrency=2)
    for one, reason in zip(crashed, CRASHES.values(), strict=True):
        assert one.status == "failed"
        assert reason in one.reason
    assert after.status == "succeeded"
    # What a crash may have left has the key of the old worker id.
    assert len({one.attempt.worker_id for one in [*crashed, after]}) == 5


async def test_a_process_whose_descriptors_were_closed_is_of_no_use_but_does_no_harm(store: SqlStore) -> None:
    broken, after = await ran(store, *does("close descriptors", "nothing"), timeout=1.0)
    assert broken.status in ("failed", "timeout")
    assert after.status == "succeeded"


async def test_a_process_that_cannot_be_started_costs_its_attempt_and_no_descriptors(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    before = len(os.listdir("/dev/fd"))
    several = await ran(store, *does("nothing", "nothing"))
    assert {one.status for one in several} == {"failed"}
    assert len(os.listdir("/dev/fd")) == before


async def test_what_was_recorded_and_written_before_a_crash_is_kept(store: SqlStore) -> None:
    exited, crashed = await ran(store, *does("exit", "segfault"))
    assert exited.log("stdout") == "last words"
    assert crashed.messages() == ["before"]
    assert "isolated.py" in crashed.log("stderr")  # where it crashed


async def test_an_exception_arrives_with_its_name_text_and_traceback(store: SqlStore) -> None:
    raised, after = await ran(store, *does("raise", "nothing"))
    assert (raised.status, raised.reason) == ("failed", "LookupError: nothing there")
    (span,) = (span for span in raised.spans if span.name == semconv.EXCEPTION)
    assert span.attributes[semconv.EXCEPTION_TYPE] == "LookupError"
    assert "isolated.py" in str(span.attributes[semconv.EXCEPTION_STACKTRACE])
    assert after.status == "succeeded"


async def test_a_blocking_agent_is_killed_at_its_timeout_with_its_children_and_nobody_else(store: SqlStore) -> None:
    begun = time.monotonic()
    hung, *others = await ran(store, *does("hang", "count", "count"), timeout=1.5, concurrency=2)
    assert time.monotonic() - begun < 10
    assert (hung.status, hung.reason) == ("timeout", "the agent did not finish within 1.5 s")
    for pid in hung.emitted()["pids"]:
        await until(lambda pid=pid: not alive(pid))
    assert [one.status for one in others] == ["succeeded", "succeeded"]


@pytest.mark.slow
async def test_an_async_agent_is_cancelled_first_and_may_clean_up(store: SqlStore) -> None:
    (hung,) = await ran(store, *does("hang"), timeout=3.0, agent=isolated.acts_async)
    assert hung.status == "timeout"
    assert hung.messages() == ["begun", "cleaned up"]


async def test_a_flood_of_output_is_kept_in_part(store: SqlStore) -> None:
    (flooded,) = await ran(store, *does("flood"))
    assert flooded.status == "succeeded"
    assert "bytes left out" in flooded.log("stdout")
    assert len(flooded.log("stdout")) < 100_000
    assert flooded.log("stderr") == "the end"


async def test_output_and_log_records_are_those_of_their_attempt(store: SqlStore) -> None:
    logged, silent = await ran(store, *does("log", "nothing"))
    assert "WARNING agent: be warned" in logged.log("log")
    assert logged.log("stdout") == "past sys.stdout�"
    assert not silent.log("stdout") + silent.log("log")


async def begun(store: SqlStore, rollout_id: str) -> list[int]:
    """Wait until `hang` hangs; its processes."""

    async def objects() -> bool:
        return any(span.name == semconv.OBJECT for span in await store.query_spans(rollout_id))

    await until(objects)
    return (await how_it_ended(store, rollout_id)).emitted()["pids"]


@pytest.mark.slow
async def test_a_cancelled_rollout_frees_its_process(brief_store: SqlStore) -> None:
    rollout = await brief_store.enqueue_rollout({"do": "hang"})
    async with running(Runner(brief_store, isolated.acts, concurrency=1, isolation="process")):
        await begun(brief_store, rollout.rollout_id)
        await brief_store.cancel_rollout(rollout.rollout_id)
        (again,) = [(await brief_store.enqueue_rollout(task)).rollout_id for task in does("nothing")]
        (after,) = await brief_store.wait_for_rollouts([again], timeout=60)
    assert after.status == "succeeded"


# --- clients that are made once --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("asks", 2), ("asks_async", 1)])
async def test_a_client_made_when_the_module_is_imported_belongs_to_each_attempt_in_turn(
    store: SqlStore, name: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # the runner's own is not the agent's
    async with gateway_before(Upstream(GOOD), store) as front:
        await store.add_resources({"llm": LLM(endpoint=f"{front.url}/v1", model="policy", gateway=True)})
        agent = f"tests.runner.agents.global_client:{name}"
        before = set(sys.modules)
        several = await ran(store, *[f"question {n}" for n in range(6)], agent=agent, concurrency=processes)
        assert "tests.runner.agents.global_client" not in set(sys.modules) - before
    for number, one in enumerate(several):
        (call,) = (span for span in one.spans if span.tokens is not None or semconv.CALL_INDEX in span.attributes)
        assert f"question {number}" in str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES])
        assert (one.status, one.reward) == ("succeeded", 1.0)


async def test_each_attempt_has_its_ids_in_the_environment_and_never_the_servers_key(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_KEY", "which opens the store")
    for one in await ran(store, *does("environment", "environment")):
        ids = {"AGL_ROLLOUT_ID": one.attempt.rollout_id, "AGL_ATTEMPT_ID": one.attempt.attempt_id}
        assert one.emitted() == {"AGL_KEY": None, **ids}


# --- what an agent has to itself, and what it is given --------------------------------------------------------------


def calls_of(one: Ran) -> list[str]:
    calls = (span.attributes for span in one.spans if semconv.CALL_INDEX in span.attributes)
    return [str(attributes[semconv.GEN_AI_INPUT_MESSAGES]) for attributes in calls]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_each_rollout_has_an_agent_of_its_own_with_what_it_keeps(
    store: SqlStore, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    concurrency = 3 if isolation == "none" else 1
    monkeypatch.setattr(kept, "together", asyncio.Barrier(3) if concurrency == 3 else None)
    async with gateway_before(Upstream(GOOD), store) as front:
        await store.add_resources({"llm": LLM(endpoint=f"{front.url}/v1", model="policy", gateway=True)})
        options: Any = {"agent": "tests.runner.agents.kept:keeper", "isolation": isolation, "concurrency": concurrency}
        several = await ran(store, *[f"question {n}" for n in range(3)], **options)
    for number, one in enumerate(several):
        assert (one.status, one.reward) == ("succeeded", 1.0), one.reason
        assert [f"question {number}" in call for call in calls_of(one)] == [True, True]
    # What is large, or cannot be copied, is everybody's.
    assert len({json.dumps(one.emitted()) for one in several}) == 1
    assert kept.keeper.client is None and not kept.keeper.history


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_a_call_with_the_client_of_another_rollout_is_refused_and_recorded_nowhere(
    store: SqlStore, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    concurrency = 3 if isolation == "none" else 1
    monkeypatch.setattr(kept, "together", asyncio.Barrier(3) if concurrency == 3 else None)
    monkeypatch.setattr(kept, "shared", None)
    async with gateway_before(Upstream(GOOD), store) as front:
        await store.add_resources({"llm": LLM(endpoint=f"{front.url}/v1", model="policy", gateway=True)})
        options: Any = {"agent": kept.first_comes, "isolation": isolation, "concurrency": concurrency}
        several = await ran(store, "a", "b", "c", **options)
        if kept.shared is not None:
            await kept.shared.close()
    (whole,) = [one for one in several if one.status == "succeeded"]
    assert len(calls_of(whole)) == 1
    for one in several:
        if one is not whole:
            assert one.status == "failed" and not calls_of(one)
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


def with_kept(task: Any, history: list[str], retriever: Any, lock: Any) -> float:
    return 1.0


def test_a_partial_is_copied_as_an_object_is() -> None:
    retriever, lock = Retriever(), threading.Lock()
    agent = functools.partial(with_kept, history=[], retriever=retriever, lock=lock)
    copied = cast("Any", own_copies(as_agent(agent))()).function
    assert copied.keywords["history"] is not agent.keywords["history"]
    assert copied.keywords["retriever"] is retriever and copied.keywords["lock"] is lock


def test_what_is_large_or_limits_all_is_shared_wherever_it_is() -> None:
    class Agent(agl.LitAgent):
        def __init__(self) -> None:
            self.retriever, self.limiter = Retriever(), Limiter()

    agent = Agent()
    copied = cast("Any", own_copies(agent)())
    assert copied.retriever is agent.retriever
    assert copied.limiter.semaphore is agent.limiter.semaphore
    assert copied.limiter.waited is not agent.limiter.waited


def test_what_cannot_be_copied_is_not_copied_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent(agl.LitAgent):
        def __init__(self) -> None:
            self.client = Client()

    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    agent = Agent()
    assert cast("Any", own_copies(agent)()).client is agent.client
    assert not unraisable


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize("kind", kept.KINDS)
async def test_resources_are_the_same_for_every_kind_of_agent_in_every_isolation(
    store: SqlStore, kind: str, isolation: str
) -> None:
    llm, prompt = (
        LLM(endpoint="http://127.0.0.1:9/v1", model="policy", gateway=True),
        agl.PromptTemplate(template="Hi, {name}"),
    )
    await store.add_resources({"llm": llm, "prompt": prompt, "judge": msgspec.structs.replace(llm, api_key="own")})
    (one,) = await ran(store, "task", agent=kept.KINDS[kind], isolation=isolation)
    assert (one.status, one.reward) == ("succeeded", 1.0), one.reason
    assert one.emitted() == {
        "main": True,
        "type": "AgentResources",
        "names": ["judge", "llm", "prompt"],
        "types": ["LLM", "LLM", "PromptTemplate"],
        "bound": True,
        "prompt": "Hi, you",
    }


# --- which agents ----------------------------------------------------------------------------------------------------


async def test_one_that_no_other_process_can_import_is_refused_at_once(store: SqlStore) -> None:
    def local(task: Any) -> float:
        return 1.0

    for agent in (local, lambda task: 1.0, agl.rollout(local)):
        with pytest.raises(ConfigError, match=r"cannot be brought into another process.*Define it at the top level"):
            Runner(store, agent, isolation="process")
    with pytest.raises(ConfigError, match="a command already runs in its own process"):
        Runner(store, agl.command("true"), isolation="process")
    with pytest.raises(ConfigError, match="isolation is 'proces'; did you mean 'process'"):
        Runner(store, isolated.plain, isolation="proces")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("agent", "place"),
    [
        (isolated.plain, "process"),
        (kept.function, "none"),
        (kept.first_comes, "none"),
        (isolated.stateful, "none"),
        (agl.command("true"), "none"),
        ("tests.runner.agents.kept:decorated", "none"),
        ("tests.runner.agents.isolated:plain", "process"),
        ("tests.runner.agents.refuses:agent", "process"),  # to be imported here
    ],
)
def test_auto_gives_a_process_to_those_that_only_find_their_model_in_the_environment(agent: Any, place: str) -> None:
    assert place_of(as_agent(agent), "auto") == place
    assert place_of(as_agent(agent), "auto", served=False) != "process"


async def test_without_one_such_an_agent_fails_rather_than_call_another_model(store: SqlStore) -> None:
    with pytest.raises(ConfigError, match="not defined"):
        place_of(as_agent("tests.runner.agents.broken:agent"), "auto")
    (fine,) = await ran(store, "task", agent=isolated.plain, isolation="auto")
    await store.add_resources({"llm": LLM(endpoint="http://127.0.0.1:9/v1", model="policy", gateway=True)})
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
async def test_one_that_fails_to_import_ends_the_runner_and_costs_no_rollout(
    store: SqlStore, name: str, reason: str
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    rollout = await store.enqueue_rollout({}, config=config)
    with pytest.raises(ConfigError, match=reason):
        await asyncio.wait_for(Runner(store, name, concurrency=8, isolation="process").run(), 60)
    kept = await store.get_rollout_by_id(rollout.rollout_id)
    assert kept is not None
    assert kept.status == "requeuing"
    assert len(await store.query_attempts(rollout.rollout_id)) == 1  # no other process of the runner took it


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
async def test_an_agent_may_be_defined_in_the_main_script(tmp_path: Path, guard: str, said: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % guard)
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=pipe, stderr=both)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert said in output.decode()


# --- hooks, debugging and the end ------------------------------------------------------------------------------------


class Seen(agl.Hook):
    """Hooks run with the runner, whatever becomes of the agent's process."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def on_rollout_start(self, **_: Any) -> None:
        self.calls.append("start")

    async def on_trace_end(self, *, tracer: Any, **_: Any) -> None:
        self.calls.append(f"{len(tracer.get_last_trace())} spans")
        agl.emit_message("from the hook")

    async def on_rollout_end(self, *, spans: Sequence[Span], **_: Any) -> None:
        self.calls.append("end")


async def test_hooks_run_beside_the_runner_and_see_the_agents_spans(store: SqlStore) -> None:
    seen = Seen()
    counted, crashed = await ran(store, *does("count", "exit"), hooks=[seen])
    assert seen.calls == ["start", "1 spans", "end", "start", "2 spans", "end"]  # the crash: a reward and its output
    assert counted.messages() == crashed.messages() == ["from the hook"]
    assert counted.reward == counted.pid  # the returned reward is still the last word


async def test_a_runner_that_is_cancelled_kills_its_processes_and_hands_their_attempts_back(
    brief_store: SqlStore,
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    rollout = await brief_store.enqueue_rollout({"do": "hang"}, config=config)
    task = asyncio.create_task(Runner(brief_store, isolated.acts, concurrency=1, isolation="process").run())
    pids = await begun(brief_store, rollout.rollout_id)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    ended = await how_it_ended(brief_store, rollout.rollout_id)
    assert (ended.status, ended.reason) == ("unresponsive", "its runner was stopped")
    for pid in pids:
        await until(lambda pid=pid: not alive(pid))


async def test_the_processes_of_a_killed_runner_end_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from agentlightning.runner.runner import Runner\n"
        "from agentlightning.store.sql import SqlStore\n"
        "from tests.runner.agents import isolated\n"
        "async def main():\n"
        f"    store = await SqlStore.open({str(tmp_path / 's.db')!r})\n"
        "    await store.enqueue_rollout({'do': 'hang'})\n"
        "    task = asyncio.create_task(Runner(store, isolated.acts, concurrency=1, isolation='process').run())\n"
        "    (worker,) = await asyncio.to_thread(lambda: [input()])\n"
        "asyncio.run(main())\n"
    )
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    runner = await asyncio.create_subprocess_exec(sys.executable, str(script), stdin=pipe, env=environment)
    children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")

    def family() -> list[int]:
        below = [int(pid) for pid in children.read_text().split()]
        return below + [int(pid) for one in below for pid in _children(one)]

    await until(lambda: len(family()) == 2)  # the agent's process and its child, which heeds no SIGTERM
    pids = family()
    runner.send_signal(signal.SIGKILL)
    await runner.wait()
    for pid in pids:
        await until(lambda pid=pid: not alive(pid))


def _children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
