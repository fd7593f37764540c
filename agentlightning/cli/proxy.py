"""`agl proxy`: the gateway in front of any existing server, to record an agent as it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from agentlightning.cli.backends import Upstream, with_backend
from agentlightning.cli.options import json_option, print_json
from agentlightning.cli.serving import KEY_HELP, address_options, forwarding_options, until_stopped

if TYPE_CHECKING:
    from agentlightning.server.service import ServerSettings


@click.command()
@with_backend(required=True)
@click.option("--store", "address", metavar="PATH|URL", default="agentlightning.sqlite", show_default=True,
              help="Where calls are recorded: an SQLite file, created if there is none, or postgresql://…")  # fmt: skip
@address_options(8124)
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help=KEY_HELP)
@forwarding_options
@json_option
def proxy(backend: Upstream, address: str, as_json: bool, **others: Any) -> None:
    """Pass an agent's calls on to a server, and record them.

    Nothing is changed on the way, and recording never delays an answer. From vLLM the exact token ids are recorded too.
    Models are asked for by the names that the server knows."""
    from agentlightning.server.logs import configure_logging
    from agentlightning.server.serve import run_on_fastest_loop
    from agentlightning.server.service import ServerSettings

    configure_logging("text")
    settings = ServerSettings(store=address, record="queue", **others)
    run_on_fastest_loop(_proxy(backend, settings, as_json))


async def _proxy(upstream: Upstream, settings: ServerSettings, as_json: bool) -> None:
    from agentlightning.gateway.models import ANY, ModelEntry
    from agentlightning.server.service import running_server
    from agentlightning.store.redaction import text_without_secrets

    backend = await upstream.open()
    entry = ModelEntry(ANY, backend, trainable=False)
    async with running_server(dataclasses.replace(settings, models=(entry,))) as running:
        store = text_without_secrets(settings.store)
        told = {"url": running.url, "backend": backend.name, "kind": backend.kind, "store": store}
        await until_stopped(
            f"calls to {backend.name} ({backend.kind}) are recorded in {store}\n"
            f"    OPENAI_BASE_URL={running.url}/v1 OPENAI_API_KEY=any python your_agent.py\n"
            f"    ANTHROPIC_BASE_URL={running.url} ANTHROPIC_API_KEY=any python your_agent.py",
            told if as_json else None,
        )
        calls = sum(running.gateway.statistics.calls.values())
    shed = running.gateway.shed
    click.echo(f"calls: {calls}, recorded: {calls - shed}", err=True)
    if as_json:
        print_json({"calls": calls, "recorded": calls - shed})
