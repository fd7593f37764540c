"""`agl runner`: runs an agent on a server's rollouts, here or, with `--ray` and `--kubernetes`, on
other machines."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from agentlightning.cli.options import (
    COUNT,
    Duration,
    instrument_agents,
    json_option,
    key_flags,
    key_option,
    note,
    print_json,
)
from agentlightning.cli.run_file import load_config
from agentlightning.garbage import rare_garbage_collection
from agentlightning.runner.agent import LitAgent, as_agent
from agentlightning.runner.signals import end_after, on_signal, run_to_end

_OWN: Final = ("ray", "kubernetes", "most")  # options of a pool


@click.command()
@click.argument("agent", metavar="FILE.py:NAME|RUN.yaml")
@click.option(
    "--server", metavar="URL", required=True, help="The `agl server` to lease rollouts from."
)
@key_option("The server's key.")
@click.option(
    "--endpoint",
    "endpoint_override",
    metavar="URL",
    help=("URL at which agents call models; default: the server's URL as the trainer knows it."),
)
@click.option(
    "--concurrency",
    type=COUNT,
    help="Number of rollouts at once; default: 64; for processes one per core.",
)
@click.option(
    "--drain",
    "drain_seconds",
    type=Duration(zero=True),
    metavar="20s",
    default="20s",
    help="How long rollouts may go on after Ctrl-C or SIGTERM.",
)
@key_flags(only=("isolation", "instrument"))
@click.option(
    "--idle",
    "idle_seconds",
    type=Duration(),
    metavar="60s",
    default=math.inf,
    show_default=False,
    help="Exit after this long without a rollout; default in a pool: 60s.",
)
@click.option(
    "--ray",
    type=COUNT,
    metavar="N",
    help="Run a pool of up to N runners as Ray actors, as many as the queue needs.",
)
@click.option(
    "--kubernetes",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="JOB.yaml",
    help="Run a pool of up to --max runners as Jobs made from this manifest.",
)
@click.option("--max", "most", type=COUNT, metavar="N", help="Limit of the number of Jobs.")
@json_option
def runner(
    agent: str, server: str, key: str | None, instrument: str | None, **options: Any
) -> int | None:
    """Run an agent on a server's rollouts.

    It leases rollouts from the server until stopped.

    After Ctrl-C or SIGTERM it leases no more, and running rollouts may finish: exit code 0. Those
    that --drain or a second signal ends are handed back for a retry: exit code 130."""
    from agentlightning.runner.isolation import resolve_isolation

    options["isolation"] = options["isolation"] or "auto"
    pool = {name: options.pop(name) for name in _OWN}
    given = {name for name, value in pool.items() if value is not None}
    if given and given not in ({"ray"}, {"kubernetes", "most"}):
        raise click.UsageError("a pool is --ray N, or --kubernetes JOB.yaml with --max N")
    instrument_agents(instrument, here=not given)
    loaded: LitAgent[Any] = as_agent(agent)
    if agent.endswith((".yaml", ".yml")) and (not given or Path(agent).is_file()):
        loaded = as_agent(load_config(Path(agent)).load_agent())
    if not given:
        options["isolation"] = resolve_isolation(loaded, options["isolation"])
    elif pool["ray"]:
        loaded.reads_environment()  # which imports it; for Kubernetes it may be in the image alone
    try:
        if given:
            return run_to_end(_run_pool(click.get_current_context(), **pool))
        with rare_garbage_collection():
            run_to_end(_run(loaded, agent, server, key, **options))
    except (asyncio.CancelledError, TimeoutError):
        raise click.Abort from None


async def _run(
    agent: Any,
    name: str,
    url: str,
    key: str | None,
    drain_seconds: float,
    as_json: bool,
    **options: Any,
) -> None:
    from agentlightning.runner.runner import Runner
    from agentlightning.server.local_keys import local_key
    from agentlightning.store.client import LightningStoreClient

    store = LightningStoreClient(url, api_key=key or local_key(url, make=True))
    try:
        working = Runner(store, agent, **options)
        task = asyncio.current_task()
        assert task is not None
        await store.get_time()  # which asks the server, and knows the key
        note(f"{working.worker_id} runs {name} for {url}, up to {working.concurrency} at once")
        if as_json:
            details = {
                "worker_id": working.worker_id,
                "agent": name,
                "server": url,
                "concurrency": working.concurrency,
            }
            print_json(details)
        async with asyncio.timeout(None) as limit:

            def drain() -> None:
                note(f"no more leases; running rollouts have {drain_seconds:g} s")
                working.stop()
                limit.reschedule(asyncio.get_running_loop().time() + drain_seconds)

            with on_signal(drain, then=task.cancel, at_once=partial(end_after, drain_seconds + 9)):
                await working.run()
    finally:
        await store.close()


# --- pools ----------------------------------------------------------------------------------------


def _arguments(context: click.Context, each: int) -> list[str]:
    """This command line for a runner of the pool, without the key. In `--name=value` no value is
    taken for an option."""
    idle = context.params["idle_seconds"]
    arguments = [f"--concurrency={each}", f"--idle={60 if math.isinf(idle) else idle:f}s"]
    for option in context.command.params:
        name = str(option.name)
        value = context.params.get(str(option.name))
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if (
            given
            and name in context.params
            and name not in (*_OWN, "agent", "idle_seconds", "key", "concurrency", "as_json")
        ):
            seconds = isinstance(option.type, Duration)
            arguments.append(
                f"{option.opts[0]}={value:f}s" if seconds else f"{option.opts[0]}={value}"
            )
    return [*arguments, "--", context.params["agent"]]


async def _run_pool(context: click.Context, ray: int | None, kubernetes: Path, most: int) -> int:
    """Run a pool of runners until stopped. The exit code: 1 if some may be left running."""
    from agentlightning.runner.fleet import KubernetesJobs, Pool, RayActors, read_manifest
    from agentlightning.server.local_keys import local_key
    from agentlightning.store.client import LightningStoreClient

    options = context.params
    task = asyncio.current_task()
    url = options["server"]
    drain = options["drain_seconds"]
    each = options["concurrency"] or 8
    key = options["key"] or local_key(url, make=True)
    store = LightningStoreClient(url, api_key=key, patience=5.0)
    machines = (
        RayActors(key, drain)
        if ray is not None
        else KubernetesJobs(read_manifest(kubernetes), drain)
    )
    pool = Pool(store, machines, _arguments(context, each), ray or most, each, note)
    note(f"a pool of up to {pool.most} runners for {url}, each of {each} rollouts at once")
    if options["as_json"]:
        print_json({"server": url, "runners": pool.most, "concurrency": each})
    assert task is not None
    try:
        with on_signal(pool.stop, then=task.cancel):
            return 0 if await pool.run() else 1
    finally:
        await store.close()
