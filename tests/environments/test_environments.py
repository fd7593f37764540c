"""Environments with the real packages of their hubs, each in an environment of its own, and the
embedded engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import agentlightning as agl
from agentlightning.cli.run_file import load_config
from agentlightning.config import RunConfig
from agentlightning.data.references import load_reference
from agentlightning.data.transitions import trace_rollout
from agentlightning.environments import Environment
from agentlightning.errors import ConfigError
from agentlightning.types import Rollout, Span
from tests.examples.loading import EXAMPLES
from tests.frameworks.world import bin_of

HERE = Path(__file__).parent
SHOP = EXAMPLES / "environments"
SMALL = (
    "algorithm.steps=1",
    "algorithm.tasks_per_step=2",
    "algorithm.group_size=2",
    "environment.limit=4",
)


# each starts processes, which on a busy machine takes its time
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    load_reference(f"{EXAMPLES / 'tutorial/tiny_model.py'}:make")(1).save(directory)
    return directory


def train(
    hub: str | None, directory: Path, run_file: Path, model: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    given = [word for one in SMALL for word in ("--set", one)]
    words = "train", str(run_file), "--out", str(directory), "--model", str(model), *given, *more
    return agl_of(hub, directory.parent, *words)


def agl_of(hub: str | None, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable if hub is None else bin_of(hub) / "python",
        "-m",
        "agentlightning.cli.main",
        *words,
    ]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )


def environment(name: str, settings: dict[str, object]) -> Environment:
    return RunConfig(environment={"name": name, **settings}).load_agent()


def stored(directory: Path) -> list[tuple[Rollout, list[Span]]]:
    async def read() -> list[tuple[Rollout, list[Span]]]:
        store = await agl.SqlStore.open(directory / "store.sqlite")
        try:
            return [
                (one, list(await store.query_spans(one.rollout_id)))
                for one in await store.query_rollouts()
            ]
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hub", "reward", "metric"), [("verifiers", "right", "looked_up"), ("inspect", "match", "")]
)
def test_one_file_trains_on_a_hubs_tasks_with_exact_tokens_named_rewards_and_metrics(
    tmp_path: Path, model: Path, hub: str, reward: str, metric: str
) -> None:
    done = train(hub, tmp_path / "run", SHOP / f"{hub}.yaml", model)
    assert done.returncode == 0, done.stderr
    ended = stored(tmp_path / "run")
    assert {rollout.mode for rollout, _ in ended} == {"train", "val"}
    trained = {str(rollout.input) for rollout, _ in ended if rollout.mode == "train"}
    assert not trained & {str(rollout.input) for rollout, _ in ended if rollout.mode == "val"}
    for rollout, spans in ended:
        assert rollout.status == "succeeded"
        (rewarded,) = agl.find_reward_spans(spans)
        assert [one.name for one in agl.get_rewards_from_span(rewarded)] == [reward]
        assert not metric or any(f"metrics.{metric}" in span.attributes for span in spans)
        learned = trace_rollout(rollout, spans)
        assert learned.transitions and not learned.excluded
        assert all(len(one.logprobs) == len(one.response_ids) > 0 for one in learned.transitions)
    measured = agl_of(
        hub, tmp_path, "eval", str(SHOP / f"{hub}.yaml"), "--model", str(model), "--limit", "4"
    )
    assert "4 rewarded" in measured.stdout, measured.stderr
    check_forks(hub, tmp_path / "run")


def check_forks(hub: str, run: Path) -> None:
    """`agl fork` walks a rollout of the run up to its second call, and goes on with the right
    answer, which the hub rewards."""
    ended = stored(run)
    source, _ = max(ended, key=lambda one: len(trace_rollout(*one).transitions))
    task: dict = source.input
    right = str(task.get("answer", task.get("target", 10 + task.get("seed", 0))))
    given = ("--store", str(run), "--answer", right, "--samples", "2", "--json")
    done = agl_of(hub, run.parent, "fork", source.rollout_id, "--at", "1", *given)
    assert done.returncode == 0, done.stderr
    for fork in json.loads(done.stdout)["forks"]:
        assert (fork["status"], fork["answer"]) == ("succeeded", f"“{right}”")
        assert fork["reward"] >= 0.75


FAILING = """
import verifiers.v1 as vf
__all__ = ["Harness", "Failing"]
class Task(vf.Task[vf.TaskData]): ...
class Failing(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt=str(n)), self.config.task) for n in range(4)]
class Harness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    async def launch(self, *given, **named):
        raise ValueError("out of order")
"""


@pytest.mark.slow
def test_what_a_hub_reports_as_failed_fails_the_attempt_with_its_reason(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run_file = tmp_path / "run.yaml"
    run_file.write_text((SHOP / "verifiers.yaml").read_text().replace("shop_taskset", "failing"))
    done = train(
        "verifiers", tmp_path / "run", run_file, model, "--set", "environment.held_out=0.5"
    )
    assert done.returncode == 1
    assert "HarnessError" in done.stderr and "out of order" in done.stderr


@pytest.mark.parametrize("hub", ["verifiers", "inspect"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(hub: str) -> None:
    with pytest.raises(ConfigError, match=rf"pip install 'agent-lightning-next\[{hub}\]'"):
        environment(f"{hub}:anything", {}).tasks()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("verifier:shop", {}, "did you mean 'verifiers'"),
        ("verifiers", {}, "write HUB:NAME"),
        ("verifiers:shop", {"harnes": "bash"}, "did you mean 'harness'"),
        ("openenv:an/image", {}, "docker run -p 8000:8000"),
        ("inspect:shop", {"held_out": 1}, "at least 0 and below 1"),
        ("inspect:shop", {"limit": "all"}, r"environment\.limit: expected `int"),
    ],
)
def test_what_names_no_environment_is_refused(name: str, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment(name, settings)


class Numbers(Environment):
    def read_tasks(self, args: Mapping[str, int]) -> Iterator[int]:
        yield from range(args.get("start", 0), args["end"])


def test_held_out_tasks_are_chosen_by_content_or_by_the_hubs_own_settings() -> None:
    trained, held_out = Numbers("numbers", args={"end": 10}).split()
    assert len(held_out) == 2 and sorted(trained + held_out) == list(range(10))
    assert Numbers("numbers", args={"end": 10}, held_out={"start": 5}, limit=3).split() == (
        [0, 1, 2],
        [5, 6, 7],
    )
    with pytest.raises(ConfigError, match="KeyError: 'end'"):
        Numbers("numbers").tasks()


def test_a_run_file_names_an_environment_instead_of_agent_and_dataset(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    (tmp_path / "shop.py").touch()
    run_file.write_text("environment: inspect:shop.py@shop\nmodel: some/model\n")
    config = load_config(run_file, ["environment.limit=5"])
    assert config.environment == {"name": f"inspect:{tmp_path}/shop.py@shop", "limit": 5}
    # a flag takes the environment's place
    with pytest.raises(ConfigError, match="lacks: train_dataset"):
        load_config(run_file, (), {"agent": "agent.py:agent"})
    run_file.write_text(run_file.read_text() + "agent: agent.py:agent\n")
    with pytest.raises(ConfigError, match="not both"):
        load_config(run_file)


@pytest.mark.slow
def test_a_server_of_openenv_is_played_one_session_at_a_time(tmp_path: Path, model: Path) -> None:
    port = free_port()
    server = subprocess.Popen([bin_of("openenv") / "python", HERE / "number_server.py", str(port)])
    try:
        wait_for(port)
        run_file = tmp_path / "run.yaml"
        own = f"  name: openenv:http://127.0.0.1:{port}\n  observation: text\n  held_out: 0.5\n"
        _, _, rest = (
            (SHOP / "verifiers.yaml").read_text().partition("  held_out: {split: heldout}\n")
        )
        run_file.write_text(f"environment:\n{own}{rest}")
        done = train("openenv", tmp_path / "run", run_file, model)
        assert done.returncode == 0, done.stderr
        ended = stored(tmp_path / "run")
        check_forks("openenv", tmp_path / "run")
    finally:
        server.terminate()
        server.wait()
    assert len(ended) >= 8
    for rollout, spans in ended:
        assert rollout.status == "succeeded"
        rewards = [agl.get_reward_value(span) for span in agl.find_reward_spans(spans)]
        assert len(rewards) == 3 and sum(rewards[:2]) == rewards[2] == agl.find_final_reward(spans)
        assert len(trace_rollout(rollout, spans).transitions) == 2


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(480):
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.25)
    raise AssertionError(f"nobody listens at port {port}")


@pytest.mark.slow
def test_a_folder_of_harbors_tasks_is_played_by_a_runner_in_its_own_environment(
    tmp_path: Path, model: Path
) -> None:
    programs = bin_of("harbor", required=False)  # it needs Python 3.12, which not every machine has
    for number in (10, 11, 12, 13):
        folder = tmp_path / "tasks" / f"say-{number}"
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "task.toml").write_text('version = "1.0"\n')
        (folder / "instruction.md").write_text(f"How many of the lamp: {number}?")
        rewarded = """echo '{"right": 0.5, "written": 1}' > "$(dirname "$0")/../logs/verifier/reward.json"\n"""
        (folder / "tests" / "test.sh").write_text(f"test -f answer.txt && {rewarded}")
    port = free_port()
    own = {"name": f"harbor:{tmp_path / 'tasks'}", "held_out": 0.5, "reward": "right"}
    own |= {
        "harness": "local_harbor:Asking",
        "config": {"environment": {"import_path": "local_harbor:LocalEnvironment"}},
    }
    settings = yaml.safe_load((SHOP / "verifiers.yaml").read_text())
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        yaml.dump(
            {
                **settings,
                "environment": own,
                "n_runners": 0,
                "port": port,
                "api_key": "a key of ours",
            }
        )
    )
    command = [programs / "agl", "runner", run_file, "--server", f"http://127.0.0.1:{port}"]
    keys = {**os.environ, "AGL_KEY": "a key of ours", "PYTHONPATH": str(HERE)}
    with ThreadPoolExecutor() as pool:
        training = pool.submit(train, None, tmp_path / "run", run_file, model)
        wait_for(port)
        runner = subprocess.Popen(command, env=keys)
        try:
            done = training.result()
        finally:
            runner.terminate()
            runner.wait()
    assert done.returncode == 0, done.stderr
    for rollout, spans in stored(tmp_path / "run"):
        assert rollout.status == "succeeded"
        (rewarded,) = agl.find_reward_spans(spans)
        rewards = {one.name: one.value for one in agl.get_rewards_from_span(rewarded)}
        assert rewards == {"right": 0.5, "written": 1.0}
        assert len(trace_rollout(rollout, spans).transitions) == 1
