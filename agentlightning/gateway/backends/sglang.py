"""An SGLang server that is given token ids and gives token ids, over its own `/generate`: chats are rendered here.

Knows that protocol (SGLang 0.4.6 and later); no text, no models, spans or store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final, Literal
from uuid import uuid4

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.backends.connection import Connection, event_data
from agentlightning.gateway.backends.wire import Response
from agentlightning.gateway.chat.backend import TokenBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.generation import Ending, GenerationRequest, GrammarsAs, SampledToken
from agentlightning.gateway.request import NOT_JSON

_log = logging.getLogger(__name__)
_ABORT_SECONDS: Final = 1.0  # for telling the server; the agent has left and waits for nothing
TRUNCATED: Final = "SGLang's logprobs are those before top_p and top_k"


class SglangBackend(TokenBackend):
    """The SGLang server behind `connection`, as a model whose chats `chat` renders."""

    kind = "sglang"

    def __init__(self, connection: Connection, chat: ChatTemplate) -> None:
        super().__init__(chat, SglangGenerator(connection), name=connection.base_url)
        connection.health_url = f"{connection.root}/health"
        self.connection = connection

    async def close(self) -> None:
        await self.connection.close()


class SglangGenerator:
    """Samples on the server behind `connection`; see `TokenGenerator`.

    Policy versions are the server's weight versions where those are numbers. Seeds count where the server was started
    with `--enable-deterministic-inference`."""

    grammars: ClassVar[GrammarsAs] = "structural_tag"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[SampledToken]:
        answer = _Answer(request, self._connection.version)
        async with self._asked(answer, stream=True) as response:
            async for data in event_data(response):
                for token in answer.read(data):
                    yield token
        answer.require_end()

    async def complete(self, request: GenerationRequest) -> list[SampledToken]:
        answer = _Answer(request, self._connection.version)
        async with self._asked(answer, stream=False) as response:
            tokens = answer.read(await response.read())
        answer.require_end()
        return tokens

    @asynccontextmanager
    async def _asked(self, answer: _Answer, *, stream: bool) -> AsyncGenerator[Response]:
        """The server's response to a request, which is aborted if the block is left before the answer's end."""
        url = f"{self._connection.root}/generate"
        try:
            async with self._connection.posted(url, answer.body(stream=stream), accepted=True) as response:
                try:
                    yield response
                finally:  # before the connection is closed: with it a server may forget whose request it was
                    await self._abort(answer)
        except asyncio.CancelledError:
            await self._abort(answer)
            raise

    async def _abort(self, answer: _Answer) -> None:
        if answer.finished or answer.aborted:
            return
        answer.aborted = True
        url, body = f"{self._connection.root}/abort_request", msgspec.json.encode({"rid": answer.request_id})
        try:
            async with asyncio.timeout(_ABORT_SECONDS), self._connection.posted(url, body, control=True, accepted=True):
                pass
        except (BackendError, TimeoutError) as error:
            _log.warning("a call that nobody waits for may go on at %s: %r", self._connection.base_url, error)


_TokenLogprob = tuple[float | None, int, str | None]


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


class _Error(msgspec.Struct):
    message: str = "no message"
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _Error | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class _Answer:
    """One request and how much of its answer has come. `version` holds where the server names none."""

    def __init__(self, request: GenerationRequest, version: int) -> None:
        # All of one length: the server aborts every request whose id begins with the one it is given.
        self.request_id = uuid4().hex
        self.finished = False
        self.aborted = False
        self._request = request
        truncated = request.temperature > 0 and (request.top_p < 1 or request.top_k > 0)
        self._ending = Ending(TRUNCATED if truncated else None)
        self._version = version
        self._read = 0

    def body(self, *, stream: bool) -> bytes:
        request = self._request
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,  # null: as many as fit; left out, 128
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "stop_token_ids": sorted(request.stop_token_ids),
            # What is not said may come from the model's generation config.
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        if request.structural_tag is not None:
            sampling["structural_tag"] = msgspec.json.encode(request.structural_tag).decode()
        body = {
            "rid": self.request_id,
            "input_ids": request.prompt_token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
            "stream": stream,
        }
        return msgspec.json.encode(body)

    def read(self, data: bytes) -> list[SampledToken]:
        """The tokens that are new in a chunk, or in the whole answer. Chunks may repeat all that came before."""
        try:
            chunk = _CHUNK.decode(data)
        except NOT_JSON as error:
            raise BackendError(f"the SGLang server sent something that is no answer of /generate: {error}") from None
        if chunk.error is not None or chunk.meta_info is None:
            raise _refused(chunk.error or _Error("an answer without meta_info", 502))
        meta = chunk.meta_info
        reason = _finish_reason(meta.finish_reason)
        if meta.prompt_tokens != len(self._request.prompt_token_ids):
            raise BackendError(
                f"the SGLang server read {meta.prompt_tokens} tokens of a prompt of "
                f"{len(self._request.prompt_token_ids)}: shorten the prompt (the server cuts prompts by itself if it "
                "was started with --allow-auto-truncate)",
                status=400,
                code="context_length_exceeded",
            )
        first, self._read = self._read, meta.completion_tokens
        new = self._read - first
        sampled = meta.output_token_logprobs[-new:] if new else []
        tops = meta.output_top_logprobs[-new:] if meta.output_top_logprobs else [None] * len(sampled)
        if len(sampled) != new or len(tops) != new:
            raise BackendError(f"the SGLang server counted {new} tokens more and told the logprobs of {len(sampled)}")
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
            for position, ((logprob, token_id, _), top) in enumerate(zip(sampled, tops, strict=True))
        ]

    def require_end(self) -> None:
        if not self.finished:
            raise BackendError("the SGLang server ended its answer before the last token")

    def _version_of(self, meta: _Meta, position: int) -> int:
        weights = [part.version for part in meta.weight_versions if part.start <= position]
        told = weights[-1] if weights else meta.weight_version
        return int(told) if told is not None and told.isdecimal() and len(told) < 10 else self._version


def _number(logprob: float | None) -> float:
    return float("nan") if logprob is None else logprob


def _refused(error: _Error) -> BackendError:
    status = error.code if isinstance(error.code, int) else 400
    return BackendError(error.message, status=status, code="backend_error" if status >= 500 else "invalid_request")


def _finish_reason(reason: _FinishReason | None) -> Literal["stop", "length"] | None:
    """None before the end. BackendError for an end that the policy did not sample."""
    match reason:
        case None:
            return None
        case _FinishReason(type="length"):
            return "length"
        case _FinishReason(type="stop") if not isinstance(reason.matched, str):
            return "stop"
        case _:
            why = reason.message if reason.type == "abort" else f"{reason.type} at {reason.matched!r}"
            raise _refused(_Error(f"the SGLang server ended its answer: {why}", reason.status_code or 503))
