"""The commands that serve: `agl serve` (a checkpoint), `agl server` (store and gateway), `agl ui`
(the page)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from agentlightning.cli.backends import Upstream, with_backend
from agentlightning.cli.options import (
    COUNT,
    Duration,
    Option,
    combined,
    json_option,
    key_option,
    model_options,
    note,
    print_json,
)
from agentlightning.cli.store_location import (
    POSTGRES,
    SERVER_STORE,
    folder_or_store,
    store_file,
    store_option,
)
from agentlightning.garbage import rare_garbage_collection
from agentlightning.runner.signals import on_signal

if TYPE_CHECKING:
    from agentlightning.learner.embedded_sampler import EmbeddedSampler
    from agentlightning.prompts.replacing import Replacer

_GATEWAY_OPTIONS: Final = frozenset(
    {
        *("gateway_of", "host", "port", "key", "tls_cert", "tls_key", "rate_limit"),
        *("body_limit", "log_format", "access_log", "prompts", "as_json"),
    }
)
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
FILE = click.Path(dir_okay=False)
KEY = key_option("Key that callers must send; required to listen on other than a loopback address.")
STORE = store_option(
    "SQLite file, created if missing, or postgresql://user@host/database.",
    default=str(SERVER_STORE),
)


def port_option(port: int) -> Option:
    ports = click.IntRange(0, 65535)
    return click.option(
        "--port", type=ports, default=port, help="Port to listen on; 0: any free port."
    )


def address_options(port: int) -> Option:
    host = click.option("--host", default="127.0.0.1", help="Address to listen on.")
    return combined(host, port_option(port))


class Header(click.ParamType[tuple[str, str]]):
    """`"name=value"` → its two parts. UsageError if it cannot be an HTTP header."""

    name = "header"
    envvar_list_splitter = ","

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, separator, content = str(value).partition("=")
        if not separator or not _HEADER_NAME.fullmatch(name) or not content.isprintable():
            self.fail(
                "a header is written NAME=VALUE, such as authorization='Bearer KEY'", param, ctx
            )
        return name, content


@click.command()
@click.argument("model", metavar="MODEL")
@address_options(8000)
@KEY
@click.option("--concurrency", type=COUNT, default=64, help="Number of calls answered at once.")
@click.option(
    "--max-sequence-length",
    type=COUNT,
    metavar="TOKENS",
    help="Limit of prompt and answer combined.",
)
@click.option("--threads", type=COUNT, help="Number of torch threads.")
@combined(*model_options)
@json_option
def serve(**options: Any) -> None:
    """Serve a model to OpenAI and Anthropic clients.

    MODEL is a checkpoint's directory, a Hugging Face id, or FILE.py:NAME, a function that makes
    one."""
    from agentlightning.server.serve import run_on_fastest_loop

    with rare_garbage_collection():
        run_on_fastest_loop(_serve(**options))


async def _serve(model: str, key: str | None, as_json: bool, **options: Any) -> None:
    async with served_model(model, key=key, **options) as url:
        example = "any" if key is None else "KEY"
        await until_stopped(
            f"serving {model} as {options['model_name']!r} at {url}/v1\n"
            f"    OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={example} python your_agent.py\n"
            f"    ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={example} python your_agent.py\n"
            f"chat: {url}/#/chat",
            {"url": url, "model": options["model_name"]} if as_json else None,
        )


@contextlib.asynccontextmanager
async def served_model(
    model: str,
    *,
    model_name: str,
    seed: int,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    **sizes: Any,
) -> AsyncGenerator[str]:
    """The URL of the embedded engine with a model, and of a page to talk to it; calls are not
    stored."""
    from agentlightning.gateway.gateway import Gateway
    from agentlightning.gateway.models import ModelEntry, ModelTable
    from agentlightning.server.app import create_app
    from agentlightning.server.serve import HttpServer
    from agentlightning.store.sql import SqlStore

    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(embedded(model, seed=seed, **sizes))
        gateway = Gateway(
            ModelTable([ModelEntry(model_name, served.backend)]),
            admin_key=key,
            prompts=trained_with(Path(model)),
        )
        store = await SqlStore.open(":memory:")  # for sessions of the page
        stack.push_async_callback(store.close)
        app = create_app(store, gateway=gateway, admin_key=key)
        yield (await stack.enter_async_context(HttpServer(app, host=host, port=port))).url


def trained_with(checkpoint: Path) -> Replacer | None:
    """What puts the prompts into calls with which the model of this checkpoint was trained."""
    from agentlightning.prompts.components import FILE, read_candidate
    from agentlightning.prompts.replacing import Replacer

    run = checkpoint.absolute().parents[1]
    if not checkpoint.is_dir() or not (run / FILE).is_file():
        return None
    note(f"with the prompts of {run / FILE}, as in its training")
    return Replacer(read_candidate(run), "prompts")


@contextlib.asynccontextmanager
async def embedded(model: str, *, seed: int, **sizes: Any) -> AsyncGenerator[EmbeddedSampler]:
    """A model, answered by this process."""
    from agentlightning.display import hide_library_progress
    from agentlightning.learner.embedded_sampler import serve_policy
    from agentlightning.learner.policy import open_policy

    hide_library_progress()
    policy = await asyncio.to_thread(open_policy, model, seed=seed)
    served = serve_policy(policy, seed=seed, **sizes)
    try:
        yield served
    finally:
        served.service.close()


@click.command()
@address_options(8123)
@STORE
@with_backend("the models that trainers register")
@click.option(
    "--model",
    help=(
        "Model of rollouts that name no resources: a name at --backend (default: its only one), or "
        "what `agl serve` takes, answered by this process."
    ),
)
@click.option(
    "--gateway-of",
    metavar="URL",
    help="Answer LLM calls for the server at URL, which keeps the store: one more core for it.",
)
@click.option(
    "--prompts",
    metavar="FILE|RUN",
    help="Put the texts of this candidate (`agl prompts … --write FILE`) into all calls.",
)
@click.option(
    "--synchronous",
    type=click.Choice(["FULL", "NORMAL"]),
    default="FULL",
    help="NORMAL is faster; a power cut may lose the last writes.",
)
@KEY
@click.option("--tls-cert", type=FILE, help="Certificate chain (PEM) for HTTPS.")
@click.option("--tls-key", type=FILE, help="Private key of --tls-cert (PEM).")
@click.option(
    "--rate-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Requests per second for each key or address; further ones get 429.",
)
@click.option(
    "--body-limit", type=COUNT, metavar="MIB", default=64, help="Limit of a request's size."
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="Format of the log: text, or one JSON object per line.",
)
@click.option("--access-log", is_flag=True, help="Log a line for every request.")
@click.option(
    "--otlp-forward",
    metavar="URL",
    help="Forward stored spans, without token ids, to this collector (OTLP over HTTP).",
)
@click.option(
    "--otlp-forward-header",
    "otlp_forward_headers",
    type=Header(),
    multiple=True,
    metavar="NAME=VALUE",
    envvar="AGL_OTLP_FORWARD_HEADERS",
    show_envvar=True,
    help=(
        "Header for the collector, such as its key. Repeatable; separated by commas in the "
        "variable."
    ),
)
@click.option(
    "--capture",
    type=click.Choice(["full", "tokens", "off"]),
    default="full",
    help="What to store of calls and spans: all, token ids without text, or neither.",
)
@click.option(
    "--redact",
    metavar="FILE.py:NAME",
    help="Function that changes or drops each span before it is stored.",
)
@click.option(
    "--retain",
    type=Duration(),
    metavar="30d",
    help="Delete rollouts that ended longer ago than this.",
)
@json_option
@click.pass_context
def server(
    ctx: click.Context,
    address: str,
    backend: Upstream | None,
    model: str | None,
    gateway_of: str | None,
    prompts: str | None,
    body_limit: int,
    log_format: Literal["text", "json"],
    redact: str | None,
    retain: float | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Run store and gateway for several machines.

    They are a process of their own. With --backend, calls are passed on to it and recorded.
    Rollouts that name no resources get --model, so that whoever posts a task needs to know no
    model.

    With --gateway-of, only LLM calls are answered, with the models and into the store of the server
    at that URL. All calls of an attempt belong at one gateway.

    Trainers join with `agl train --server URL`, runners with `agl runner AGENT --server URL`.
    URL/docs documents the interface. Ctrl-C or SIGTERM stops it after open requests are answered;
    nothing acknowledged is lost."""
    from agentlightning.prompts.components import changed_components, read_candidate
    from agentlightning.server.request_log import configure_logging
    from agentlightning.server.serve import run_on_fastest_loop

    others["prompts"] = None if prompts is None else read_candidate(prompts)
    configure_logging(log_format)
    if others["prompts"] is not None:
        names = ", ".join(sorted(changed_components(others["prompts"]))) or "nothing"
        note(f"the prompts of {prompts} replace {names}")
    others |= {"body_limit": body_limit * 1024 * 1024, "retain_seconds": retain, "hook": redact}
    if gateway_of is not None:
        _refuse_options_of_the_server(ctx, gateway_of)
        return run_on_fastest_loop(_gateway(gateway_of, as_json, {**others, "store": gateway_of}))
    others |= {"store": store_file(address, create=True)}
    return run_on_fastest_loop(_server(backend, model, as_json, others))


def _refuse_options_of_the_server(ctx: click.Context, server: str) -> None:
    """UsageError for an option that a gateway of another server cannot have."""
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name not in _GATEWAY_OPTIONS:
            raise click.UsageError(
                f"{option.opts[0]} is for the server itself: give it to the one at {server}"
            )


async def _gateway(server: str, as_json: bool, options: dict[str, Any]) -> None:
    from agentlightning.server.app import ServerSettings
    from agentlightning.server.following import running_gateway

    async with running_gateway(server, ServerSettings(**options)) as running:
        details = {"gateway_of": server, "url": running.url}
        await until_stopped(f"gateway of {server} at {running.url}", details if as_json else None)


async def _server(
    upstream: Upstream | None, model: str | None, as_json: bool, options: dict[str, Any]
) -> None:
    from agentlightning.gateway.backends.factory import captures_tokens
    from agentlightning.gateway.models import ANY, ModelEntry
    from agentlightning.server.app import ServerSettings
    from agentlightning.server.model_calls import RegisterModel
    from agentlightning.server.server_process import running_server
    from agentlightning.store.redaction import text_without_secrets

    details = {"store": text_without_secrets(options["store"])}
    greeting = "store {store} at {url}\ndashboard: {url}/"
    if upstream is not None:
        found = await upstream.resolved()
        assert found.kind is not None
        answering = RegisterModel(
            name=ANY,
            base_url=found.url,
            kind=found.kind,
            api_key=found.key,
            tokenizer=found.tokenizer,
            trainable=captures_tokens(found.kind),
            train=None,
            val=None,
            check=False,
        )
        options["registrations"] = (answering,)
        details |= {"backend": found.url, "kind": found.kind}
        model = model or await found.only_model()
        greeting = (
            "calls to {backend} ({kind}) are recorded in {store}\n"
            "    OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=any python your_agent.py\n"
            "    ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY=any python your_agent.py"
        )
    async with contextlib.AsyncExitStack() as stack:
        own: list[ModelEntry] = []
        if model is not None and upstream is None:
            served = await stack.enter_async_context(embedded(model, seed=0))
            own = [ModelEntry(model, served.backend, train=None, val=None)]
        running = await stack.enter_async_context(
            running_server(ServerSettings(**options), own, llm=model)
        )
        details["url"] = running.url
        if model is not None:
            details["model"] = model
            greeting += "\nrollouts that name no resources get the model {model}"
        await until_stopped(greeting.format_map(details), details if as_json else None)
        calls = sum(running.gateway.statistics.calls.values())
    if upstream is not None:
        shed = running.gateway.shed
        note(f"calls: {calls}, recorded: {calls - shed}")
        if as_json:
            print_json({"calls": calls, "recorded": calls - shed})


async def until_stopped(greeting: str, details: object = None) -> None:
    """Print that the server is up, with `details` for JSON, and return at Ctrl-C or SIGTERM."""
    stopping = asyncio.Event()
    with on_signal(stopping.set):
        note(greeting)
        if details is not None:
            print_json(details)
        await stopping.wait()
    note("stopping")


@click.command()
@click.argument("places", metavar="[FOLDER|STORE|URL]...", nargs=-1)
@key_option("The key of servers at a URL; every one gets it.")
@port_option(8124)
@json_option
def ui(places: tuple[str, ...], key: str | None, port: int, as_json: bool) -> None:
    """Show runs and rollouts in the browser.

    The page follows them while they run, and changes nothing.

    Each argument is a folder (default: this one) whose stores are found as they come and go, a
    store's file, a postgresql:// URL, or the URL of an `agl server`."""
    from agentlightning.server.serve import run_on_fastest_loop

    run_on_fastest_loop(_ui(places or (".",), key, port, as_json))


async def _ui(places: tuple[str, ...], key: str | None, port: int, as_json: bool) -> None:
    from agentlightning.server.app import create_app
    from agentlightning.server.local_keys import local_key
    from agentlightning.server.serve import HttpServer
    from agentlightning.store.base import LightningStore
    from agentlightning.store.client import LightningStoreClient
    from agentlightning.store.many import ManyStores
    from agentlightning.store.reader import StoreReader

    own = local_key(f"http://127.0.0.1:{port}", make=True) or secrets.token_urlsafe(32)
    async with contextlib.AsyncExitStack() as stack:
        folders = list[Path]()
        others = dict[str, LightningStore]()
        for place in places:
            url = urlsplit(place)
            if place.startswith(POSTGRES):
                others[f"{url.hostname}{url.path}"] = await StoreReader.open(place)
            elif url.scheme in ("http", "https"):
                others[url.netloc] = LightningStoreClient(
                    place, key or local_key(place), patience=2.0
                )
            else:
                folders.append(folder_or_store(place))
        stores = await ManyStores.open(folders, others)
        stack.push_async_callback(stores.close)
        http = await stack.enter_async_context(
            HttpServer(create_app(stores, admin_key=own), port=port)
        )
        for path, problem in stores.problems.items():
            note(f"skipped {path}: {problem}")
        runs = len(await stores.query_runs())
        url = f"{http.url}/open/{own}"
        shown = ", ".join([*map(str, folders), *others])
        greeting = (
            f"{runs} run{'s' * (runs != 1)} in {shown}; new ones appear by themselves\n"
            f"dashboard: {url}"
        )
        await until_stopped(greeting, {"url": url} if as_json else None)
