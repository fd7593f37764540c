"""`agl ui`: the page of all runs below folders, before, while and after they run."""

from __future__ import annotations

import secrets
from pathlib import Path
from urllib.parse import urlsplit

import click

from agentlightning.cli.options import json_option
from agentlightning.cli.serving import until_stopped


@click.command()
@click.argument("folders", metavar="[FOLDER]...", nargs=-1,
                type=click.Path(path_type=Path, exists=True, file_okay=False))  # fmt: skip
@click.option("--server", "servers", metavar="URL", multiple=True,
              help="Also show the runs of this `agl server`. Repeatable.")  # fmt: skip
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The servers' key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8124, show_default=True,
              help="Port to listen on; 0: any free port.")  # fmt: skip
@json_option
def ui(folders: tuple[Path, ...], servers: tuple[str, ...], key: str | None, port: int, as_json: bool) -> None:
    """Show all runs and stores below FOLDER (default: here) on one page, also while they run; nothing is changed."""
    from agentlightning.server.serve import run_on_fastest_loop

    run_on_fastest_loop(_ui(folders or (Path(),), servers, key, port, as_json))


async def _ui(folders: tuple[Path, ...], servers: tuple[str, ...], key: str | None, port: int, as_json: bool) -> None:
    from agentlightning.server.app import create_app
    from agentlightning.server.local_keys import local_key
    from agentlightning.server.serve import HttpServer
    from agentlightning.store.client import LightningStoreClient
    from agentlightning.store.many import ManyStores

    own = local_key(f"http://127.0.0.1:{port}", make=True) or secrets.token_urlsafe(32)
    others = {urlsplit(url).netloc: LightningStoreClient(url, key or local_key(url), patience=2.0) for url in servers}
    stores = await ManyStores.open(folders, {**others})
    try:
        async with HttpServer(create_app(stores, admin_key=own), port=port) as http:
            for path, problem in stores.problems.items():
                click.echo(f"skipped {path}: {problem}", err=True)
            runs, where, url = len(await stores.query_runs()), ", ".join(map(str, folders)), f"{http.url}/open/{own}"
            greeting = f"{runs} run{'s' * (runs != 1)} below {where}; new ones appear by themselves\ndashboard: {url}"
            await until_stopped(greeting, {"url": url} if as_json else None)
    finally:
        await stores.close()
