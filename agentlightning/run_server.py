"""Opens the store and the gateway of a run: this process's own, or those of an `agl server`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path

import msgspec

from agentlightning.algorithm import Algorithm, Baseline, Reinforcement
from agentlightning.config import RunConfig
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.backends.factory import frozen_entry
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ANY, ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.local_keys import local_key, offered_key
from agentlightning.server.serve import HttpServer
from agentlightning.server.server_process import in_production, lend_models, models_held
from agentlightning.store.base import LightningStore
from agentlightning.store.client import PATIENCE_SECONDS, LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import FrozenModel


async def open_store(stack: AsyncExitStack, config: RunConfig, directory: Path) -> LightningStore:
    """The store of a run in `directory`; `stack` closes it, unless the caller opened it."""
    if isinstance(config.store, LightningStore):
        return config.store
    store: LightningStore
    if config.server is not None:
        store = LightningStoreClient(config.server, api_key=config.api_key)
    else:
        path = config.store or directory / "store.sqlite"
        store = await SqlStore.open(path, patience=PATIENCE_SECONDS)
    stack.push_async_callback(store.close)
    return store


def model_entries(
    config: RunConfig,
    algorithm: Algorithm,
    backends: Mapping[str, Backend],
    frozen: Mapping[str, FrozenModel],
) -> list[ModelEntry]:
    """The models behind the gateway: the trained policies or the given endpoint, then the frozen
    ones."""
    train = val = Sampling()
    if isinstance(algorithm, Reinforcement | Baseline):
        train = Sampling(temperature=algorithm.temperature, max_tokens=algorithm.max_tokens)
        val = train
    if isinstance(algorithm, Reinforcement):
        val = msgspec.structs.replace(train, temperature=algorithm.val_temperature)
    entries = [
        ModelEntry(name, backend, train=train, val=val) for name, backend in backends.items()
    ]
    llm = config.endpoint
    if llm is not None and not backends:
        upstream = FrozenModel(endpoint=llm.endpoint, frozen=True, api_key=llm.api_key)
        entries.append(frozen_entry(llm.model, upstream, ANY))
    return entries + [frozen_entry(name, model) for name, model in frozen.items()]


async def connect(
    stack: AsyncExitStack,
    config: RunConfig,
    store: LightningStore,
    entries: list[ModelEntry],
    run_id: str,
) -> tuple[str, str, Callable[[], AbstractAsyncContextManager[None]]]:
    """Put the models behind a gateway, this process's or the server's. Returns its URL, the
    dashboard's, and a function that holds the calls of trained models."""
    held = [entry.name for entry in entries if entry.trainable]
    port = config.port
    api_key = config.api_key
    if config.server is not None:
        url = config.server.rstrip("/")
        if not entries:
            return url, url, nullcontext
        await stack.enter_async_context(
            lend_models(config.server, entries, port=port, api_key=api_key, owner=run_id)
        )
        return url, url, partial(models_held, url, held, api_key=api_key)
    gateway = None
    if entries:
        prompts = await in_production(store, config.candidate)
        gateway = Gateway(ModelTable(entries), store, prompts=prompts)
    if gateway is not None:
        stack.push_async_callback(gateway.close)
    key = api_key or local_key(f"http://127.0.0.1:{port}", make=True) or secrets.token_urlsafe(32)
    http = await stack.enter_async_context(
        HttpServer(create_app(store, gateway=gateway, admin_key=key), port=port)
    )
    stack.enter_context(nullcontext() if port or api_key else offered_key(http.url, key))
    calls_held = partial(gateway.held, *held) if gateway else nullcontext
    return http.url, f"{http.url}/open/{key}", calls_held
