"""Servers that are given token ids and give token ids; chats are rendered here.

SGLang (0.4.6 and later) answers `/generate`; vLLM (0.32 with `--enable-scale-out`) answers
`/inference/v1/generate`, and by its chat completions what token ids cannot ask: images, grammars,
forced calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec

from agentlightning.arrays import TokenIds, plain
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import (
    UNSUPPORTED,
    WEIGHTS_UNKNOWN,
    BackendEvent,
    ModelCall,
    Recital,
)
from agentlightning.gateway.backends.answers import TokenId, WeightsSpan, version_runs
from agentlightning.gateway.backends.connection import (
    NO_WEIGHTS,
    BackendConnection,
    Response,
    event_data,
)
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.backends.words import failed_in_answer, words_of
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.generation import Ending, GenerationRequest, SampledToken
from agentlightning.gateway.request import NOT_JSON, given

_log = logging.getLogger(__name__)
_ABORT_SECONDS: Final = 1.0  # for telling the server; the agent has left and waits for nothing
_ONLY_BY_CHAT: Final = (UNSUPPORTED, "unsupported_content")
TRUNCATED: Final = "SGLang's logprobs are those before top_p and top_k"


class SglangBackend(TokenBackend):
    """The SGLang server behind `connection`, as a model whose chats `chat` renders. Policy versions
    are the server's weight versions where those are numbers. Seeds count where it runs with
    `--enable-deterministic-inference`."""

    kind = "sglang"

    def __init__(self, connection: BackendConnection, chat: ChatTemplate) -> None:
        generator = _Generator(connection, partial(_SglangAnswer, connection), enforces=True)
        super().__init__(chat, generator, name=connection.base_url)
        connection.health_url = f"{connection.root}/health"
        self.connection = connection

    async def close(self) -> None:
        await self.connection.close()


class VllmBackend(HttpBackend):
    """The vLLM server at `base_url` (see `HttpBackend`), as a model whose chats `chat` renders. If
    it takes no token ids, or the call needs its chat completions, those are used."""

    def __init__(self, base_url: str, chat: ChatTemplate, **settings: Any) -> None:
        super().__init__(base_url, kind="vllm", **settings)
        self.of_ids = TokenBackend(
            chat,
            _Generator(self.connection, partial(_VllmAnswer, self)),
            name=self.name,
            strict=True,
        )
        self.ids_url = f"{self.connection.root}/inference/v1/generate"
        self._takes_ids: bool | None = None

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `HttpBackend.answer`."""
        if await self.takes_ids():
            try:
                async with aclosing(self.of_ids.answer(call)) as events:
                    async for event in events:
                        yield event
                return
            except (BackendError, ConfigError) as error:
                # of these, the latter and refusals come before any event
                if isinstance(error, BackendError) and error.code not in _ONLY_BY_CHAT:
                    raise
        async with aclosing(super().answer(call)) as events:
            async for event in events:
                yield event

    def recite(self, call: ModelCall, recital: Recital) -> AsyncGenerator[BackendEvent, None]:
        return self.of_ids.recite(call, recital)

    def prime(self, session: str | None, recital: Recital) -> None:
        self.of_ids.prime(session, recital)

    async def prompt_ids(self, call: ModelCall) -> TokenIds:
        return await self.of_ids.prompt_ids(call)

    async def takes_ids(self) -> bool:
        """Whether the server has the route; it is asked once."""
        if self._takes_ids is None:
            # a GET of what must be posted
            async with self.connection.posted(self.ids_url, None) as response:
                await response.read()
            if response.status >= 500:
                raise BackendError(f"{self.ids_url} answered {response.status}", status=502)
            self._takes_ids = response.status == 405
            if not self._takes_ids:
                _log.warning(
                    "%s takes no token ids (--enable-scale-out): it renders the chats itself",
                    self.name,
                )
        return self._takes_ids


class _TokenAnswer:
    """One request, and how much of its answer has come. `finished` says whether the last token
    has."""

    url: str
    finished = False

    def body_fields(self) -> dict[str, Any]:
        """The body that is posted, without `stream`."""
        raise NotImplementedError

    def read(self, data: bytes) -> list[SampledToken]:
        """The tokens that are new in a chunk, or in the whole answer."""
        raise NotImplementedError

    async def abandon(self) -> None:
        """Nobody waits for the answer any more."""

    def tokens(self, data: bytes) -> list[SampledToken]:
        try:
            return self.read(data)
        except NOT_JSON as error:
            raise BackendError(
                f"{self.url} sent something that is no answer of /generate: {error}"
            ) from None


class _Generator:
    """A `TokenGenerator` on the server behind `connection`, whose answers `begin` begins to
    read."""

    def __init__(
        self,
        connection: BackendConnection,
        begin: Callable[[GenerationRequest], _TokenAnswer],
        enforces: bool = False,
    ) -> None:
        self.enforces = enforces
        self._connection = connection
        self._begin = begin

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SampledToken]]:
        answer = self._begin(request)
        tokens: list[SampledToken] = []
        async with self._posted(answer, stream=not request.whole) as response:
            if request.whole:
                tokens = answer.tokens(await response.read())
            else:
                async for data in event_data(response):
                    yield answer.tokens(data)
        if not answer.finished:
            raise BackendError(f"{answer.url} ended its answer before the last token")
        yield tokens

    @asynccontextmanager
    async def _posted(self, answer: _TokenAnswer, *, stream: bool) -> AsyncGenerator[Response]:
        body = msgspec.json.encode(answer.body_fields() | {"stream": stream}, enc_hook=plain)
        try:
            async with self._connection.posted(answer.url, body, accepted=True) as response:
                try:
                    yield response
                finally:
                    # before the connection is closed: with it a server may forget whose request it
                    # was
                    await answer.abandon()
        except asyncio.CancelledError:
            await answer.abandon()
            raise


class _Logprob(msgspec.Struct, gc=False):
    token_id: TokenId
    logprob: float


class _Token(_Logprob, gc=False):
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] = []


class _VllmChoice(msgspec.Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[WeightsSpan] | None = None


class _VllmChunk(msgspec.Struct):
    choices: list[_VllmChoice] = []
    error: Any = None


_VLLM_CHUNK = msgspec.json.Decoder(_VllmChunk)
_REASONS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}


class _VllmAnswer(_TokenAnswer):
    """The server names the weights of each token at the end, as of vLLM 0.32."""

    def __init__(self, backend: VllmBackend, request: GenerationRequest) -> None:
        self.url = backend.ids_url
        self._request = request
        self._backend = backend
        self._version = backend.connection.version
        self._failed_loads = backend.connection.failed_loads

    def body_fields(self) -> dict[str, Any]:
        request = self._request
        sampling: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "stop_token_ids": sorted(request.stop_token_ids),
            "logprobs": request.top_logprobs,
            "detokenize": False,
        } | given(max_tokens=request.max_tokens, seed=request.seed)
        model = self._backend.model or request.model
        return {"model": model, "token_ids": request.prompt_token_ids, "sampling_params": sampling}

    def read(self, data: bytes) -> list[SampledToken]:
        chunk = _VLLM_CHUNK.decode(data)
        if chunk.error is not None:
            raise failed_in_answer({"error": chunk.error})
        return [token for choice in chunk.choices for token in self._read_choice(choice)]

    def _read_choice(self, choice: _VllmChoice) -> list[SampledToken]:
        sampled = choice.logprobs.content if choice.logprobs is not None else []
        if [token.token_id for token in sampled] != choice.token_ids:
            raise BackendError("the vLLM server returned logprobs of other tokens than it sampled")
        most = self._request.top_logprobs
        ending = self._ending(choice)
        tokens = [
            SampledToken(
                token.token_id,
                token.logprob,
                self._version,
                top_logprobs=tuple(
                    (top.token_id, top.logprob) for top in token.top_logprobs[:most]
                ),
                ending=ending,  # of each: a stop string may cut the answer here
            )
            for token in sampled
        ]
        if choice.finish_reason is not None:
            if choice.finish_reason not in _REASONS or not tokens:
                raise BackendError(
                    f"the vLLM server ended its answer: {choice.finish_reason}", status=503
                )
            self.finished = True
            reason = _REASONS[choice.finish_reason]
            tokens[-1] = tokens[-1]._replace(finish_reason=reason)
        return tokens

    def _ending(self, choice: _VllmChoice) -> Ending:
        connection = self._backend.connection
        unknown = WEIGHTS_UNKNOWN if connection.failed_loads != self._failed_loads else None
        versions = version_runs(choice.weight_versions, self._version)
        changed = (
            not versions and not self._backend.keeps_weights and connection.version != self._version
        )
        return Ending(unknown, connection.version if changed else None, versions)


_TokenLogprob = tuple[float | None, TokenId, str | None]


class _FinishReason(msgspec.Struct):
    type: str
    matched: Any = None
    message: str = "no message"
    status_code: int | None = None


class _Weights(msgspec.Struct):
    """The version that sampled the tokens from `start` on."""

    version: str
    start: int


class _Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[_TokenLogprob] = []
    output_top_logprobs: list[list[_TokenLogprob] | None] = []
    weight_version: str | None = None
    weight_versions: list[_Weights] = []


class _SglangChunk(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


_SGLANG_CHUNK = msgspec.json.Decoder(_SglangChunk)


class _SglangAnswer(_TokenAnswer):
    def __init__(self, connection: BackendConnection, request: GenerationRequest) -> None:
        self.url = f"{connection.root}/generate"
        # All of one length: the server aborts every request whose id begins with the one it is
        # given.
        self.request_id = uuid4().hex
        self._connection = connection
        self._aborted = False
        self._request = request
        self._version = connection.version
        truncated = request.temperature > 0 and (request.top_p < 1 or request.top_k > 0)
        self._ending = Ending(TRUNCATED if truncated else None)
        self._read = 0

    def body_fields(self) -> dict[str, Any]:
        request = self._request
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,  # null: as many as fit; omitted, 128
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "stop_token_ids": sorted(request.stop_token_ids),
            # Omitted values may come from the model's generation config.
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        } | given(sampling_seed=request.seed)
        if request.structural_tag is not None:
            sampling["structural_tag"] = msgspec.json.encode(request.structural_tag).decode()
        return {
            "rid": self.request_id,
            "input_ids": request.prompt_token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
        }

    def read(self, data: bytes) -> list[SampledToken]:
        """Chunks may repeat all that came before."""
        chunk = _SGLANG_CHUNK.decode(data)
        if chunk.error is not None or chunk.meta_info is None:
            if chunk.error is None:
                raise _refused("an answer without meta_info", 502)
            words = words_of({"error": chunk.error})
            raise _refused(words.message or "no message", words.status or 400)
        meta = chunk.meta_info
        try:
            reason = _finish_reason(meta.finish_reason)
        except BackendError as error:
            if self._connection.unusable or self._connection.version != self._version:
                raise BackendError(
                    "new weights ended the call", status=503, code=NO_WEIGHTS
                ) from error
            raise
        length = len(self._request.prompt_token_ids)
        if meta.prompt_tokens != length:
            raise BackendError(
                f"the SGLang server read {meta.prompt_tokens} tokens of a prompt of {length}: "
                "shorten it (a server started with --allow-auto-truncate cuts prompts silently)",
                status=400,
                code="context_length_exceeded",
            )
        first = self._read
        self._read = meta.completion_tokens
        new = self._read - first
        sampled = meta.output_token_logprobs[-new:] if new else []
        tops = (
            meta.output_top_logprobs[-new:] if meta.output_top_logprobs else [None] * len(sampled)
        )
        if len(sampled) != new or len(tops) != new:
            raise BackendError(
                f"the SGLang server counted {new} more tokens and returned the logprobs of "
                f"{len(sampled)}"
            )
        self.finished = reason is not None and new > 0
        return [
            SampledToken(
                token_id,
                _number(logprob),
                self._version_of(meta, first + position),
                reason if position == new - 1 else None,
                tuple((other_id, _number(value)) for value, other_id, _ in top or ()),
                self._ending,
            )
            for position, ((logprob, token_id, _), top) in enumerate(
                zip(sampled, tops, strict=True)
            )
        ]

    async def abandon(self) -> None:
        """Abort the request: SGLang continues it otherwise."""
        if self.finished or self._aborted:
            return
        self._aborted = True
        url = f"{self._connection.root}/abort_request"
        body = msgspec.json.encode({"rid": self.request_id})
        try:
            async with (
                asyncio.timeout(_ABORT_SECONDS),
                self._connection.posted(url, body, control=True, accepted=True),
            ):
                pass
        except (BackendError, TimeoutError) as error:
            _log.warning(
                "an abandoned call may still run at %s: %r", self._connection.base_url, error
            )

    def _version_of(self, meta: _Meta, position: int) -> int:
        weights = [part.version for part in meta.weight_versions if part.start <= position]
        name = weights[-1] if weights else meta.weight_version
        return (
            int(name) if name is not None and name.isdecimal() and len(name) < 10 else self._version
        )


def _number(logprob: float | None) -> float:
    return float("nan") if logprob is None else logprob


def _refused(message: str, status: int) -> BackendError:
    return BackendError(
        message, status=status, code="backend_error" if status >= 500 else "invalid_request"
    )


def _finish_reason(reason: _FinishReason | None) -> Literal["stop", "length"] | None:
    """None before the end. BackendError for an end that the policy did not sample."""
    if reason is None:
        return None
    if reason.type == "length":
        return "length"
    if reason.type == "stop" and not isinstance(reason.matched, str):
        return "stop"
    why = reason.message if reason.type == "abort" else f"{reason.type} at {reason.matched!r}"
    raise _refused(f"the SGLang server ended its answer: {why}", reason.status_code or 503)
