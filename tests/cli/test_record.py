"""`agl record`: a program that knows nothing of us is run as it is, and recorded."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import agentlightning as agl
from agentlightning import semconv
from agentlightning.cli.main import run
from agentlightning.errors import TrainingError
from agentlightning.runner.harnesses import PRESETS
from agentlightning.store.sql import SqlStore
from agentlightning.store.transfer import Record
from tests import agents
from tests.gateway.upstream import DONE, Upstream, chunk, piece
from tests.gateway.world import serving
from tests.node import NODE
from tests.test_trainer import policy, trainer

USAGE = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
HI = [chunk({"index": 0, "delta": {"content": "Hi!"}, "finish_reason": "stop"}, usage=USAGE), DONE]
BONJOUR = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "Bonjour"}],
    "usage": {"input_tokens": 7, "output_tokens": 3},
}

# What the programs below begin with: a client of both APIs that needs no package.
CLIENT = """
import json, os, sys, urllib.request
def post(url, key, **body):
    headers = {"authorization": "Bearer " + key, "x-api-key": key, "anthropic-version": "2023-06-01"}
    body = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)
def ask(text):
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"],
                  model="gpt-5", messages=[{"role": "user", "content": text}])
    return answer["choices"][0]["message"]["content"]
"""


class Apis(Upstream):
    """Stands in for OpenAI's and Anthropic's."""

    @asynccontextmanager
    async def served(self) -> Any:
        routes = [
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/messages", self.message, methods=["POST"]),
        ]
        async with serving(Starlette(routes=routes)) as url:
            yield url

    async def message(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse(BONJOUR)


@dataclass
class Desk:
    """A directory to run programs in, and the APIs that they call."""

    apis: Apis
    url: str
    portal: BlockingPortal
    store: str = "agentlightning.sqlite"

    def run(self, program: str, *options: str) -> int:
        return run(["record", *options, "--", sys.executable, "-c", CLIENT + program])

    def recorded(self) -> Record:
        """The only rollout in the store."""
        return asyncio.run(self._recorded())

    async def _recorded(self) -> Record:
        store = await SqlStore.open(self.store)
        try:
            (rollout,) = await store.query_rollouts()
            attempts = await store.query_attempts(rollout.rollout_id)
            return Record(
                rollout=rollout,
                attempts=attempts,
                spans=await store.query_spans(rollout.rollout_id),
            )
        finally:
            await store.close()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    apis = Apis(HI)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(apis.served()) as url:
        for name in [
            name for name in os.environ if name.startswith(("OPENAI_", "ANTHROPIC_", "AGL_"))
        ]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-0123456789")
        yield Desk(apis, url, portal)


def test_what_vllm_sampled_for_a_program_is_trained(desk: Desk, tmp_path: Path) -> None:
    learner = policy()
    asked, said = (
        learner.tokenizer.encode(text, add_special_tokens=False) for text in ("hello", "red green")
    )
    desk.apis.events = [
        chunk(
            piece("red green", said, [-1.0] * len(said), finish_reason="stop"),
            prompt_token_ids=asked,
        ),
        chunk(
            usage={"prompt_tokens": len(asked), "completion_tokens": len(said), "total_tokens": 0}
        ),
        DONE,
    ]
    program = (
        'ask("hello"); '
        'urllib.request.urlopen(urllib.request.Request(os.environ["AGL_REWARD_URL"], b"0.7"))'
    )
    assert desk.run(program, "--backend", f"{desk.url}/v1", "--kind", "vllm") == 0
    imitation = agl.SFT(traces=desk.store, best=None, threshold=0.5, steps=1, tasks_per_step=1)
    for name in ("policy", "gpt-5"):
        job = trainer(tmp_path / name, model=learner, model_name=name, algorithm=imitation)
        with (
            pytest.raises(TrainingError, match="Their model is called gpt-5")
            if name == "policy"
            else nullcontext()
        ):
            assert job.fit(agents.vowels).metrics[-1].values["sequences"] == 1


# --- harnesses ------------------------------------------------------------------------------------

HARNESSES = Path(__file__).parents[2] / ".harnesses" / "node_modules" / ".bin"  # `make harnesses`
ASKED = {  # Codex asks at /v1/responses, which the stand-in has not
    "claude-code": ("-p", "hi"),
    "gemini-cli": ("-p", "hi", "--skip-trust"),
    "opencode": ("run", "hi"),
    "qwen-code": ("-p", "hi"),
    "aider": ("--no-git", "--yes-always", "--message", "hi"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_harness_that_is_installed_is_recorded_and_leaves_no_trace(
    desk: Desk, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(HARNESSES), str(NODE.parent), os.environ["PATH"]))
    )
    if shutil.which(PRESETS[name].program) is None:
        assert name == "aider" or not os.environ.get("AGL_REQUIRE_NODE"), (
            "make harnesses installs what is missing"
        )
        pytest.skip(f"there is no {PRESETS[name].program}: {PRESETS[name].install}")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert run(["record", "--harness", name, "--model", "policy", "--", *ASKED[name]]) == 0
    record = desk.recorded()
    assert any(semconv.CALL_ENDPOINT in span.attributes for span in record.spans)
    assert not [*home.iterdir()]


# --- what is recorded -----------------------------------------------------------------------------


def test_a_program_that_calls_both_apis_is_recorded_and_its_end_passed_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", desk.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789")
    program = """
print(ask("hello"))
claude = post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", os.environ["ANTHROPIC_API_KEY"], model="claude",
              max_tokens=9, messages=[{"role": "user", "content": "hello"}])
print(claude["content"][0]["text"], sys.stdin.read())
urllib.request.urlopen(urllib.request.Request(os.environ["AGL_REWARD_URL"], b"0.7"))
print("models: ", [name for name in os.environ if name.endswith("_MODEL")], file=sys.stderr)
sys.exit(3)
"""
    assert desk.run(program) == 3
    written, told = capfd.readouterr()
    assert written == "Hi!\nBonjour \n"
    openai, anthropic = desk.apis.headers
    assert openai["authorization"] == "Bearer sk-openai-0123456789"
    assert anthropic["x-api-key"] == "sk-ant-0123456789" and "authorization" not in anthropic
    record = desk.recorded()
    assert (record.rollout.status, record.rollout.mode) == ("failed", "test")
    assert record.rollout.input.startswith(f"{sys.executable} -c ")
    assert record.attempts[0].metadata == {"reason": "ProgramFailed: exit code 3"}
    for line in (
        "models:  []",
        f"{record.rollout.rollout_id}  failed  reward 0.7  2 calls  1,007 → 23 tokens",
        "call gpt-5  1,000 → 20 tokens",
        "“Hi!”",
        "call claude  7 → 3 tokens",
        f"agl rollouts show {record.rollout.rollout_id} --store agentlightning.sqlite",
    ):
        assert line in told


def test_a_program_is_told_what_was_recorded_and_nothing_else(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    assert desk.run("print(ask('hello')); sys.exit(3)", "--json") == 3
    out, err = capfd.readouterr()
    assert err.startswith("Hi!\n")
    found = {
        "status": "failed",
        "reward": None,
        "exit_code": 3,
        "calls": 1,
        "tokens_read": 1000,
        "tokens_written": 20,
    }
    ids = {"rollout_id": desk.recorded().rollout.rollout_id}
    assert json.loads(out) == found | ids | {"not_answered": {}}


def test_what_was_refused_is_told_with_the_reason(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
for path in ("/audio/speech", "/chat/completions", "/chat/completions"):
    try:
        post(os.environ["OPENAI_BASE_URL"] + path, os.environ["OPENAI_API_KEY"], messages="hello")
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    assert desk.run(program) == 0
    out, told = capfd.readouterr()
    assert out == "404\n400\n400\n"
    assert "not answered: /v1/audio/speech: 404 there is no POST /v1/audio/speech here" in told
    assert (
        "not answered (2 times): /v1/chat/completions: 400 " in told and "base" not in told.lower()
    )


def test_the_keys_that_are_ours_alone_reach_neither_the_program_nor_the_screen(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_KEY", "agl-key-0123456789")
    monkeypatch.setenv("AGL_BACKEND_KEY", "sk-backend-0123456789")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://elsewhere")
    assert desk.run("print(dict(os.environ))") == 0
    said = capfd.readouterr().out
    assert "OPENAI_API_KEY" in said and not any(
        ours in said for ours in ("0123456789", "http://elsewhere")
    )


def test_a_task_is_the_input_where_one_is_given(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    # which is not waited for
    left = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    assert desk.run(left, "--task", '{"question": "2+2"}', "--store", "other.sqlite") == 0
    desk.store = "other.sqlite"
    record = desk.recorded()
    assert record.rollout.input == {"question": "2+2"} and record.rollout.status == "succeeded"
    assert record.spans == []
    out, err = capfd.readouterr()
    os.kill(int(out), signal.SIGKILL)
    assert "no call of a language model was recorded" in err


def test_what_an_instrumented_program_traces_stands_beside_its_calls(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
from opentelemetry import trace
with trace.get_tracer("mine").start_as_current_span("desk", attributes={
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "desk"}):
    ask("hello")
"""
    assert desk.run(program, "--instrument") == 0
    record = desk.recorded()
    assert {"desk", "chat gpt-5"} <= {span.name for span in record.spans}
    assert "agent desk" in capfd.readouterr().err


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--", "no-such-program"], 1, "'no-such-program' cannot be started"),
        (["--task", "{", "--", "true"], 2, "a task is JSON"),
        (["--backend", "localhost", "--", "true"], 1, "must be a URL"),
        ([], 2, "Missing argument"),
    ],
)
def test_a_mistake_is_explained(
    desk: Desk, arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["record", *arguments]) == code
    told = capfd.readouterr().err
    assert said in told and "Traceback" not in told


# --- signals --------------------------------------------------------------------------------------

ANSWERS = """
import signal, sys, time
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
print("ready", sys.stdout.isatty(), flush=True)
while not asked:
    time.sleep(0.02)
time.sleep(0.2)
print("asked", len(asked), flush=True)
sys.exit(5)
"""


def command(program: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "record",
        "--",
        sys.executable,
        "-c",
        program,
    ]


@pytest.mark.slow
def test_an_interrupt_is_the_programs_to_answer(desk: Desk) -> None:
    with subprocess.Popen(
        command(ANSWERS), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready False\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"asked 1\n"
    assert process.returncode == 5
    assert desk.recorded().rollout.status == "failed"


def test_a_sitecustomize_of_the_programs_own_is_imported_too(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("own").mkdir()
    Path("own/sitecustomize.py").write_text("print('own')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["own", str(Path(__file__).parents[2])]))
    assert run(["record", "--instrument", "--", sys.executable, "-c", "print('ran')"]) == 0
    assert capfd.readouterr().out == "own\nran\n"


@pytest.mark.slow
def test_on_a_terminal_the_program_has_a_terminal_and_hears_ctrl_c_once(desk: Desk) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command(ANSWERS),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.login_tty(0),
    )
    os.close(theirs)
    shown = b""
    while b"ready True\r\n" not in shown:
        shown += os.read(ours, 1000)
    os.write(ours, b"\x03")
    while not (asked := re.search(rb"asked (\d+)\r\n", shown)):
        shown += os.read(ours, 1000)
    assert asked[1] == b"1"
    while process.poll() is None:  # what it prints at its end must be read for it to end
        try:
            os.read(ours, 1000)
        except OSError:  # nobody writes there any more
            process.wait(10)
    os.close(ours)
    assert process.returncode == 5
