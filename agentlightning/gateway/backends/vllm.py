"""A vLLM server that is given token ids and gives token ids, over `/inference/v1/generate`: chats are rendered here.

Knows that protocol (vLLM 0.32 with `--enable-scale-out`), and that its chat completions answer what it cannot: images,
grammars, forced calls. No text, spans or store.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Final, Literal

import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import UNSUPPORTED, WEIGHTS_UNKNOWN, BackendEvent, ModelCall
from agentlightning.gateway.backends.connection import event_data
from agentlightning.gateway.backends.http import HttpBackend, WeightsSpan, version_runs
from agentlightning.gateway.chat.backend import TokenBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.generation import Ending, GenerationRequest, GrammarsAs, SampledToken
from agentlightning.gateway.request import NOT_JSON, given

_log = logging.getLogger(__name__)
_ONLY_BY_CHAT: Final = (UNSUPPORTED, "unsupported_content")


class VllmBackend(HttpBackend):
    """The vLLM server at `base_url` (see `HttpBackend`), as a model whose chats `chat` renders. Where it takes no token
    ids, or is asked for what can only be had of its chat completions, it is asked for those."""

    def __init__(
        self,
        base_url: str,
        chat: ChatTemplate,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 600.0,
        socket: str | None = None,
    ) -> None:
        super().__init__(
            base_url, kind="vllm", api_key=api_key, model=model, timeout_seconds=timeout_seconds, socket=socket
        )
        self.of_ids = TokenBackend(chat, VllmGenerator(self), name=self.name, strict=True)
        self._takes_ids: bool | None = None

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `HttpBackend.answer`."""
        if await self.takes_ids():
            try:
                async with aclosing(self.of_ids.answer(call)) as events:
                    async for event in events:
                        yield event
                return
            except ConfigError as error:  # that, like the other, comes before the first event
                _log.debug("%s is asked by its chat completions: %s", self.name, error)
            except BackendError as error:
                if error.code not in _ONLY_BY_CHAT:
                    raise
        async with aclosing(super().answer(call)) as events:
            async for event in events:
                yield event

    async def takes_ids(self) -> bool:
        """Whether the server has the route, which it is asked once."""
        if self._takes_ids is None:
            async with self.connection.posted(self.ids_url, None) as response:  # a GET of what must be posted
                await response.read()
            if response.status >= 500:
                raise BackendError(f"{self.ids_url} answered {response.status}", status=502)
            self._takes_ids = response.status == 405
            if not self._takes_ids:
                _log.warning("%s takes no token ids (--enable-scale-out): it renders the chats itself", self.name)
        return self._takes_ids

    @property
    def ids_url(self) -> str:
        return f"{self.connection.root}/inference/v1/generate"


class VllmGenerator:
    """Samples on the server of `backend`; see `TokenGenerator`. The server names the weights of each token."""

    grammars: ClassVar[GrammarsAs] = None

    def __init__(self, backend: VllmBackend) -> None:
        self._backend = backend

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[SampledToken]:
        answer = _Answer(request, self._backend)
        async with self._backend.connection.posted(*answer.asked(stream=True), accepted=True) as response:
            async for data in event_data(response):
                for token in answer.read(data):
                    yield token
        answer.require_end()

    async def complete(self, request: GenerationRequest) -> list[SampledToken]:
        answer = _Answer(request, self._backend)
        async with self._backend.connection.posted(*answer.asked(stream=False), accepted=True) as response:
            tokens = answer.read(await response.read())
        answer.require_end()
        return tokens


class _Logprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Token(_Logprob, gc=False):
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[WeightsSpan] | None = None


class _Error(msgspec.Struct):
    message: str = "no message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_REASONS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}


class _Answer:
    """One request and how much of its answer has come."""

    def __init__(self, request: GenerationRequest, backend: VllmBackend) -> None:
        self._request = request
        self._backend = backend
        self._version = backend.connection.version
        self._finished = False

    def asked(self, *, stream: bool) -> tuple[str, bytes]:
        """The URL, and the body that is posted there."""
        request = self._request
        sampling: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "stop_token_ids": sorted(request.stop_token_ids),
            "logprobs": request.top_logprobs,
            "detokenize": False,
        } | given(max_tokens=request.max_tokens, seed=request.seed)
        body = {
            "model": self._backend.model or request.model,
            "token_ids": request.prompt_token_ids,
            "sampling_params": sampling,
            "stream": stream,
        }
        return self._backend.ids_url, msgspec.json.encode(body)

    def read(self, data: bytes) -> list[SampledToken]:
        """The tokens of a chunk, or of the whole answer."""
        try:
            chunk = _CHUNK.decode(data)
        except NOT_JSON as error:
            raise BackendError(f"the vLLM server sent something that is no answer of /generate: {error}") from None
        if chunk.error is not None:
            raise BackendError(f"the vLLM server failed in mid-answer: {chunk.error.message}")
        return [token for choice in chunk.choices for token in self._read_choice(choice)]

    def _read_choice(self, choice: _Choice) -> list[SampledToken]:
        told = choice.logprobs.content if choice.logprobs is not None else []
        if [token.token_id for token in told] != choice.token_ids:
            raise BackendError("the vLLM server told logprobs of other tokens than it sampled")
        tokens = [
            SampledToken(
                token.token_id,
                token.logprob,
                self._version,
                top_logprobs=tuple(
                    (one.token_id, one.logprob) for one in token.top_logprobs[: self._request.top_logprobs]
                ),
            )
            for token in told
        ]
        if choice.finish_reason is not None:
            if choice.finish_reason not in _REASONS or not tokens:
                raise BackendError(f"the vLLM server ended its answer: {choice.finish_reason}", status=503)
            self._finished = True
            last = tokens[-1]._replace(finish_reason=_REASONS[choice.finish_reason], ending=self._ending(choice))
            tokens[-1] = last
        return tokens

    def _ending(self, choice: _Choice) -> Ending:
        connection = self._backend.connection
        keeps = self._backend.keeps_weights
        unknown = WEIGHTS_UNKNOWN if connection.changes_weights and not keeps else None
        versions = version_runs(choice.weight_versions, self._version)
        changed = not versions and not keeps and connection.version != self._version
        return Ending(unknown, connection.version if changed else None, versions)

    def require_end(self) -> None:
        if not self._finished:
            raise BackendError("the vLLM server ended its answer before the last token")
