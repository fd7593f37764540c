"""Any program is an agent: how it gets its task, how its reward is read, and how it is ended with
all it started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.runner.command import CommandAgent, CommandFailedError, CommandOutput, command
from agentlightning.runner.runner import Runner
from agentlightning.semconv import LOG
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import RolloutConfig, Span
from tests.runner.world import (
    Endpoint,
    alive,
    enqueue,
    log_of,
    reason_of,
    run_to_end,
    running,
    statuses,
    until,
)

pytestmark = pytest.mark.anyio
on_linux = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="there is no /proc to look into"
)


async def run(store: agl.LightningStore, agent: CommandAgent, task: Any = "hi") -> list[Span]:
    """The spans of one rollout; raises what failed it."""
    rollout = await Runner(store, agent).run_one(task, {})
    return await store.query_spans(rollout.rollout_id)


async def reward(
    store: agl.LightningStore, line: str, task: Any = "hi", **options: Any
) -> float | None:
    return agl.find_final_reward(await run(store, command(line, **options), task))


def script(tmp_path: Path, text: str, name: str = "agent.py") -> str:
    """The command that runs a Python program."""
    (tmp_path / name).write_text(text)
    return f"{sys.executable} {tmp_path / name}"


@pytest.fixture
async def served(store: SqlStore) -> AsyncIterator[LightningStoreClient]:
    """The store behind a server with an admin key."""
    async with HttpServer(create_app(store, admin_key="an admin's key")) as server:
        client = LightningStoreClient(server.url, api_key="an admin's key")
        yield client
        await client.close()


# --- the task -------------------------------------------------------------------------------------


async def test_the_task_is_json_on_stdin_and_a_field_that_it_lacks_is_named(
    store: SqlStore,
) -> None:
    assert log_of(await run(store, command("cat"), {"city": "Köln"})) == '{"city":"Köln"}\n'
    assert log_of(await run(store, command("cat /dev/stdin"), "hi")) == '"hi"\n'
    with pytest.raises(ConfigError, match=r"\{task\.citty\}.*did you mean 'city'"):
        await run(store, command("echo {task.citty}"), {"city": "Köln"})
    for task in ("a\0b", "x" * 3_000_000):  # is no argument
        with pytest.raises(ConfigError, match="cannot be started"):
            await run(store, command("echo {task}"), task)


@pytest.mark.parametrize(
    ("place", "argument"),
    [
        ("{task}", '{"q":"it\'s; $(rm) \\"x\\"","n":[1,{"deep":2}]}'),
        ("{task[q]}", 'it\'s; $(rm) "x"'),
        ("--q={task.q}", '--q=it\'s; $(rm) "x"'),
        ("{task.n[1].deep}", "2"),
        ("{task.n}", '[1,{"deep":2}]'),
        ('{\\"braces\\":1}', '{"braces":1}'),
    ],
)
async def test_a_place_in_the_command_is_one_argument_whatever_the_task_holds(
    store: SqlStore, tmp_path: Path, place: str, argument: str
) -> None:
    line = script(tmp_path, "import sys, json; print(json.dumps(sys.argv[1:]))")
    spans = await run(
        store, command(f"{line} {place}"), {"q": 'it\'s; $(rm) "x"', "n": [1, {"deep": 2}]}
    )
    assert json.loads(log_of(spans)) == [argument]


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("", {}, "empty"),
        ("echo 'a", {}, "split"),
        ("echo a | cat", {}, "no shell runs it"),
        ("sh -c 'echo {task}'", {}, "run as code"),
        ("echo", {"reward": "std"}, "did you mean 'stdout'"),
        ("echo", {"reward": "stdout", "grader": "cat"}, "either the grader's"),
        ("no-such-program", {}, "not on the PATH"),
        ("./agent.sh", {"cwd": "/nowhere"}, "no directory"),
        ("./nothing.sh", {"cwd": "/"}, "not there"),
        ("./etc/passwd", {"cwd": "/"}, "not executable"),
    ],
)
async def test_a_command_that_cannot_work_is_refused_before_anything_runs(
    store: SqlStore, line: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(store, command(line, **options))


# --- the reward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "output", "value"),
    [
        ("stdout", "thinking\\n0.7\\n\\n", 0.7),
        ("stdout", '{"a": 1, "b": 2, "primary_key": "b"}', 2.0),
        ("stdout", "-1", -1.0),
        ("auto", '{"reward": 0.3}', 0.3),
        ("auto", "42", None),  # an answer
        ("auto", '{"answer": 42}', None),
        ("auto", "", None),
    ],
)
async def test_the_last_line_of_stdout(
    store: SqlStore, source: Any, output: str, value: float | None
) -> None:
    assert await reward(store, f"printf -- '{output}'", reward=source) == value


@pytest.mark.parametrize(
    "output", ["", "done", "NaN", "inf", '{"reward": null}', "\\355\\240\\275", "1.0."]
)
async def test_what_is_no_reward_is_never_taken_for_one(store: SqlStore, output: str) -> None:
    with pytest.raises(InvalidError, match="the last line of the command's stdout"):
        await reward(store, f"printf '{output}'", reward="stdout")


async def test_a_grader_decides_alone(store: SqlStore, tmp_path: Path) -> None:
    def length(task: dict[str, Any], output: CommandOutput) -> float:
        return len(output.stdout) + task["n"]

    async def named(task: Any, output: CommandOutput) -> dict[str, float]:
        return {"reward": 0.5, "short": 1.0}

    line = "sh -c 'echo ${AGL_REWARD_URL-none}none'"
    assert await reward(store, line, {"n": 1}, grader=length) == 10.0
    assert await reward(store, line, grader=named) == 0.5
    grading = (
        "import json, sys; given = json.load(sys.stdin); print(given['task'] + given['stdout'] == "
        "'hi6\\n"
        "')"
    )
    program = script(tmp_path, f"{grading}; print(0.25)", "grade.py")
    assert await reward(store, "echo 6", grader=program) == 0.25
    with pytest.raises(CommandFailedError, match="the grader's command exited with status 1"):
        await reward(store, "echo 6", grader="false")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_shell_script_that_posts_its_reward(
    served: LightningStoreClient, store: SqlStore
) -> None:
    post = 'curl -sf -d 0.7 "$AGL_REWARD_URL"'
    assert await reward(served, f"sh -c '{post}'") == 0.7
    assert await reward(served, f"sh -c '{post}; echo 42'") == 0.7
    with pytest.raises(CommandFailedError):  # no URL for one whose stdout is the reward
        await reward(served, f"sh -c '{post}'", reward="stdout")


CALLS = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": []}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(os.environ["AGL_KEY"] == "an admin's key", os.environ["OWN"], os.getcwd(), os.environ["PWD"])
print(float(answer == "hello"))
"""


async def test_a_program_that_knows_openais_variables_calls_as_its_attempt_without_the_servers_key(
    store: SqlStore, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_KEY", "an admin's key")
    agent = command(
        script(tmp_path, CALLS),
        reward="stdout",
        env={"no_proxy": "127.0.0.1", "OWN": "mine"},
        cwd=tmp_path,
    )
    llm = agl.LLM(endpoint=endpoint.url, model="policy", gateway=True)
    rollout = await Runner(store, agent).run_one("hi", {"llm": llm})
    ((path, _),) = endpoint.calls
    assert path.startswith(f"/rollout/{rollout.rollout_id}/attempt/")
    spans = await store.query_spans(rollout.rollout_id)
    assert agl.find_final_reward(spans) == 1.0
    assert log_of(spans) == f"False mine {tmp_path} {tmp_path}\n1.0\n"


# --- how it ends ----------------------------------------------------------------------------------


async def test_a_status_other_than_0_fails_the_attempt_with_the_end_of_stderr(
    store: SqlStore,
) -> None:
    failing = command("sh -c 'echo 1; echo first >&2; echo no ticket >&2; exit 3'")
    (ended,) = await run_to_end(store, failing, "hi")
    assert ended.status == "failed"
    expected = "CommandFailedError: the command exited with status 3: no ticket\nfirst\nno ticket"
    assert await reason_of(store, ended.rollout_id) == expected
    spans = await store.query_spans(ended.rollout_id)
    assert (log_of(spans), log_of(spans, "stderr")) == ("1\n", "first\nno ticket\n")
    assert agl.find_final_reward(spans) is None
    with pytest.raises(CommandFailedError, match="killed by signal 9"):
        await run(store, command("sh -c 'kill -9 $$'"))


FORKING = """
import os, pathlib, signal, sys, time
folder, *options = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    if "escape" in options:
        os.setsid()
    os.write(writing, b"1")
    time.sleep(600)
os.read(reading, 1)
pathlib.Path(folder, "pids").write_text(f"{os.getpid()} {child}")
if "stay" in options:
    time.sleep(600)
"""


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def pids_in(folder: Path) -> tuple[int, int]:
    """The parent and the child of FORKING, once there are both."""
    file = folder / "pids"
    await until(lambda: file.exists() and " " in file.read_text(), 20)
    parent, child = file.read_text().split()
    return int(parent), int(child)


@on_linux
async def test_nothing_that_a_program_started_outlives_it_or_holds_it_up(
    store: SqlStore, tmp_path: Path
) -> None:
    forking = f"{script(tmp_path, FORKING)} {tmp_path}"
    await run(store, command(forking))
    parent, child = await pids_in(tmp_path)
    assert not is_there(parent)  # nor is there a zombie
    await until(lambda: not alive(child), 20)
    started = time.monotonic()
    await run(store, command(f"{forking} escape"))
    assert time.monotonic() - started < 10
    os.kill((await pids_in(tmp_path))[1], signal.SIGKILL)  # which raises where there is none


@pytest.mark.slow
@on_linux
async def test_a_program_past_its_timeout_is_ended_with_all_its_kin_though_they_ignore_sigterm(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.runner.command.GRACE_SECONDS", 0.2)
    (rollout_id,) = await enqueue(store, "hi", config=RolloutConfig(timeout_seconds=1.5))
    async with running(Runner(store, command(f"{script(tmp_path, FORKING)} {tmp_path} stay"))):
        parent, child = await pids_in(tmp_path)
        await store.wait_for_rollouts([rollout_id], timeout=60)
    assert await statuses(store, rollout_id) == [["timeout"]]
    assert not is_there(parent)
    await until(lambda: not alive(child), 20)


async def test_a_program_that_stops_at_sigterm_may_still_say_goodbye(store: SqlStore) -> None:
    polite = command("sh -c 'trap \"echo bye; exit 0\" TERM; sleep 600 & wait'")
    (rollout,) = await run_to_end(store, polite, "hi", config=RolloutConfig(timeout_seconds=1.0))
    spans = await store.query_spans(rollout.rollout_id)
    assert log_of(spans) == "bye\n"
    assert [span.name for span in spans] == [LOG]
