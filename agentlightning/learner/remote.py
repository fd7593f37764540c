"""A sampler on servers of its own, vLLM or SGLang, which load each publication from files that they can read.

Knows what such a server is told and in which order. Knows no algorithm, no store and no table of models.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch

from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import BackendError, ConfigError, UnavailableError, nearest
from agentlightning.gateway.backend import Backend, BackendEvent, Delta, ModelCall, RelayedAnswer, RelayedCall, Sampling
from agentlightning.gateway.backends.connection import Connection
from agentlightning.gateway.backends.kinds import with_version
from agentlightning.gateway.backends.tokens import SglangBackend, VllmBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.probe import one_answer, probe
from agentlightning.gateway.replicas import RemoteBackend, Replicas
from agentlightning.gateway.updates import WeightUpdate, load_adapter, load_weights, unload_adapter
from agentlightning.learner.base import Weights, WeightsForm
from agentlightning.learner.policy import Policy
from agentlightning.learner.started import StartedServer

_log = logging.getLogger(__name__)

START: Final = "start"
_PROBED_TOKENS: Final = 16
_PATIENCE: Final = 300.0  # seconds for calls to finish, where a server cannot pause them
_LOOK_SECONDS: Final = 1.0  # between looks for servers that are lost
_HEALTH_SECONDS: Final = 2.0
_END_SECONDS: Final = 3.0  # a server that dies breaks its connections before its process has ended
_RESTARTS: Final = 3
_REPEATED: Final = 1  # how often a call is made again whose server has died
_ADAPTERS_KEPT: Final = 2  # on a server, beside those with which calls began that still run


class RemoteSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a policy is sampled: the base URL of a `vllm` or of an `sglang` server, or those of several that answer
    alike. `model` is the server's name for it, where it serves several; `api_key` its key.

    With `start` in place of a URL the server is started with the run and ended with it: `program` is vLLM's command, or
    the Python that has SGLang, `flags` and `environment` are added to what it is given."""

    vllm: str | list[str] | None = None
    sglang: str | list[str] | None = None
    model: str | None = None
    api_key: str | None = None
    program: str | None = None
    flags: list[str] = []
    environment: dict[str, str] = {}

    @property
    def kind(self) -> Literal["vllm", "sglang"]:
        return "vllm" if self.vllm else "sglang"

    @property
    def starts(self) -> bool:
        return START in (self.vllm, self.sglang)

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
    forms = "write embedded, vllm, sglang, {vllm: http://host:8000/v1} or {sglang: http://host:30000/v1}"
    try:
        sampling = msgspec.convert({given: START} if given in ("vllm", "sglang") else given, RemoteSampling)
    except msgspec.ValidationError as error:
        if isinstance(given, str):
            raise ConfigError(f"sampler is {given!r}; {forms}") from None
        for key in given or ():
            if key not in RemoteSampling.__struct_fields__:
                raise ConfigError(
                    f"sampler: unknown key {key!r}; {nearest(key, RemoteSampling.__struct_fields__)}"
                ) from None
        raise ConfigError(f"sampler: {error}; {forms}") from None  # without the key in it
    if len([kind for kind in (sampling.vllm, sampling.sglang) if kind]) != 1:
        raise ConfigError(f"sampler names {', '.join(given) or 'nothing'}; {forms}")
    if sampling.sglang and sampling.model:
        raise ConfigError("sampler: an SGLang server has one model; leave `model` out")
    if (sampling.flags or sampling.environment or sampling.program) and not sampling.starts:
        raise ConfigError(
            f"sampler: program, flags and environment are of a server that is started: {{{sampling.kind}: start, …}}"
        )
    for url in () if sampling.starts else sampling.urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"sampler: {url!r} is no address of a server; {forms}")
    if sampling.model and sampling.starts:
        raise ConfigError("sampler: a server that is started has the run's model alone; leave `model` out")
    if sampling.api_key and sampling.starts:
        raise ConfigError("sampler: api_key is that of a server by URL; one that is started is reached by no one else")
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
    SGLang gets it merged. One that `sleeps` has no memory on its GPU while a step is computed. Prompt and answer have
    `max_sequence_length` tokens at most, or what a server says that it takes."""

    def __init__(
        self,
        sampling: RemoteSampling,
        policy: Policy,
        started: StartedServer | None = None,
        *,
        sleeps: bool = False,
        max_sequence_length: int | None = None,
    ) -> None:
        self.takes: WeightsForm = "adapter" if policy.adapter is not None and sampling.vllm else "whole"
        chat = ChatTemplate.from_pretrained(policy.tokenizer)
        if started is None:
            self._servers = [_server(sampling, url, sampling.api_key, chat) for url in sampling.urls]
        else:
            self._servers = [_server(sampling, started.url, started.api_key, chat, started.socket)]
        self._started, self._sleeps, self._sleeping = started, sleeps, False
        self._max_sequence_length = max_sequence_length
        self._replicas = Replicas(self._servers, lost=self._lost)
        self._weights: Weights | None = None  # the newest
        self._gone: set[RemoteBackend] = set()
        self._changing = asyncio.Lock()  # of the weights of any server
        self._restarts = 0  # since the last publication
        self._run = f"policy-{secrets.token_hex(4)}"  # other runs may use the same server
        self._adapters: list[str] = []
        self._calls_with: Counter[str] = Counter()  # of each adapter
        self._usable = asyncio.Event()  # calls wait for it before they begin
        self._usable.set()
        self._unused = asyncio.Event()
        self._unused.set()
        self.name, self.relays = self._replicas.name, self._replicas.relays
        self.captures_tokens, self.seeded = self._replicas.captures_tokens, self._replicas.seeded
        self.generated_tokens = 0
        self.pauses = sampling.kind == "vllm"  # calls go on through a publication; else they end before it
        self.patience = _PATIENCE
        self._running, self._idle, self._idle_since = 0, 0.0, time.monotonic()

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
            served = await _served(server)
            if isinstance(server, VllmBackend):
                server.model = server.model or _only_model(server, served)
            lengths = {one.max_model_len for one in served if one.max_model_len} | {self._max_sequence_length}
            of_ids = server.of_ids if isinstance(server, VllmBackend) else server
            of_ids.max_sequence_length = min((one for one in lengths if one is not None), default=None)
            await probe(server, "policy", train)

    def exclusive(self) -> AbstractAsyncContextManager[Any]:
        return self._asleep() if self._sleeps else nullcontext()  # else it has memory of its own

    @asynccontextmanager
    async def _asleep(self) -> AsyncGenerator[None]:
        """A server that ends at it, or meanwhile, is started again when it is next looked at. BackendError of one that
        lives and does not do it."""
        await self._told("sleep?level=1&mode=keep")  # calls that run go on afterwards
        self._sleeping = True
        try:
            yield
        finally:
            async with self._changing:
                await self._wake()

    async def _wake(self) -> None:
        if self._sleeping:
            torch.cuda.empty_cache()  # of the learner, which is in this process
            await self._told("wake_up")
            self._sleeping = False

    async def _told(self, route: str) -> None:
        assert self._started is not None
        try:
            await _post(self._servers[0].connection, route, b"{}")
        except BackendError as error:
            if not await self._started.ended(_END_SECONDS):
                raise
            _log.warning("the sampler has ended: %s", error)
            self._lost(self._servers[0])

    async def publish(self, weights: Weights) -> None:
        async with self._changing:
            await self._wake()
            self._weights = weights
            if self.takes == "whole":
                self._usable.clear()
            try:
                if not self.pauses:
                    await self._finished()
                await self._load(self._servers, weights)
            except BackendError as error:
                if self._started is None or not await self._started.ended(_END_SECONDS):
                    raise
                await self._start_again(self._started, str(error))
            finally:
                self._settle()
            self._restarts = 0

    async def sample(self) -> list[TrainingSequence]:
        return [await short_answer(server) for server in self._servers if not server.connection.unusable]

    async def watch(self, calls_held: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._changing.locked() or self._sleeping:  # there is no memory for another one now
                continue
            if self._started is not None and await self._started.ended():
                self._lost(self._servers[0])
            for server in self._servers if self._started is None else ():
                if not server.connection.unusable and await server.connection.deserted(_HEALTH_SECONDS):
                    self._lost(server)  # what answers there next has other weights
            if self._usable.is_set():
                await self._take_up()
            if not self._usable.is_set():
                async with calls_held():
                    await self._until_usable()

    async def _until_usable(self) -> None:
        """Return when a server samples again; BackendError if that takes too long."""
        give_up = time.monotonic() + _PATIENCE
        while not self._usable.is_set():
            if time.monotonic() > give_up:
                why = "; ".join(str(server.connection.unusable) for server in self._servers)
                raise BackendError(f"no sampler for {_PATIENCE:g} seconds; `agl train --resume` goes on: {why}")
            await self._take_up()
            await asyncio.sleep(_LOOK_SECONDS)

    def _lost(self, server: RemoteBackend) -> None:
        """Send a server no calls before it has been given the newest weights."""
        server.connection.unusable = f"the server at {server.name} was lost, and with it the weights that it had"
        server.connection.lost = True
        self._gone.add(server)
        self._settle()

    def _settle(self) -> None:
        """Calls wait where no server can be used."""
        if all(server.connection.unusable for server in self._servers):
            self._usable.clear()
        else:
            self._usable.set()

    async def _take_up(self) -> None:
        """Give servers that were gone and answer again the newest weights; start one's own again if it has ended.
        BackendError where that one ends again and again. One that is there and refuses weights is left alone."""
        async with self._changing:
            for server in self._servers:
                if not server.connection.unusable or self._weights is None:
                    continue
                if self._started is not None and await self._started.ended():
                    await self._start_again(self._started, server.connection.unusable)
                elif not await server.connection.healthy(_HEALTH_SECONDS, control=True):
                    self._gone.add(server)
                elif server in self._gone:
                    self._gone.discard(server)
                    with suppress(BackendError):  # its connection says why
                        await self._load([server], self._weights)
            self._settle()

    async def _start_again(self, started: StartedServer, why: str) -> None:
        server = self._servers[0]
        while self._weights is not None:
            self._restarts += 1
            if self._restarts > _RESTARTS:
                raise BackendError(
                    f"the sampler has ended {self._restarts} times since weights were published; see {started.log}, "
                    f"then go on with `agl train --resume`: {why}"
                )
            _log.warning("the sampler has ended and is started again: %s", why)
            try:
                await started.start_again(server.connection)
                await self._load([server], self._weights)
            except (ConfigError, BackendError) as error:
                why = str(error)
            else:
                return

    async def _load(self, servers: Sequence[RemoteBackend], weights: Weights) -> None:
        """Give these servers the weights; one that does not take them gets no calls. BackendError where none does."""
        if self.takes == "whole":
            in_flight = "pause" if self.pauses else "finish"
            update = WeightUpdate(policy_version=weights.version, path=str(weights.place), in_flight=in_flight)
            await load_weights("policy", servers, update)
            return
        name = f"{self._run}-{weights.version}"
        if name in self._adapters:  # a server that was thought lost may have it
            await self._unload(servers, [name])
        failures: list[BackendError] = []
        for server in servers:
            assert isinstance(server, VllmBackend)
            try:
                await load_adapter(server.connection, name, str(weights.place))
            except BackendError as error:
                server.connection.unusable = f"{server.name} has not loaded the adapter {name}: {error}"
                failures.append(error)
            else:  # calls go on with the adapter that they began with
                server.model, server.connection.version, server.keeps_weights = name, weights.version, True
                server.connection.unusable = None
        if len(failures) == len(servers):
            raise failures[0]
        if name not in self._adapters:
            old = [one for one in self._adapters[:-_ADAPTERS_KEPT] if not self._calls_with[one]]
            await self._unload(self._servers, old)
            self._adapters = [*(one for one in self._adapters if one not in old), name]

    async def _unload(self, servers: Sequence[RemoteBackend], names: Sequence[str]) -> None:
        for server in servers:
            for name in names:
                with suppress(BackendError):  # a server that is gone has forgotten it
                    await unload_adapter(server.connection, name)

    async def _finished(self) -> None:
        """SGLang loads no weights while it answers: calls that take too long begin anew with the next ones."""
        for last in (False, True):
            try:
                async with asyncio.timeout(self.patience):
                    await self._unused.wait()
            except TimeoutError:
                if last:
                    raise UnavailableError(f"{self._running} calls at {self.name} go on although aborted") from None
                _log.warning("%d calls have taken %g seconds: new weights wait no longer", self._running, self.patience)
                for server in self._servers:
                    with suppress(BackendError):  # a server that is gone answers nothing
                        await _post(server.connection, "abort_request", b'{"rid": "", "abort_all": true}')

    # --- the backend ---

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        events = self._answered(call)
        async with aclosing(events if self.pauses else _read_ahead(events)) as events:
            async for event in events:
                yield event

    async def _answered(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        begun, tried = False, 0
        while True:
            await self._usable.wait()
            self._enter()
            adapter = self._adapters[-1] if self._adapters else ""
            self._calls_with[adapter] += 1
            try:
                async with aclosing(self._replicas.answer(call)) as events:
                    async for event in events:
                        begun = True
                        if isinstance(event, Delta):
                            self.generated_tokens += len(event.token_ids)
                        yield event
                return
            except BackendError:
                tried += 1
                if begun or self._usable.is_set() or tried > _REPEATED:  # it may be this call that ends its servers
                    raise
            finally:
                self._calls_with -= Counter([adapter])
                self._leave()

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        return self._replicas.relay(call)

    async def count_tokens(self, call: ModelCall) -> int:
        return await self._replicas.count_tokens(call)

    async def close(self) -> None:
        await self._unload(self._servers, self._adapters)
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


def _server(
    sampling: RemoteSampling, url: str, api_key: str | None, chat: ChatTemplate, socket: str | None = None
) -> VllmBackend | SglangBackend:
    url = with_version(url, sampling.kind)
    if sampling.vllm:
        return VllmBackend(url, chat, api_key=api_key, model=sampling.model, socket=socket)
    return SglangBackend(Connection(url, api_key=api_key), chat)


async def _post(connection: Connection, route: str, body: bytes) -> None:
    async with connection.posted(f"{connection.root}/{route}", body, accepted=True, control=True) as response:
        await response.read()


async def _read_ahead(events: AsyncGenerator[BackendEvent, None]) -> AsyncGenerator[BackendEvent, None]:
    """The events, read as they come: an agent that does not read its answer keeps no server from new weights."""
    read: asyncio.Queue[BackendEvent | None] = asyncio.Queue()

    async def fill() -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    read.put_nowait(event)
        finally:
            read.put_nowait(None)

    filling = asyncio.create_task(fill())
    try:
        while (event := await read.get()) is not None:
            yield event
        await filling  # for what it may raise
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


class _Served(msgspec.Struct):
    id: str
    parent: str | None = None  # of an adapter
    max_model_len: int | None = None


class _ServedModels(msgspec.Struct):
    data: list[_Served]


async def _served(server: RemoteBackend) -> list[_Served]:
    """The models there, adapters aside."""
    url = server.connection.url("models")
    try:
        async with server.connection.posted(url, None, accepted=True) as response:
            served = msgspec.json.decode(await response.read(), type=_ServedModels)
    except (BackendError, msgspec.DecodeError) as error:
        raise ConfigError(f"the sampler at {server.name} cannot be asked for its models: {error}") from None
    return [one for one in served.data if one.parent is None]


def _only_model(server: VllmBackend, served: Sequence[_Served]) -> str:
    names = [one.id for one in served]
    if len(names) != 1:
        raise ConfigError(f"the sampler at {server.name} serves {', '.join(names) or 'nothing'}: say which as `model`")
    return names[0]


async def short_answer(backend: Backend) -> TrainingSequence:
    """What it answers to "Hi", to be compared with a learner."""
    answer = await one_answer(backend, "policy", Sampling(max_tokens=_PROBED_TOKENS, seed=0))
    return sampled_sequence(answer.prompt_token_ids, answer.choices[0].token_ids, answer.choices[0].logprobs)


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
