"""A pool of Kubernetes Jobs against what answers as kubectl does: what is sent, what answers mean,
what stays data."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentlightning.cli.main import run
from agentlightning.errors import AgentLightningError, ConfigError, ForbiddenError, UnavailableError
from agentlightning.runner import fleet
from agentlightning.runner.fleet import POOL_LABEL, KubernetesJobs, Pool, job_of, read_manifest
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from tests.runner.cluster import NAMESPACE, Cluster, fault, serving
from tests.runner.world import enqueue, until

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
ARGUMENTS = ("--server=http://agl:8123", "agent.py:agent")
SIZE = (3, 2)  # at most, rollouts of each
HOSTILE = [
    '"; rm -rf / #',
    "a\nimage: evil",
    "$(AGL_KEY)",
    "$$(AGL_KEY)",
    "$",
    "{{ x }}",
    "ünï\u202e",
    "--key=x",
    "`id`",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PERIOD_SECONDS", 0.05)


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with serving(tmp_path) as cluster:
        monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
        yield cluster


def jobs_of() -> KubernetesJobs:
    return KubernetesJobs(read_manifest(EXAMPLES / "job.yaml"), drain=20)


@asynccontextmanager
async def running(
    store: SqlStore, size: tuple[int, int] = SIZE, *, told: bool = True
) -> AsyncGenerator[list[str]]:
    """A pool for the length of the block, and what it says; whether it `told` its runners to
    drain."""
    said: list[str] = []
    pool = Pool(store, jobs_of(), ARGUMENTS, *size, said.append)
    task = asyncio.create_task(pool.run())
    try:
        yield said
    finally:
        pool.stop()
        assert await asyncio.wait_for(task, 30) is told


def test_a_job_is_the_manifest_with_a_few_leaves_more() -> None:
    manifest = read_manifest(EXAMPLES / "job.yaml")
    before = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    job = job_of(manifest, "my-agent-runner-1", ARGUMENTS, drain=20)
    assert manifest == before  # untouched
    runner = job["spec"]["template"]["spec"]["containers"][0]
    assert runner.pop("args") == ["runner", *ARGUMENTS] and runner.pop("command") == ["agl"]
    pod = job["spec"].pop("template")["spec"]
    assert pod.pop("restartPolicy") == "Never" and pod.pop("terminationGracePeriodSeconds") == 35
    assert pod == before["spec"]["template"]["spec"]
    limits = {"activeDeadlineSeconds": 43200, "ttlSecondsAfterFinished": 600}
    assert job["spec"] == {"backoffLimit": 0, "completions": 1, "parallelism": 1, **limits}
    assert job["metadata"] == {
        "name": "my-agent-runner-1",
        "namespace": "agents",
        "labels": {POOL_LABEL: "my-agent"},
    }


async def test_hostile_words_stay_data(cluster: Cluster) -> None:
    """They reach the process as they are: a kubelet's own substitution is the only one there is."""
    await jobs_of().start("runner-1", HOSTILE)
    (job,) = cluster.jobs.values()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: "the secret" for one in container["env"]}

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    words = [
        re.sub(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)", value, word)
        for word in container["args"]
    ]
    assert container["command"] == ["agl"] and "AGL_KEY" in variables
    assert words == ["runner", *HOSTILE]


MANIFEST = yaml.safe_load((EXAMPLES / "job.yaml").read_text())


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("metadata", "name"), 'x"; rm -rf /', "metadata.name"),
        (("metadata", "name"), "x\n", "metadata.name"),
        (("metadata", "name"), "a" * 33, "metadata.name"),
        (("metadata", "namespace"), "../../secrets", "metadata.namespace"),
        (("spec", "template", "spec", "containers"), [], "containers"),
        (("spec", "template", "spec", "containers", 0, "args"), ["sh"], "args"),
        (
            ("spec", "template", "spec", "containers", 0, "env"),
            [{"name": "AGL_KEY", "value": "plain"}],
            "Secret",
        ),
        (("spec", "template", "spec", "containers", 0, "env"), [], "Secret"),
    ],
)
def test_a_manifest_that_cannot_be_one_is_refused(
    tmp_path: Path, path: tuple[Any, ...], value: Any, says: str
) -> None:
    manifest = yaml.safe_load(yaml.safe_dump(MANIFEST))
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    with pytest.raises(ConfigError, match=says):
        read_manifest(tmp_path / "job.yaml")


async def test_jobs_are_started_ended_and_replaced(store: SqlStore, cluster: Cluster) -> None:
    await enqueue(store, *[0] * 5)
    async with running(store) as said:
        await until(lambda: len(cluster.jobs) == 3)
        first, second, _ = cluster.jobs
        cluster.end(first, "BackoffLimitExceeded")
        await until(lambda: len(cluster.jobs) == 4)
        assert any("BackoffLimitExceeded: as the pod ended" in line for line in said)
        cluster.end(second, "DeadlineExceeded")  # as it was to be: no failure, no pause
        await until(lambda: len(cluster.jobs) == 5)
        assert sum("failed" in line for line in said) == 1
        going = [name for name, job in cluster.jobs.items() if "conditions" not in job["status"]]
    assert sorted(name for name, _ in cluster.deleted) == sorted(going)
    assert {policy for _, policy in cluster.deleted} == {"Background"}
    assert all(
        path.startswith(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs") for _, path in cluster.asked
    )


async def test_jobs_of_an_earlier_pool_are_taken_up_and_old_failures_do_not_count(
    store: SqlStore, cluster: Cluster
) -> None:
    jobs = jobs_of()
    for name in ("one", "two", "three"):
        await jobs.start(name, ARGUMENTS)
    cluster.end("my-agent-three", "BackoffLimitExceeded")
    await enqueue(store, *[0] * 4)
    async with running(store, (2, 2)) as said:
        await asyncio.sleep(0.5)
        assert len(cluster.jobs) == 3
    assert said == []


async def test_what_passes_is_waited_out(store: SqlStore, cluster: Cluster) -> None:
    async with running(store) as said:
        await until(lambda: len(cluster.asked) > 1)
        quota = fault(
            403,
            "Forbidden",
            "exceeded quota: compute, requested: cpu=1, used: cpu=9, limited: cpu=9",
        )
        cluster.faults = [*(fault(code, "Reason") for code in (410, 500, 429)), quota]
        await until(lambda: not cluster.faults)
        await store.enqueue_rollout(0)
        await until(lambda: len(cluster.jobs) == 1)
    assert len([line for line in said if line.startswith("tried again")]) == 4
    assert not cluster.jobs


async def test_a_start_whose_answer_was_lost_is_not_made_twice(
    store: SqlStore, cluster: Cluster
) -> None:
    async def create_and_fail(request: Any) -> Any:
        if request.method == "GET":  # the list comes first
            cluster.faults = [create_and_fail]
            return cluster.listed(request)
        await cluster.create(await request.json())
        return await fault(504, "Timeout")(request)

    async with running(store) as said:
        await until(lambda: cluster.asked)
        cluster.faults = [create_and_fail]
        await store.enqueue_rollout(0)
        await until(lambda: cluster.jobs)
        await asyncio.sleep(0.5)
        assert len(cluster.jobs) == 1, said


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (403, "Forbidden", ForbiddenError),
        (500, "InternalError", UnavailableError),
        (422, "Invalid", ConfigError),
    ],
)
async def test_what_cannot_be_from_the_start_ends_the_pool(
    store: SqlStore, cluster: Cluster, code: int, reason: str, kind: type[Exception]
) -> None:
    cluster.faults = [fault(code, reason)]
    with pytest.raises(kind, match=reason):
        async with running(store):
            await asyncio.sleep(2)


async def test_without_kubectl_it_is_said_what_to_install(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs `kubectl` on the PATH"):
        async with running(store):
            await asyncio.sleep(2)


async def test_runners_that_never_come_up_end_the_pool(
    store: SqlStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TURNS_TO_FAIL", 2)
    await store.enqueue_rollout(0)
    with pytest.raises(
        AgentLightningError, match=r"keep failing .*BackoffLimitExceeded.*their logs say why"
    ):
        async with running(store, (1, 1)), asyncio.timeout(15):
            while True:
                for name, job in cluster.jobs.items():
                    if "conditions" not in job["status"]:
                        cluster.end(name, "BackoffLimitExceeded")
                await asyncio.sleep(0.05 if len(cluster.jobs) < 2 else 0.5)
                if len(cluster.jobs) == 2 and all(
                    "conditions" in job["status"] for job in cluster.jobs.values()
                ):
                    break


async def test_clean_up_outlasts_an_api_that_fails_or_says_that_it_failed(
    store: SqlStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await enqueue(store, *[0] * 4)
    async with running(store):
        await until(lambda: len(cluster.jobs) == 2)
        cluster.faults = [fault(500, "InternalError") for _ in range(4)]
    assert not cluster.jobs
    for rollout_id in ids:
        await store.cancel_rollout(rollout_id)
    cluster.asked = []
    monkeypatch.setattr(fleet, "CLEAN_UP_SECONDS", 0.5)
    async with running(store, told=False) as said:
        monkeypatch.setattr(fleet, "PERIOD_SECONDS", 5)
        await until(lambda: cluster.asked)
        await asyncio.sleep(0.5)
        cluster.faults = [fault(403, "Forbidden") for _ in range(99)]
    assert "could not be drained" in said[-1]


async def test_the_command_passes_its_options_on_and_cleans_up_at_ctrl_c(
    store: SqlStore, cluster: Cluster
) -> None:
    agent = "--key=$(AGL_KEY)"
    await store.enqueue_rollout(0)
    async with HttpServer(create_app(store, admin_key="an admin's key"), port=0) as server:
        options = ["--server", server.url, "--drain", "7s", "--isolation", "process", "--max", "3"]
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-c",
                "from agentlightning.cli.main import main; main()",
                "runner",
                *options,
                "--json",
            ),
            *("--kubernetes", str(EXAMPLES / "job.yaml"), "--", agent),
            env={**os.environ, "AGL_KEY": "an admin's key"},
            stdout=subprocess.PIPE,
        )
        await until(lambda: cluster.jobs, 60)
        (job,) = cluster.jobs.values()
        pod = job["spec"]["template"]["spec"]
        process.send_signal(signal.SIGINT)
        said, _ = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0 and json.loads(said) == {
            "server": server.url,
            "runners": 3,
            "concurrency": 8,
        }
    assert pod["terminationGracePeriodSeconds"] == 22 and not cluster.jobs
    runner = pod["containers"][0]["args"]
    given = [
        f"--server={server.url}",
        "--drain=7.000000s",
        "--isolation=process",
        "--",
        agent.replace("$", "$$"),
    ]
    assert runner == ["runner", "--concurrency=8", "--idle=60.000000s", *given]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            ["--ray", "2", "--kubernetes", str(EXAMPLES / "job.yaml")],
            2,
            "a pool is --ray N, or --kubernetes",
        ),
        (["--max", "2"], 2, "a pool is --ray N, or --kubernetes"),
        (["--kubernetes", str(EXAMPLES / "pool.yaml"), "--max", "1"], 1, "no manifest of a Job"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(
    options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            [
                "runner",
                "agent.py:agent",
                "--server",
                "http://127.0.0.1:9",
                "--key",
                "k" * 8,
                *options,
            ]
        )
        == code
    )
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_where_ray_is_missing_it_is_said_how_to_install_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run(
            [
                "runner",
                "math:sqrt",
                "--server",
                "http://127.0.0.1:9",
                "--key",
                "k" * 8,
                "--ray",
                "1",
            ]
        )
        == 1
    )
    assert "pip install 'agent-lightning-next[ray]'" in capsys.readouterr().err
