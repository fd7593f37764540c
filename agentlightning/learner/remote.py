"""A sampler on vLLM or SGLang servers, which load each publication from files that they can read.

Knows the requests of such a server and their order; no algorithm, store or table of models.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from typing import Any, Final

import msgspec
import numpy as np
import torch

from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import (
    Backend,
    BackendEvent,
    Delta,
    ModelCall,
    RelayedAnswer,
    RelayedCall,
    Sampling,
)
from agentlightning.gateway.backends.connection import BROKE_OFF, UNREACHABLE, BackendConnection
from agentlightning.gateway.backends.factory import with_version
from agentlightning.gateway.backends.tokens import SglangBackend, VllmBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.probe import one_answer, probe
from agentlightning.gateway.replicas import RemoteBackend, Replicas
from agentlightning.gateway.updates import load_adapter, load_weights, unload_adapter
from agentlightning.learner.base import Weights, WeightsForm
from agentlightning.learner.pair_specs import SamplerSpec
from agentlightning.learner.policy import Policy
from agentlightning.learner.servers import StartedServer

_log = logging.getLogger(__name__)

PROBED_TOKENS: Final = 16
_PATIENCE: Final = 300.0  # seconds for a server to recover
_CHECK_SECONDS: Final = 1.0  # between checks for lost servers
_HEALTH_SECONDS: Final = 2.0
# on a server, beside the newest; a running call continues with an unloaded one
_ADAPTERS_KEPT: Final = 2


class Activity:
    """Counts running calls: `with activity:` around each. `idle_seconds` is how long none has
    run."""

    def __init__(self) -> None:
        self.running = 0
        self.none = asyncio.Event()
        self.none.set()
        self._idle = 0.0
        self._since = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        return self._idle + (0.0 if self.running else time.monotonic() - self._since)

    def __enter__(self) -> None:
        self._idle = self.idle_seconds
        self.running += 1
        self.none.clear()

    def __exit__(self, *_: object) -> None:
        self.running -= 1
        if not self.running:
            self._since = time.monotonic()
            self.none.set()


class RemoteSampler:
    """A `Sampler` for `policy`, and the backend of its calls, on the servers at `place` or on a
    `started` one. vLLM loads an adapter beside its base model, under a name per version; SGLang
    gets it merged. A server that `sleeps` frees its GPU memory while a step is computed. Prompt and
    answer have at most `max_sequence_length` tokens; default: the server's limit."""

    def __init__(
        self,
        place: SamplerSpec,
        policy: Policy,
        started: StartedServer | None = None,
        *,
        sleeps: bool = False,
        max_sequence_length: int | None = None,
    ) -> None:
        self.takes: WeightsForm = (
            "adapter" if policy.adapter is not None and place.vllm else "whole"
        )
        chat = ChatTemplate.from_pretrained(policy.tokenizer)
        addresses = [(url, place.api_key, None) for url in place.urls]
        if started is not None:
            addresses = [(started.url, None, started.socket)]
        self._servers: list[VllmBackend | SglangBackend] = []
        for url, key, socket in addresses:
            url = with_version(url, place.kind)
            if place.vllm:
                server = VllmBackend(url, chat, api_key=key, model=place.model, socket=socket)
            else:
                server = SglangBackend(BackendConnection(url, api_key=key), chat)
            self._servers.append(server)
        self._started = started
        self._sleeps = sleeps
        self._sleeping = False
        self._max_sequence_length = max_sequence_length
        self._replicas = Replicas(self._servers, lost=self._lost)
        self._weights: Weights | None = None  # the newest
        self._gone: set[RemoteBackend] = set()  # lost; they have other weights when they return
        self._changing = asyncio.Lock()  # of the weights of any server
        self._run = f"policy-{secrets.token_hex(4)}"  # other runs may use the same server
        self._adapters: list[str] = []
        self._usable = asyncio.Event()  # set while calls can start
        self._usable.set()
        self.name = self._replicas.name
        self.relays = self._replicas.relays
        self.captures_tokens = self._replicas.captures_tokens
        self.seeded = self._replicas.seeded
        self.generated_tokens = 0
        self._streams = place.kind == "vllm"
        self._activity = Activity()

    @property
    def backend(self) -> RemoteSampler:
        return self

    @property
    def idle_seconds(self) -> float:
        return self._activity.idle_seconds

    async def check(self, train: Sampling) -> None:
        """Ask the servers for their model's name. ConfigError if one cannot be reached, or if its
        answers cannot be trained."""
        for server in self._servers:
            if self._started is not None:
                await self._started.ready(server.connection)
            served = await _served(server)
            of_ids: Any = server
            if isinstance(server, VllmBackend):
                if server.model is None and len(served) != 1:
                    names = ", ".join(served) or "nothing"
                    raise ConfigError(
                        f"the sampler at {server.name} serves {names}: choose one as `model`"
                    )
                server.model = server.model or next(iter(served))
                of_ids = server.of_ids
            lengths = {*served.values(), self._max_sequence_length}
            of_ids.max_sequence_length = min(
                (length for length in lengths if length is not None), default=None
            )
            await probe(server, "policy", train)

    def exclusive(self) -> AbstractAsyncContextManager[Any]:
        return (
            self._engine_asleep() if self._sleeps else nullcontext()
        )  # otherwise it has its own memory

    @asynccontextmanager
    async def _engine_asleep(self) -> AsyncGenerator[None]:
        # running calls continue afterwards
        await _post(self._servers[0].connection, "sleep?level=1&mode=keep")
        self._sleeping = True
        try:
            yield
        finally:
            async with self._changing:
                await self._wake()

    async def _wake(self) -> None:
        if self._sleeping:
            torch.cuda.empty_cache()  # the learner is in this process
            await _post(self._servers[0].connection, "wake_up")
            self._sleeping = False

    async def publish(self, weights: Weights) -> None:
        async with self._changing:
            await self._wake()
            self._weights = weights
            if self.takes == "whole":
                self._usable.clear()
            try:
                await self._load(self._servers, weights)
            finally:
                self._open_or_close()

    async def sample(self) -> list[TrainingSequence]:
        return [
            await short_answer(server) for server in self._servers if not server.connection.unusable
        ]

    async def watch(self, calls_held: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self._changing.locked() or self._sleeping:
                continue
            await self._check_servers()
            if not self._usable.is_set():
                async with calls_held():
                    await self._until_usable()

    async def _until_usable(self) -> None:
        """Wait until a server can sample; BackendError if that takes too long."""
        give_up = time.monotonic() + _PATIENCE
        while not self._usable.is_set():
            if time.monotonic() > give_up:
                why = "; ".join(str(server.connection.unusable) for server in self._servers)
                raise BackendError(
                    f"no sampler for {_PATIENCE:g} seconds; `agl train --resume` continues: {why}"
                )
            await asyncio.sleep(_CHECK_SECONDS)
            await self._check_servers()

    async def _check_servers(self) -> None:
        """Detect lost servers, and give the newest weights to those that returned. BackendError if
        the run's own server has ended. A live server that refused weights is not tried again."""
        if self._started is not None and (ended := self._started.ended()):
            raise BackendError(
                f"the sampler is gone; `agl train --resume` continues with another: {ended}"
            )
        async with self._changing:
            for server in self._servers:
                if not server.connection.unusable:
                    # a slow one lives
                    if await server.connection.health(_HEALTH_SECONDS) in (UNREACHABLE, BROKE_OFF):
                        self._lost(server)
                elif not await server.connection.healthy(_HEALTH_SECONDS, control=True):
                    self._gone.add(server)
                elif server in self._gone and self._weights is not None:
                    self._gone.discard(server)
                    with suppress(BackendError):  # its connection has the reason
                        await self._load([server], self._weights)
            self._open_or_close()

    def _lost(self, server: RemoteBackend) -> None:
        """Send a server no calls until it has the newest weights."""
        server.connection.unusable = (
            f"the server at {server.name} was lost, and with it the weights that it had"
        )
        self._gone.add(server)
        self._open_or_close()

    def _open_or_close(self) -> None:
        """Calls wait while no server can be used."""
        if all(server.connection.unusable for server in self._servers):
            self._usable.clear()
        else:
            self._usable.set()

    async def _load(self, servers: Sequence[VllmBackend | SglangBackend], weights: Weights) -> None:
        """Load the weights on these servers; a server that fails gets no calls. BackendError if all
        fail."""
        if self.takes == "whole":
            await load_weights(servers, weights.version, str(weights.place))
            return
        name = f"{self._run}-{weights.version}"
        if name in self._adapters:  # a server that seemed lost may have it
            await self._unload(servers, [name])
        failures: list[BackendError] = []
        for server in servers:
            assert isinstance(server, VllmBackend)
            try:
                await load_adapter(server.connection, name, str(weights.place))
            except BackendError as error:
                server.connection.unusable = (
                    f"{server.name} has not loaded the adapter {name}: {error}"
                )
                failures.append(error)
            else:  # calls continue with the adapter that they started with
                server.model = name
                server.connection.version = weights.version
                server.keeps_weights = True
                server.connection.unusable = None
        if len(failures) == len(servers):
            raise failures[0]
        if name not in self._adapters:
            await self._unload(self._servers, self._adapters[:-_ADAPTERS_KEPT])
            self._adapters = [*self._adapters[-_ADAPTERS_KEPT:], name]

    async def _unload(self, servers: Sequence[RemoteBackend], names: Sequence[str]) -> None:
        for server in servers:
            for name in names:
                with suppress(BackendError):  # a lost server has forgotten it
                    await unload_adapter(server.connection, name)

    # --- the backend ---

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.answer`. New weights end a call at SGLang, which is therefore not streamed
        and begins anew; nor can an agent that does not read its answer delay them."""
        if not self._streams:
            call = msgspec.structs.replace(call, stream=False)
        started = False
        repeated = False
        while True:
            await self._usable.wait()
            weights = self._weights
            try:
                with self._activity:
                    async with aclosing(self._replicas.answer(call)) as events:
                        async for event in events:
                            started = True
                            if isinstance(event, Delta):
                                self.generated_tokens += len(event.token_ids)
                            yield event
                return
            except BackendError:
                replaced = self._weights is not weights
                # A call that is not ended by new weights may be what crashes its servers.
                if started or (not replaced and (repeated or self._usable.is_set())):
                    raise
                repeated = repeated or not replaced

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        return self._replicas.relay(call)

    async def count_tokens(self, call: ModelCall) -> int:
        return await self._replicas.count_tokens(call)

    async def close(self) -> None:
        await self._unload(self._servers, self._adapters)
        await self._replicas.close()


async def _post(connection: BackendConnection, route: str, body: bytes = b"{}") -> None:
    async with connection.posted(
        f"{connection.root}/{route}", body, accepted=True, control=True
    ) as response:
        await response.read()


async def _served(server: RemoteBackend) -> dict[str, int | None]:
    """The longest sequence of each of the server's models, without adapters."""
    url = server.connection.url("models")
    try:
        async with server.connection.posted(url, None, accepted=True) as response:
            listed = msgspec.json.decode(await response.read())["data"]
        return {
            model["id"]: model.get("max_model_len")
            for model in listed
            if model.get("parent") is None
        }
    except (BackendError, msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the sampler at {server.name} does not list its models: {error}"
        ) from None


async def short_answer(backend: Backend) -> TrainingSequence:
    """The answer to "Hi", to compare with a learner."""
    answer = await one_answer(backend, "policy", Sampling(max_tokens=PROBED_TOKENS, seed=0))
    return sampled_sequence(
        answer.prompt_token_ids, answer.choices[0].token_ids, answer.choices[0].logprobs
    )


def sampled_sequence(
    prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]
) -> TrainingSequence:
    """A prompt and the tokens sampled after it, to compare with the learner."""
    ids = [*prompt_ids, *token_ids]
    sampled = range(len(prompt_ids), len(ids))
    return TrainingSequence.of("parity", ids, sampled, logprobs=np.array(logprobs, np.float32))
