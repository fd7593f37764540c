"""`agl server` as one object: store, gateway, HTTP and retention, started and stopped in order; and
a trainer's models, served for such a server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agentlightning.data.references import load_reference
from agentlightning.errors import AgentLightningError, ConfigError, UnavailableError
from agentlightning.garbage import rare_garbage_collection
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.prompts.replacing import Replacer
from agentlightning.proxies import is_loopback
from agentlightning.server.app import ServerSettings, create_app
from agentlightning.server.gateways import Gateways
from agentlightning.server.model_calls import (
    HoldModel,
    Models,
    RegisterModel,
    ReleaseModel,
    RemoveModel,
    registration,
)
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.client import PATIENCE_SECONDS, LightningStoreClient
from agentlightning.store.records import audit
from agentlightning.store.redaction import redaction
from agentlightning.store.retention import ended_before
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, OWN_ENDPOINT, PromptCandidate

if TYPE_CHECKING:
    from agentlightning.server.forwarder import Forwarder

HOURLY: Final = 3600.0
_PATIENCE: Final = 2.0  # seconds in which the server that gets models may be away
_PAUSE: Final = 1.0  # seconds until a server that went away is looked for again
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Running:
    """Where a server can be reached."""

    url: str
    gateway: Gateway


@asynccontextmanager
async def running_server(
    settings: ServerSettings, models: Sequence[ModelEntry] = (), *, llm: str | None = None
) -> AsyncGenerator[Running]:
    """A server, with `models` of this process, for as long as the block lasts. Rollouts that name
    no resources get the model `llm`. At its end it takes no more requests, answers those it has,
    and closes the store: what it acknowledged is there."""
    async with AsyncExitStack() as stack:
        stack.enter_context(rare_garbage_collection())
        forwarder = _forwarder(settings)
        if forwarder is not None:
            stack.push_async_callback(forwarder.close)  # after all that may still store something
        hook = load_reference(settings.hook) if settings.hook else None
        store = await SqlStore.open(
            settings.store,
            synchronous=settings.synchronous,
            redact=redaction(settings.capture, hook),
            observer=None if forwarder is None else forwarder.take,
        )
        stack.push_async_callback(store.close)
        # Other models come and go: each trainer that joins brings its own.
        gateway = Gateway(
            ModelTable(models),
            store,
            admin_key=settings.key,
            body_limit=settings.body_limit,
            prompts=await in_production(store, settings.prompts),
            redact=redaction("full", hook),
        )
        stack.push_async_callback(gateway.close)
        table = Models(gateway)
        # With a hook or a collector, more becomes of spans here than rows.
        rows = settings.hook is None and forwarder is None
        gateways = Gateways(table, store, settings.capture if rows else None)
        for given in settings.registrations:
            await table.put(given)
        if llm is not None:
            await _set_default_model(store, llm)
        readings = [gateways.reading, *([] if forwarder is None else forwarder.readings())]
        http = http_server(
            settings, store, gateway, models=table, gateways=gateways, readings=readings
        )
        await stack.enter_async_context(http)
        if settings.retain_seconds is not None:
            work = asyncio.create_task(retain(store, settings.retain_seconds), name="retention")
            stack.push_async_callback(cancel, work)
        yield Running(http.url, gateway)


def http_server(
    settings: ServerSettings, store: LightningStore | None, gateway: Gateway, **parts: Any
) -> HttpServer:
    """The application of a store and a gateway, with further `parts` of `create_app`, at the
    address in `settings`."""
    app = create_app(
        store,
        gateway=gateway,
        admin_key=settings.key,
        body_limit=settings.body_limit,
        rate_limit=settings.rate_limit,
        access_log=settings.access_log,
        **parts,
    )
    return HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
    )


async def in_production(store: LightningStore, prompts: PromptCandidate | None) -> Replacer | None:
    """What puts a candidate into all calls. It is stored as resources of its own, by which spans
    name it; the latest resources stay those that there were."""
    if prompts is None:
        return None
    content = msgspec.json.encode(prompts, order="deterministic")
    resources_id = f"prompts-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    if await store.get_resources_by_id(resources_id) is None:
        latest = await store.get_latest_resources()
        await store.update_resources(resources_id, {"prompts": prompts})
        if latest is not None:
            await store.add_resources(
                latest.resources, latest.metadata, parent_id=latest.resources_id
            )
    return Replacer(prompts, resources_id)


async def _set_default_model(store: LightningStore, model: str) -> None:
    """Make the model the `llm` of the latest resources, unless it is."""
    latest = await store.get_latest_resources()
    given = {} if latest is None else latest.resources
    offered = LLM(endpoint=OWN_ENDPOINT, model=model, gateway=True)
    if given.get("llm") != offered:
        await store.add_resources({**given, "llm": offered})


def _forwarder(settings: ServerSettings) -> Forwarder | None:
    """ConfigError for a server that would send its spans to itself, and again, and for headers to
    nowhere."""
    if settings.otlp_forward is None:
        if settings.otlp_forward_headers:
            raise ConfigError(
                "--otlp-forward-header is for the collector at --otlp-forward; give that too"
            )
        return None
    try:
        from agentlightning.server.forwarder import Forwarder, traces_url
    except ImportError:
        raise ConfigError(
            "--otlp-forward needs OpenTelemetry: pip install 'agent-lightning-next[otel]'"
        ) from None
    url = traces_url(settings.otlp_forward)
    same_host = url.host == settings.host or (is_loopback(url.host) and is_loopback(settings.host))
    if same_host and url.port == settings.port:
        raise ConfigError(
            f"{url} is this server itself; give the address of another collector to forward spans "
            "to"
        )
    return Forwarder(url, dict(settings.otlp_forward_headers))


async def retain(
    store: LightningStore, older_than_seconds: float, *, every_seconds: float = HOURLY
) -> None:
    """Remove the rollouts that ended longer ago than that by the store's clock, each when all of
    its group did, at once and then again and again, until cancelled.

    While the store cannot be written nothing is removed, and the next round tries again."""
    while True:
        try:
            where = ended_before(await store.get_time() - older_than_seconds)
            audit("delete_rollouts", "retention", {})
            deleted = await store.delete_rollouts(where)
        except UnavailableError as error:
            _log.warning(
                "old rollouts could not be removed, trying again in %g s: %s", every_seconds, error
            )
        else:
            if deleted.rollouts:
                _log.info("removed %d rollouts, with %d spans", deleted.rollouts, deleted.spans)
        await asyncio.sleep(every_seconds)


async def cancel(task: asyncio.Task[None]) -> None:
    """End a task, and return when it has ended."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def lend_models(
    server: str, entries: Sequence[ModelEntry], *, port: int, api_key: str | None, owner: str
) -> AsyncGenerator[None]:
    """As long as the block lasts the gateway of `server` routes to these models of this process,
    which are served on loopback with a key that the server alone has: it says whose calls they
    are."""
    key = secrets.token_urlsafe()
    gateway = Gateway(ModelTable(entries), admin_key=key)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.close)
        http = await stack.enter_async_context(
            HttpServer(create_app(None, gateway=gateway), port=port)
        )
        client = LightningStoreClient(server, api_key, patience=_PATIENCE)
        stack.push_async_callback(client.close)
        calls = [
            registration(entry, f"{http.url}/v1", api_key=key, owner=owner) for entry in entries
        ]
        for call in calls:
            stack.push_async_callback(_remove, client, RemoveModel(name=call.name, owner=owner))
        registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keeping = asyncio.create_task(
            _keep_registered(client, calls, registered), name="registration of models"
        )
        stack.push_async_callback(cancel, keeping)
        await registered
        yield


async def _keep_registered(
    client: LightningStoreClient, calls: Sequence[RegisterModel], registered: asyncio.Future[None]
) -> None:
    """Register models at a server, and again whenever it has been away: one that starts anew knows
    none. `registered` is resolved by the first time, or gets its error."""
    give_up = time.monotonic() + PATIENCE_SECONDS

    async def register() -> None:
        again = registered.done()
        for call in calls:  # their servers were checked the first time, and may be busy now
            await client.perform(msgspec.structs.replace(call, check=False) if again else call)
        if again:
            _log.warning("the server at %s is back; its models are registered again", client.url)
        else:
            registered.set_result(None)

    while True:
        try:
            await client.while_reached(register)
        except AgentLightningError as error:
            away = isinstance(error, UnavailableError)
            if not registered.done() and not (away and time.monotonic() < give_up):
                registered.set_exception(error)
                return
            if not away:
                _log.error("the models cannot be registered again, trying on: %s", error)
        await asyncio.sleep(_PAUSE)


async def _remove(client: LightningStoreClient, call: RemoveModel) -> None:
    # a server that is gone routes nowhere; if it refuses, it has not registered it
    with suppress(AgentLightningError):
        await client.perform(call)


@asynccontextmanager
async def models_held(
    server: str, names: Sequence[str], *, api_key: str | None, lease: float = 60.0
) -> AsyncGenerator[None]:
    """Calls of the models wait at the gateway of `server` as long as the block lasts, and for at
    most `lease` seconds more if this process dies in it. If the server cannot be reached, this is
    logged, and they do not wait."""
    client = LightningStoreClient(server, api_key, patience=_PATIENCE)

    async def send(calls: Sequence[StoreCall]) -> None:
        try:
            await asyncio.gather(*map(client.perform, calls))
        except AgentLightningError as error:  # a hold is not worth the end of a run
            _log.warning(
                "the calls of agents do not wait for new weights with their clocks stopped: %s",
                error,
            )

    async def renew() -> None:
        while not ended.is_set():
            try:
                async with asyncio.timeout(lease / 3):
                    await ended.wait()
            except TimeoutError:
                await send(holds)

    holds = [HoldModel(name=name, seconds=lease) for name in names]
    await send(holds)
    ended = asyncio.Event()
    renewing = asyncio.create_task(renew(), name="holds of models")
    try:
        yield
    finally:
        ended.set()
        await renewing  # a request to hold must not arrive after the one to release
        await send([ReleaseModel(name=name) for name in names])
        await client.close()
