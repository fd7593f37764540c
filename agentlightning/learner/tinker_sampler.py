"""Samples at a Tinker server from the weights that a publication names.

Knows the `tinker` SDK's sampling calls; `learner.tinker` trains at the same server."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import (
    BackendError,
    ConfigError,
    UnavailableError,
    imported,
)
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.generation import Ending, GenerationRequest, SampledToken
from agentlightning.learner.base import Weights, WeightsForm
from agentlightning.learner.remote import PROBED_TOKENS, Activity, sampled_sequence

HANDLE_FILE: Final = "tinker.json"


LENGTH: Final = 4096  # of prompt and answer, by default


KEPT: Final = 2  # publications kept on the server


class Handle(msgspec.Struct, frozen=True):
    """Weights on the server: `path` is its name for them, after `steps` steps of the optimiser,
    which is saved with them."""

    path: str
    steps: int = 0


class TinkerSampler:
    """A `Sampler` on the server behind `service`, and the `TokenGenerator` of its backend: chats
    are rendered here. It samples from `model` until it gets weights. A call whose client has left
    is completed: a server may load the weights for it over those that it trains."""

    takes: WeightsForm = "handle"
    enforces = False

    def __init__(
        self, sdk: Any, service: Any, model: str, chat: ChatTemplate, name: str, length: int
    ) -> None:
        self.backend = TokenBackend(chat, self, name=name, max_sequence_length=length)
        self._chat = chat
        self.generated_tokens = 0
        self._sdk = sdk
        self._service = service
        self._model = model
        self._length = length
        self._client: Any = None
        self._version = 0
        self._published: list[str] = []
        self._activity = Activity()
        self._usable = asyncio.Event()
        self._usable.set()

    @property
    def idle_seconds(self) -> float:
        return self._activity.idle_seconds

    async def check(self, train: Sampling) -> None:
        """Its answers are checked when the first weights are published."""
        with errors_translated(self._sdk):
            self._client = await self._service.create_sampling_client_async(base_model=self._model)

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None]:
        self._usable.clear()
        try:
            await self._activity.none.wait()
            yield
        finally:
            self._usable.set()

    async def watch(self, calls_held: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        await asyncio.Event().wait()  # the SDK retries

    async def publish(self, weights: Weights) -> None:
        assert weights.place is not None
        path = read_handle(weights.place).path
        with errors_translated(self._sdk):
            self._client = await self._service.create_sampling_client_async(model_path=path)
        self._version = weights.version
        self._published.append(path)
        for old in self._published[:-KEPT]:
            # it costs only disk space on the server
            with contextlib.suppress(self._sdk.TinkerError):
                # tinker://run/name, or tinker://run/sampler_weights/name
                _, _, run, *_, name = old.split("/")
                await self._service.create_rest_client().delete_checkpoint_async(
                    run, f"sampler_weights/{name}"
                )
        del self._published[:-KEPT]

    async def sample(self) -> list[TrainingSequence]:
        prompt = self._chat.tokenizer.encode("Hi").ids
        tokens = await self.complete(GenerationRequest(prompt, max_tokens=PROBED_TOKENS, seed=0))
        return [
            sampled_sequence(
                prompt, [token.token_id for token in tokens], [token.logprob for token in tokens]
            )
        ]

    # --- the generator ---

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SampledToken]]:
        yield await self.complete(request)

    async def complete(self, request: GenerationRequest) -> list[SampledToken]:
        """All tokens of a request, which arrive together."""
        room = self._length - len(request.prompt_token_ids)
        if request.top_logprobs:
            raise BackendError("a Tinker server returns no top_logprobs; omit them", status=400)
        while not self._usable.is_set():  # a caller that leaves now is not sampled for
            await self._usable.wait()
        self._activity.__enter__()
        call = asyncio.create_task(self._sampled(self._client, request, room))
        version = self._version
        call.add_done_callback(self._ended)
        try:
            answer = await asyncio.shield(call)
        except self._sdk.TinkerError as error:
            raise BackendError(f"the Tinker server did not answer: {error}") from None
        if (
            answer.logprobs is None
            or len(answer.logprobs) != len(answer.tokens)
            or not answer.tokens
        ):
            raise BackendError(
                f"the Tinker server gave {len(answer.tokens)} tokens without a logprob of each"
            )
        self.generated_tokens += len(answer.tokens)
        last = len(answer.tokens) - 1
        stopped = answer.tokens[-1] in request.stop_token_ids or last + 1 < min(
            room, request.max_tokens or room
        )
        # verl's server says stop for both
        reason = "stop" if answer.stop_reason == "stop" and stopped else "length"
        return [
            SampledToken(
                token_id,
                logprob,
                version,
                reason if position == last else None,
                ending=ending_of(request),
            )
            for position, (token_id, logprob) in enumerate(
                zip(answer.tokens, answer.logprobs, strict=True)
            )
        ]

    async def _sampled(self, client: Any, request: GenerationRequest, room: int) -> Any:
        types = self._sdk.types
        settings = types.SamplingParams(
            max_tokens=min(room, request.max_tokens or room),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
            seed=None if request.seed is None else request.seed % (1 << 31),
            stop=sorted(request.stop_token_ids),
        )
        prompt = types.ModelInput.from_ints(list(request.prompt_token_ids))
        return (
            await client.sample_async(prompt, num_samples=1, sampling_params=settings)
        ).sequences[0]

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._activity.__exit__()
        if not call.cancelled():
            call.exception()  # retrieves the error: its caller may have left


def read_handle(directory: Path) -> Handle:
    """The handle that `TinkerLearner` wrote. ConfigError if there is none."""
    try:
        return msgspec.json.decode((directory / HANDLE_FILE).read_bytes(), type=Handle)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{directory} is not of a run with learner: tinker: {error}") from None


def new_name() -> str:
    """A unique name: the SDK would retry a taken one forever."""
    return f"agl-{secrets.token_hex(8)}"


def tinker_sdk() -> Any:
    """The SDK; its version must match the server's: docs/training.md."""
    return imported(
        "tinker",
        "learner: tinker, whose SDK has the server's version,",
        "agent-lightning-next[tinker]",
    )


@contextmanager
def errors_translated(sdk: Any) -> Generator[None]:
    """Errors of the SDK become UnavailableErrors."""
    try:
        yield
    except sdk.TinkerError as error:
        raise UnavailableError(f"the Tinker server did not do what it was asked: {error}") from None


def ending_of(request: GenerationRequest) -> Ending:
    plain = (request.temperature, request.top_p, request.top_k) == (1.0, 1.0, 0)
    return Ending(
        None
        if plain
        else "a Tinker server's logprobs are those of temperature 1, before top_p and top_k"
    )
