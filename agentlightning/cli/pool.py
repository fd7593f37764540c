"""`agl runner --ray N` and `--kubernetes JOB.yaml --max N`: runners on other machines."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource
from yarl import URL

from agentlightning.cli.options import Duration, print_json, together
from agentlightning.runner.ending import on_signal

_OWN: Final = ("ray", "kubernetes", "most", "kube_api")

pool_options = together(
    click.option("--ray", type=click.IntRange(min=1), metavar="N",
                 help="Be a pool: up to N of these as actors of Ray, as many as the queue needs."),
    click.option("--kubernetes", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="JOB.yaml",
                 help="Be a pool: up to --max of these as Jobs, made from this manifest."),
    click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="At most so many Jobs."),
    click.option("--kube-api", type=URL, metavar="URL",
                 help="The Kubernetes API that `kubectl proxy` serves, if not that of the pod's own cluster."),
)  # fmt: skip


def take_pool(options: dict[str, Any]) -> dict[str, Any] | None:
    """A pool's own options, taken from a runner's; None where none is asked for."""
    pool = {name: options.pop(name) for name in _OWN}
    given = {name for name, value in pool.items() if value is not None}
    if given and given not in ({"ray"}, {"kubernetes", "most"}, {"kubernetes", "most", "kube_api"}):
        raise click.UsageError("a pool is --ray N, or --kubernetes JOB.yaml with --max N; --kube-api is for Jobs")
    return pool if given else None


def _arguments(context: click.Context, each: int) -> list[str]:
    """This command line for a runner of the pool, without the key. In `--name=value` no value is an option."""
    idle = context.params["idle_seconds"]
    arguments = [f"--concurrency={each}", f"--idle={60 if math.isinf(idle) else idle:f}s"]
    for option in context.command.params:
        name, value = str(option.name), context.params[str(option.name)]
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name not in (*_OWN, "idle_seconds", "key", "concurrency", "as_json"):
            flag = "--agent" if name == "agent" else option.opts[0]
            arguments.append(f"{flag}={value:f}s" if isinstance(option.type, Duration) else f"{flag}={value}")
    return arguments


async def run_pool(context: click.Context, ray: int | None, kubernetes: Path, most: int, kube_api: URL | None) -> int:
    """Run a pool of the runners that `context` asks for, until stopped. The exit code: 1 where some may be left."""
    from agentlightning.runner.pool import Pool
    from agentlightning.server.local_keys import local_key
    from agentlightning.store.client import LightningStoreClient

    options, task = context.params, asyncio.current_task()
    url, drain, each = options["server"], options["drain_seconds"], options["concurrency"] or 8
    key = options["key"] or local_key(url, make=True)
    store = LightningStoreClient(url, api_key=key, patience=5.0)
    if ray is not None:
        from agentlightning.runner.actors import RayActors

        machines = RayActors(key, drain)
    else:
        from agentlightning.runner.kubernetes import KubernetesJobs, read_manifest

        machines = KubernetesJobs(read_manifest(kubernetes), kube_api, drain)
    arguments, tell = _arguments(context, each), partial(click.echo, err=True)
    pool = Pool(store, machines, arguments, ray or most, each, tell)
    tell(f"a pool of up to {pool.most} runners for {url}, each of {each} rollouts at once")
    if options["as_json"]:
        print_json({"server": url, "runners": pool.most, "concurrency": each})
    assert task is not None
    try:
        with on_signal(pool.stop, then=task.cancel):
            return 0 if await pool.run() else 1
    finally:
        await store.close()
