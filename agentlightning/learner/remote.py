"""A sampler on servers of its own, vLLM or SGLang, which load each publication from files that they can read.

Knows what such a server is told and in which order. Knows no algorithm, no store and no table of models.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any, Final

import msgspec
import numpy as np

from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import BackendError, ConfigError, UnavailableError
from agentlightning.gateway.backend import BackendEvent, Delta, ModelCall, RelayedAnswer, RelayedCall, Sampling
from agentlightning.gateway.backends.connection import Connection
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.backends.sglang import SglangBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.probe import one_answer, probe
from agentlightning.gateway.replicas import RemoteBackend, Replica, Replicas
from agentlightning.gateway.updates import WeightUpdate, load_adapter, load_weights, unload_adapter
from agentlightning.learner.base import Weights, WeightsForm
from agentlightning.learner.policy import Policy
from agentlightning.learner.started import StartedServer

START: Final = "start"
_PROBED_TOKENS: Final = 16
_PATIENCE: Final = 300.0  # seconds for calls to finish, where a server cannot pause them
_ADAPTERS_KEPT: Final = 2  # on a server, for calls that began with the one before


class RemoteSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a policy is sampled: the base URL of a `vllm` or of an `sglang` server, or those of several that answer
    alike. `model` is the server's name for it, where it serves several; `api_key` its key.

    With `start` in place of a URL vLLM is started with the run and ended with it: `program` is its command, `flags` and
    `environment` are added to what it is given."""

    vllm: str | list[str] | None = None
    sglang: str | list[str] | None = None
    model: str | None = None
    api_key: str | None = None
    program: str = "vllm"
    flags: list[str] = []
    environment: dict[str, str] = {}

    @property
    def starts(self) -> bool:
        return self.vllm == START

    @property
    def urls(self) -> list[str]:
        given = self.vllm or self.sglang or []
        return [given] if isinstance(given, str) else given


def read_sampler(
    given: str | Mapping[str, Any] | None, *, models: int, deterministic: bool, overlaps: bool
) -> RemoteSampling | None:
    """What a run of so many models says of its sampler; None for the engine in the trainer's process. ConfigError for
    what is neither, and for what does not go with it: a `deterministic` run, or one that `overlaps` its rollouts."""
    if given in (None, "embedded"):
        return None
    forms = "write embedded, vllm, {vllm: http://host:8000/v1} or {sglang: http://host:30000/v1}"
    try:
        sampling = RemoteSampling(vllm=START) if given == "vllm" else msgspec.convert(given, RemoteSampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sampler is {given!r} ({error}); {forms}") from None
    if len([kind for kind in (sampling.vllm, sampling.sglang) if kind]) != 1:
        raise ConfigError(f"sampler is {given!r}; {forms}")
    if sampling.sglang and sampling.model:
        raise ConfigError("sampler: an SGLang server has one model; leave `model` out")
    if (sampling.flags or sampling.environment or sampling.program != "vllm") and not sampling.starts:
        raise ConfigError("sampler: program, flags and environment are of a server that is started: {vllm: start, …}")
    if models != 1:
        raise ConfigError(f"a sampler by URL serves one model, and {models} are trained: leave `sampler` out")
    if deterministic:
        raise ConfigError("deterministic needs the embedded sampler: servers put calls into batches as they come")
    if overlaps and sampling.sglang:
        raise ConfigError("max_staleness needs a sampler that pauses calls for new weights: vLLM does, SGLang does not")
    return sampling


class RemoteSampler:
    """A `Sampler` on the servers that `sampling` names, or on the one that was `started`, for `policy`; and the backend
    of its calls. vLLM takes an adapter beside the model that it was started with, under a name for each version;
    SGLang gets it merged."""

    def __init__(self, sampling: RemoteSampling, policy: Policy, started: StartedServer | None = None) -> None:
        self.takes: WeightsForm = "adapter" if policy.adapter is not None and sampling.vllm else "whole"
        urls = sampling.urls if started is None else [started.url]
        self._servers = [_server(sampling, url, policy) for url in urls]
        self._started = started
        self._replicas = Replicas([Replica(server) for server in self._servers])
        self._run = f"policy-{secrets.token_hex(4)}"  # other runs may use the same server
        self._adapters: list[str] = []
        self._usable = asyncio.Event()  # calls wait for it before they begin
        self._usable.set()
        self._unused = asyncio.Event()
        self._unused.set()
        self.name, self.relays = self._replicas.name, self._replicas.relays
        self.captures_tokens, self.seeded = self._replicas.captures_tokens, self._replicas.seeded
        self.generated_tokens = 0
        self._running, self._idle, self._idle_since = 0, 0.0, time.monotonic()

    @property
    def pauses(self) -> bool:
        """Whether calls go on through a publication; else they end before it."""
        return all(server.kind == "vllm" for server in self._servers)

    @property
    def backend(self) -> RemoteSampler:
        return self

    @property
    def idle_seconds(self) -> float:
        return self._idle + (0.0 if self._running else time.monotonic() - self._idle_since)

    async def check(self, train: Sampling) -> None:
        """Find out what the servers call their model. ConfigError where one cannot be reached, or where what it answers
        cannot be trained."""
        for server in self._servers:
            if self._started is not None:
                await self._started.ready(server.connection)
            if isinstance(server, HttpBackend) and server.model is None:
                server.model = await _served_model(server)
            await probe(server, "policy", train)

    def exclusive(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()  # it has weights and cores of its own

    async def publish(self, weights: Weights) -> None:
        if self.takes == "adapter":
            await self._publish_adapter(weights)
            return
        self._usable.clear()
        try:
            if not self.pauses:
                await self._finished()
            in_flight = "pause" if self.pauses else "finish"
            update = WeightUpdate(policy_version=weights.version, path=str(weights.place), in_flight=in_flight)
            await load_weights("policy", self._servers, update)
        finally:
            self._usable.set()

    async def sample(self) -> list[TrainingSequence]:
        sampling = Sampling(max_tokens=_PROBED_TOKENS, seed=0)
        answers = [await one_answer(server, "policy", sampling) for server in self._servers]
        return [
            sampled_sequence(answer.prompt_token_ids, answer.choices[0].token_ids, answer.choices[0].logprobs)
            for answer in answers
        ]

    async def _publish_adapter(self, weights: Weights) -> None:
        """Calls go on with the adapter that they began with."""
        name = f"{self._run}-{weights.version}"
        for server in self._servers:
            await load_adapter(server.connection, name, str(weights.place))
        for server in self._servers:
            assert isinstance(server, HttpBackend)
            server.model, server.connection.version, server.keeps_weights = name, weights.version, True
        await self._unload(self._adapters[:-_ADAPTERS_KEPT])
        self._adapters = [*self._adapters[-_ADAPTERS_KEPT:], name]

    async def _unload(self, names: Sequence[str]) -> None:
        for server in self._servers:
            for name in names:
                with suppress(BackendError):  # a server that is gone has forgotten it
                    await unload_adapter(server.connection, name)

    async def _finished(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._unused.wait()
        except TimeoutError:
            raise UnavailableError(
                f"{self._running} calls have not finished within {_PATIENCE:g} seconds, and SGLang loads no weights "
                "while it answers"
            ) from None

    # --- the backend ---

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        await self._usable.wait()
        self._enter()
        try:
            async with aclosing(self._replicas.answer(call)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        self.generated_tokens += len(event.token_ids)
                    yield event
        finally:
            self._leave()

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        return self._replicas.relay(call)

    async def count_tokens(self, call: ModelCall) -> int:
        return await self._replicas.count_tokens(call)

    async def close(self) -> None:
        await self._unload(self._adapters)
        await self._replicas.close()

    def _enter(self) -> None:
        if not self._running:
            self._idle += time.monotonic() - self._idle_since
        self._running += 1
        self._unused.clear()

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._unused.set()
            self._idle_since = time.monotonic()


def _server(sampling: RemoteSampling, url: str, policy: Policy) -> RemoteBackend:
    url = url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    if sampling.vllm:
        return HttpBackend(url, kind="vllm", api_key=sampling.api_key, model=sampling.model)
    return SglangBackend(Connection(url, api_key=sampling.api_key), ChatTemplate.from_pretrained(policy.tokenizer))


class _Served(msgspec.Struct):
    id: str
    parent: str | None = None  # of an adapter


class _ServedModels(msgspec.Struct):
    data: list[_Served]


async def _served_model(server: HttpBackend) -> str:
    url = server.connection.url("models")
    try:
        async with server.connection.posted(url, None, accepted=True) as response:
            served = msgspec.json.decode(await response.read(), type=_ServedModels)
    except (BackendError, msgspec.DecodeError) as error:
        raise ConfigError(f"the sampler at {server.name} cannot be asked for its models: {error}") from None
    names = [one.id for one in served.data if one.parent is None]
    if len(names) != 1:
        raise ConfigError(f"the sampler at {server.name} serves {', '.join(names) or 'nothing'}: say which as `model`")
    return names[0]


def sampled_sequence(
    prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]
) -> TrainingSequence:
    """A prompt and what was sampled after it, to compare with the learner."""
    prompt, count = len(prompt_ids), len(token_ids)
    return TrainingSequence(
        rollout_id="parity",
        token_ids=np.array([*prompt_ids, *token_ids], np.int32),
        positions=np.arange(prompt, prompt + count, dtype=np.int32),
        transitions=np.zeros(count, np.int32),
        logprobs=np.array(logprobs, np.float32),
        advantages=np.zeros(count, np.float32),
        versions=np.full(count, -1, np.int32),
    )
