"""`agl ui`: the page of all runs below some folders and in other stores, before, while and after they run."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import click

from agentlightning.cli.options import json_option
from agentlightning.cli.place import POSTGRES, require_file
from agentlightning.cli.serving import until_stopped


@click.command()
@click.argument("places", metavar="[FOLDER|STORE|URL]...", nargs=-1)
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The key of servers at a URL.")
@click.option("--port", type=click.IntRange(0, 65535), default=8124, help="Port to listen on; 0: any free port.")
@json_option
def ui(places: tuple[str, ...], key: str | None, port: int, as_json: bool) -> None:
    """Show runs and rollouts on one page, also while they run; nothing is changed.

    Each argument is a folder (default: this one) whose stores are found as they come and go, a store's file, a
    postgresql:// URL, or the URL of an `agl server`."""
    from agentlightning.server.serve import run_on_fastest_loop

    run_on_fastest_loop(_ui(places or (".",), key, port, as_json))


async def _ui(places: tuple[str, ...], key: str | None, port: int, as_json: bool) -> None:
    from agentlightning.server.app import create_app
    from agentlightning.server.local_keys import local_key
    from agentlightning.server.serve import HttpServer
    from agentlightning.store.base import LightningStore
    from agentlightning.store.client import LightningStoreClient
    from agentlightning.store.many import ManyStores
    from agentlightning.store.sql import StoreReader

    own = local_key(f"http://127.0.0.1:{port}", make=True) or secrets.token_urlsafe(32)
    async with contextlib.AsyncExitStack() as stack:
        folders, others = list[Path](), dict[str, LightningStore]()
        for place in places:
            url = urlsplit(place)
            if place.startswith(POSTGRES):
                others[f"{url.hostname}{url.path}"] = await StoreReader.open(place)
            elif url.scheme in ("http", "https"):
                others[url.netloc] = LightningStoreClient(place, key or local_key(place), patience=2.0)
            else:
                folders.append(Path(place))
                if not folders[-1].is_dir():
                    require_file(place)
        stores = await ManyStores.open(folders, others)
        stack.push_async_callback(stores.close)
        http = await stack.enter_async_context(HttpServer(create_app(stores, admin_key=own), port=port))
        for path, problem in stores.problems.items():
            click.echo(f"skipped {path}: {problem}", err=True)
        runs, url = len(await stores.query_runs()), f"{http.url}/open/{own}"
        shown = ", ".join([*map(str, folders), *others])
        greeting = f"{runs} run{'s' * (runs != 1)} in {shown}; new ones appear by themselves\ndashboard: {url}"
        await until_stopped(greeting, {"url": url} if as_json else None)
