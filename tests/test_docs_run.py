"""Every block of the README and of docs/ runs, in the order of its page, from an installed wheel,
with a tiny model in place of a large one. With AGL_WAYS=1 (`make ways`) the pages in WHOLE train as
long as they print, and their figures are compared."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import wheels
from tests.datasets.test_hub import Hub
from tests.docs_pages import ROOT, SHELLS, Page, agl_environment, free_port, read_blocks
from tests.frameworks.world import bin_of

LANGUAGES = ("python", "yaml", "javascript", *SHELLS)
LONG = ("README.md", "docs/agents.md", "docs/tutorial.md")  # half of the time, for another process
WHOLE = (
    ("docs/tutorial.md", "docs/install.md", "docs/record.md") if os.environ.get("AGL_WAYS") else ()
)
PAGES = [
    "README.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]

# What does not run here, and why. A pattern that no block matches any more fails the test of its
# page.
SKIPPED = {
    "README.md": {
        "git clone": "this is the clone",
        "^make ": "`make smoke` and the tests of the command line run these",
        "^open ": "opens a browser",
        "--ray ": "tests/runner/test_ray.py",
        r"sampler\.vllm|learner\.tinker": "a GPU's servers; tests/learner/test_servers.py, test_tinker.py",
        "^pip install": "tests/test_wheel.py",
    },
    "docs/how-it-works.md": {
        "--explain": "of a rollout that trained; tests/cli/test_token_path.py"
    },
    "docs/install.md": {
        "^make ": "`make smoke`",
        "^pip install .*agent-lightning": "tests/test_wheel.py",
        **({} if WHOLE else {"^pip install pytest": "it is among the packages beside the wheel"}),
    },
    "docs/agents.md": {
        "^# agent.py, of LangChain": "an excerpt of the file that the next command trains",
        "^# rollout.py|^# run.yaml\nagent: rollout.py": "the same",
        "examples/harnesses": "needs Claude Code and Codex; tests/runner/test_harnesses.py",
        "^agent:\n  harness:": "the same",
        "verifiers": "needs an environment of its own; tests/environments",
        "inspect:tasks.py": "the same",
        "--ray |--kubernetes ": "needs a cluster; tests/runner/test_ray.py, test_kubernetes.py",
        "^pip install": "tests/test_wheel.py",
    },
    "docs/evaluation.md": {
        "name: gepa": "tests/laptop/apo.yaml runs before the page, with another endpoint",
        "examples/flight/train.py": "the line above with other files; the quickstart takes minutes",
    },
    "docs/operate.md": {
        "^docker |^printf": "tests/test_containers.py",
        "^pip install": "tests/test_wheel.py",
        "postgresql://": "needs PostgreSQL; tests/store, tests/cli/test_store.py",
    },
    "docs/record.md": {
        "^receivers:": "a file of the OpenTelemetry Collector",
        "^agl.instrument": "needs LangChain; tests/tracing/test_instrument.py",
        "^from datasets import": "tests/datasets/test_trl.py runs it where TRL is installed",
    },
    "docs/tasks.md": {
        "RelativeJudge": "tests/rewards/test_relative.py; the model here cannot rank",
        "judge:": "tests/algorithm/test_judging.py; the same",
    },
    "docs/training.md": {
        "^agl improve": "needs a model that edits; tests/cli/test_improve.py",
        "^VLLM_|sglang.launch|sampler: {vllm|learner: tinker|teacher: {vllm": "a GPU's servers; tests/learner",
    },
    "docs/tutorial.md": {
        "^pip install": "tests/test_wheel.py",
        "^# agent.py|^# rewarded.py": "LangChain is in an environment of its own; the commands run these files",
        "^model: Qwen": "the tutorial's model knows only its own words",
        **(
            {}
            if WHOLE
            else {"another_model": "its demonstrations are those of a whole training; make ways"}
        ),
    },
    "docs/watch.md": {
        "^# run.yaml\ntrackers": "tests/algorithm/test_tracking.py, where the trackers are installed"
    },
    "docs/reference/compatibility.md": {"^# 0.3\n": "the first half is for another version"},
}

# Pattern → what takes its place in a block, so that a training is short.
SHORTER = {
    r"\bsteps: \d+": "steps: 1",
    r"\bsteps=\d+": "steps=1",
    r"--steps 50": "--steps 1",
    r"--seeds \d": "--seeds 1",
    r"agl train (?= .* seconds )": "agl train --steps 1",
    r"^agl train run.yaml$": "agl train run.yaml --steps 1",
    r"agl train --model hf:": "agl train --steps 1 --model hf:",
    r"learning_rate=1e-3,1e-2": "learning_rate=1e-3",
    r"\.\./tasks.jsonl --model": "../tasks.jsonl --limit 2 --model",
    r"(--at |ID@)3": r"\g<1>0",
    r"-k 1,8 ": "-k 1 ",
    r"best: 1, threshold: 0.5": "best: null, threshold: 0.0",
}

# Python that a page takes for granted, and shell lines that come before its first block.
NAMES = {
    "docs/agents.md": "from openai import OpenAI\nfrom agent import agent, solve\n"
    "task = {'question': 'What is 1+1?', 'answer': '2'}\nasync def grade(task, trace): return 1.0",
    "docs/evaluation.md": (
        "from agent import agent, book_room\n"
        "tasks = train_tasks = held_out_tasks = [{'question': 'What is 1+1?', 'answer': '2', "
        "'kind': 'sum'}]"
    ),
    "docs/reference/compatibility.md": "rollout_id = 'ROLLOUT'",
    "docs/record.md": "llm, spans = agl.LLM(endpoint='http://127.0.0.1:8000/v1', model='policy'), []",
}
BEFORE = {
    "docs/evaluation.md": [
        "sed -i s,API,https://api.openai.com/v1, apo.yaml",
        "agl train apo.yaml --run-dir runs/apo-1",
    ],
    "docs/operate.md": ["export SERVER=http://localhost:8123"],
    "docs/reference/http.md": ["agl server"],
}


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `agl` and `python` of an environment with the wheel and LangChain: a fresh one
    for whole pages."""
    packages = [*(bin_of("frameworks").parent / "lib").glob("python*/site-packages")]
    place = tmp_path_factory.mktemp("installed") / "env"
    found = (wheels.install_fresh if WHOLE else wheels.install)(wheel, place, packages)
    if not WHOLE:
        shorten_makers(next(place.glob("lib/python*/site-packages/agentlightning/templates")))
    return found


def shorten_makers(folder: Path) -> None:
    """Let the tiny models below a folder be half-trained: the pages show the commands, not what is
    learned."""
    for maker in folder.rglob("tiny_model.py"):
        text = maker.read_text(encoding="utf-8")
        maker.write_text(text.replace(", seed=seed)", ", seed=seed, steps=60)"), encoding="utf-8")


@pytest.fixture(scope="module")
def laptop(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, int]]:
    """A folder with what a reader has: a model, an agent, tasks, a run file and a run; and the port
    of an API."""
    folder, port = tmp_path_factory.mktemp("laptop") / "page", free_port()
    shutil.copytree(ROOT / "tests" / "laptop", folder)
    for name in ("examples", "scripts", "agent-lightning/examples"):
        ignored = shutil.ignore_patterns("__pycache__", "runs", "node_modules")
        shutil.copytree(ROOT / name.removeprefix("agent-lightning/"), folder / name, ignore=ignored)
    if not WHOLE:
        shorten_makers(folder)
    page = Page(folder, agl_environment(programs), {}, {})
    home = page.output("python -c 'import agentlightning as agl; print(agl.__file__)'")
    assert home.startswith(str(programs.parent)), f"the pages run {home}, not the wheel"
    page.shell("python tiny_maker.py", "laptop")
    page.shell("agl train --run-dir runs/quickstart", "laptop")
    for name in (
        "models/writer",
        "models/critic",
        "checkpoints/a",
        "checkpoints/b",
        "runs/base/start",
    ):
        shutil.copytree(folder / "tiny", folder / name)
    page.shell(f"agl serve tiny --port {port}", "laptop")
    yield page, port
    page.finish()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.repositories["datasets/me/flights"] = {
            "tasks.jsonl": (ROOT / "tests" / "laptop" / "tasks.jsonl").read_bytes()
        }
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def stand_ins(page: Page, text: str, api: int) -> dict[str, str | Callable[[], str]]:
    """Pattern → what takes its place in a block, in this order."""
    model = free_port() if "agl serve" in text else api
    server = f"127.0.0.1:{free_port()}"

    def run() -> str:
        found = max(
            page.folder.glob("**/runs/*/checkpoints"), key=lambda path: path.stat().st_mtime
        )
        return f"runs/{found.parent.name}"

    def rollout() -> str:
        return json.loads(page.output("agl rollouts ls --limit 1 --json"))["rollout_id"]

    def key() -> str:
        return json.loads(
            page.output(f"agl keys list --json --server http://{server}").splitlines()[0]
        )["key_id"]

    return {
        r"Qwen/Qwen3-[\d.]+B|/models/qwen3-4b|(?<=--model )policy": str(page.folder / "tiny"),
        r"traces: runs/base": "traces: runs/quickstart",
        r"runs/apo-…@\d": "runs/apo-1@2",
        r"runs/…|runs/\d{8}-\d+|runs/grpo-(?:\d+-\d+-\d+|…)": run,
        r"@\d\d+": "@1",
        r"step-0000\d\d": "step-000001",
        r"--run (?:ID|run-0f3c…)": "--run quickstart",
        r"show grpo-18ea": "show quickstart",
        r"\bID\b|ROLLOUT|run-18ea\w+-val-16-v16-0|flight-18ec\w+-val-12-v12-8": rollout,
        r"key-6c8c…": key,
        r"https://api.openai.com/v1": f"http://127.0.0.1:{api}/v1",
        r"127.0.0.1:(8000|8011)\b": f"127.0.0.1:{model}",
        r"\bagl serve (\S+)": rf"agl serve \1 --port {model}",
        r"^pytest$": "python -m pytest",  # of the packages beside the wheel
        r"--port 8124": "--port 0",
        r"\bagl server\b(?!.*--gateway-of)": f"agl server --port {server.rpartition(':')[2]}",
        r"(?:localhost|127.0.0.1|trainer-host|agl):8123": server,
        r"(?<=--server )URL": f"http://{server}",
        r"/tmp/exportrun": str(page.folder / "exportrun"),
    }


def run_page(name: str, laptop: tuple[Page, int], programs: Path, hub: Hub, folder: Path) -> None:
    blocks = [block for block in read_blocks(ROOT / name) if block.language in LANGUAGES]
    if not blocks:
        pytest.skip("shows nothing to run")
    api = laptop[1]
    shutil.copytree(laptop[0].folder, folder)
    variables = {"OPENAI_BASE_URL": f"http://127.0.0.1:{api}/v1", "OPENAI_API_KEY": "any"}
    environment = agl_environment(programs, HF_ENDPOINT=hub.url, HF_TOKEN="good", **variables)
    page = Page(folder, environment, {}, SKIPPED.get(name, {}))
    page.stand_ins = stand_ins(page, (ROOT / name).read_text(encoding="utf-8"), api)
    page.shorter = {} if name in WHOLE else SHORTER
    page.execute(page.stand_in(f"import agentlightning as agl\n{NAMES.get(name, '')}"), "before")
    try:
        for line in BEFORE.get(name, []):
            page.shell(line, "before")
        for block in blocks:
            page.run(block)
    finally:
        page.finish()
    assert not page.unused, f"no block of {name} matches any more: {page.unused}"


@pytest.mark.slow
@pytest.mark.timeout(3600 if WHOLE else 1200)
class TestLongPages:
    @pytest.mark.parametrize("name", LONG)
    def test_a_page_runs(
        self, name: str, laptop: tuple[Page, int], programs: Path, hub: Hub, tmp_path: Path
    ) -> None:
        run_page(name, laptop, programs, hub, tmp_path / "page")


@pytest.mark.slow
@pytest.mark.timeout(3600 if WHOLE else 1200)
class TestPages:
    @pytest.mark.parametrize("name", [page for page in PAGES if page not in LONG])
    def test_a_page_runs(
        self, name: str, laptop: tuple[Page, int], programs: Path, hub: Hub, tmp_path: Path
    ) -> None:
        run_page(name, laptop, programs, hub, tmp_path / "page")
