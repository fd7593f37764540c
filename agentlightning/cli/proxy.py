"""`agl proxy`: the gateway in front of any existing server, to record an agent as it is."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from agentlightning.cli.serving import KEY_HELP, address_options, until_stopped

if TYPE_CHECKING:
    from agentlightning.gateway.backends.http import Kind
    from agentlightning.server.service import ServerSettings

_HOSTS: dict[str, Kind] = {"anthropic.com": "anthropic", "azure.com": "azure", "openai.com": "openai"}
_KEYS: dict[str, str] = {
    "openai": "OPENAI_API_KEY",
    "azure": "AZURE_OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
}


@click.command()
@click.option("--backend", metavar="URL", required=True, help="The server, such as http://localhost:8000/v1.")
@click.option("--kind", type=click.Choice(["vllm", "openai", "azure", "anthropic"]),
              help="What it is. Left out, it is told by its address, or else asked whether it is vLLM.")  # fmt: skip
@click.option("--backend-key", metavar="KEY", envvar="AGL_BACKEND_KEY", show_envvar=True,
              help="The server's key; else OPENAI_API_KEY, AZURE_OPENAI_API_KEY or ANTHROPIC_API_KEY.")  # fmt: skip
@click.option("--store", "address", metavar="PATH|URL", default="agentlightning.sqlite", show_default=True,
              help="Where calls are recorded: an SQLite file, created if there is none, or postgresql://…")  # fmt: skip
@address_options(8124)
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help=KEY_HELP)
def proxy(
    backend: str, kind: Kind | None, backend_key: str | None, address: str, host: str, port: int, key: str | None
) -> None:
    """Pass an agent's calls on to a server, and record them.

    Nothing is changed on the way, and recording never delays an answer. From vLLM the exact token ids are recorded too.
    Models are asked for by the names that the server knows."""
    from agentlightning.server.logs import configure_logging
    from agentlightning.server.serve import run_on_fastest_loop
    from agentlightning.server.service import ServerSettings

    configure_logging("text")
    settings = ServerSettings(store=address, host=host, port=port, key=key, record="queue")
    run_on_fastest_loop(_proxy(backend, kind, backend_key, settings))


async def _proxy(url: str, kind: Kind | None, backend_key: str | None, settings: ServerSettings) -> None:
    from agentlightning.errors import ConfigError
    from agentlightning.gateway.backends.http import HttpBackend
    from agentlightning.gateway.models import ANY, ModelEntry
    from agentlightning.server.service import running_server
    from agentlightning.store.redaction import text_without_secrets

    hosted = _kind_by_host(url)
    kind = kind or hosted or await _kind_by_asking(url)
    api_key = backend_key or os.environ.get(_KEYS.get(kind, ""))
    if hosted and not api_key:
        raise ConfigError(f"{url} needs a key; set {_KEYS[hosted]}, or give it with --backend-key")
    backend = HttpBackend(url, kind=kind, api_key=api_key)
    entry = ModelEntry(ANY, backend, trainable=False, train=None, val=None)
    async with running_server(dataclasses.replace(settings, models=(entry,))) as running:
        await until_stopped(
            f"calls to {backend.name} ({kind}) are recorded in {text_without_secrets(settings.store)}\n"
            f"    OPENAI_BASE_URL={running.url}/v1 OPENAI_API_KEY=any python your_agent.py\n"
            f"    ANTHROPIC_BASE_URL={running.url} ANTHROPIC_API_KEY=any python your_agent.py"
        )
        calls = sum(running.gateway.statistics.calls.values())
    shed = running.gateway.shed
    click.echo(f"calls: {calls}, recorded: {calls - shed}", err=True)


def _kind_by_host(url: str) -> Kind | None:
    """None for the address of no hosted API. ConfigError for what is no address."""
    from agentlightning.errors import ConfigError

    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # a port out of range, half an IPv6 address
        host = None
    if not host:
        raise ConfigError(f"--backend is {url!r}; it must be a URL such as http://localhost:8000/v1")
    return next((kind for name, kind in _HOSTS.items() if host == name or host.endswith(f".{name}")), None)


async def _kind_by_asking(url: str) -> Kind:
    """`vllm` for a server that tells vLLM's version, `openai` for any other. ConfigError if nobody answers."""
    import aiohttp

    from agentlightning.errors import ConfigError

    root = url.partition("?")[0].rstrip("/").removesuffix("/v1")
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{root}/version") as answer:
            told = await answer.json(content_type=None) if answer.status == 200 else None
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL, TimeoutError) as error:
        raise ConfigError(
            f"nothing answers at {url} ({error}); start that server first, or say what it will be with --kind"
        ) from None
    except ValueError:
        told = None
    return "vllm" if isinstance(told, dict) and "version" in told else "openai"
