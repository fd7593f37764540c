"""The part of `agl runner` that runs it on many machines: options, and the command line of each runner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from agentlightning.cli.options import Duration, together
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.runner.pool import Machines

EACH = 8  # rollouts at once, of each runner
_OWN = ("ray", "kubernetes", "most", "least", "lifetime", "kube_api", "kube_token")
_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)

pool_options = together(
    click.option("--idle", "idle_seconds", type=Duration(), metavar="60s", default=math.inf,
                 help="End after so long without a rollout (those of a pool: 60s)."),
    click.option("--ray", type=click.IntRange(min=1), metavar="N",
                 help="Be a pool: up to N of these as actors of Ray, as many as the queue needs."),
    click.option("--kubernetes", type=_FILE, metavar="JOB.yaml",
                 help="Be a pool: up to --max of these as Kubernetes Jobs, made from this manifest."),
    click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="At most so many Jobs."),
    click.option("--min", "least", type=click.IntRange(min=0), metavar="N", default=0,
                 help="Keep so many, idle or not."),
    click.option("--lifetime", type=Duration(), metavar="12h", default="12h",
                 help="Replace a pool's runner after so long."),
    click.option("--kube-api", metavar="URL", help="The Kubernetes API; in a pod it is the cluster's own."),
    click.option("--kube-token", type=_FILE, help="File with the token for --kube-api."),
)  # fmt: skip


def asked(options: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a pool, taken away from a runner's; None where no pool is asked for. A usage error for what does
    not go together."""
    context = click.get_current_context()
    given = {name for name in _OWN if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    pool = {name: options.pop(name) for name in _OWN}
    if "ray" in given and given & {"kubernetes", "most", "kube_api", "kube_token"}:
        raise click.UsageError("--ray N stands without --kubernetes, --max, --kube-api and --kube-token")
    if "ray" not in given and "kubernetes" not in given:
        if given:
            raise click.UsageError(f"--{min(given)} is for a pool".replace("_", "-") + ": --ray N, or --kubernetes")
        return None
    pool["most"] = pool["ray"] or pool["most"]
    if pool["most"] is None or pool["least"] > pool["most"]:
        raise click.UsageError("say how many Jobs there may be: --max N, not below --min")
    return pool


def runner_arguments(each: int) -> list[str]:
    """The command line of one runner, without what is the pool's and without the key. `--name=value` is one argument,
    so that no value is taken for an option."""
    context = click.get_current_context()
    arguments = [f"--concurrency={each}"]
    for option in context.command.params:
        name, value = option.name or "", context.params.get(option.name or "")
        if name in (*_OWN, "idle_seconds", "key", "concurrency", "as_json"):
            continue
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            written = f"{value:f}s" if isinstance(option.type, Duration) else value
            arguments.append(f"{'--agent' if isinstance(option, click.Argument) else option.opts[0]}={written}")
    return arguments


def machines_of(pool: dict[str, Any], key: str | None, drain: float) -> Machines:
    """Where the pool's runners run. ConfigError where they cannot."""
    if pool["ray"]:
        from agentlightning.runner.actors import RayActors

        return RayActors(key, drain)
    from yarl import URL

    from agentlightning.runner.kubernetes import Api, KubernetesJobs, Template

    try:
        api = Api(URL(pool["kube_api"]), pool["kube_token"]) if pool["kube_api"] else Api.of_pod()
    except ValueError as error:
        raise ConfigError(f"--kube-api: {error}") from None
    return KubernetesJobs(Template.read(pool["kubernetes"]), api, pool["lifetime"], drain)
