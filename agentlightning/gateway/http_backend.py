"""Any server of the OpenAI chat-completions protocol as a backend: vLLM, SGLang, this project's own, a hosted API.

Always streams upstream, so that a disconnect here cancels there and partial answers are known. Asks for exact token ids
the way vLLM gives them (`return_token_ids`, logprobs, usage). Knows HTTP and that protocol; no models, spans or store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import (
    SESSION_HEADER,
    STOPPED_BY_STRING,
    BackendEvent,
    ChatCall,
    Delta,
    Finished,
    Started,
    Usage,
)
from agentlightning.types import FinishReason

_log = logging.getLogger(__name__)
CONSTRAINED = "constrained by a grammar"
_RETRY_DELAYS = (0.1, 0.5, 2.0)
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


class HttpBackend:
    """Calls `{base_url}/chat/completions`, such as `http://host:8000/v1`.

    `model` is the upstream's name for the model, if it is not the one it is called here. With `captures_tokens=False`
    no token ids are asked for: hosted APIs refuse the question, and their answers cannot be trained on.
    `timeout_seconds` bounds the wait for each further part of an answer. `close` ends the connections."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        captures_tokens: bool = True,
        timeout_seconds: float = 600.0,
        connections: int = 1024,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the backend's base_url is {base_url!r}; it must begin with http:// or https://")
        self.captures_tokens = captures_tokens
        self.base_url = base_url.rstrip("/")
        self._model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout_seconds)
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def close(self) -> None:
        """End the connections, as soon as the calls under way have been answered."""
        await self._idle.wait()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def chat(self, call: ChatCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.chat`. BackendError carries the upstream's own status and message for what it refuses, 502 for
        what it fails at, and 504 where it falls silent."""
        body = msgspec.json.encode(self._body(call))
        headers = self._headers | {"content-type": "application/json"}
        if call.session is not None:
            headers[SESSION_HEADER] = call.session
        reader = _AnswerReader(call, self.captures_tokens)
        self._running += 1
        self._idle.clear()
        try:
            async with self._posted(body, headers) as response:
                async for data in _event_data(response.content):
                    for event in reader.read(data):
                        yield event
        except TimeoutError:
            raise BackendError(f"the backend at {self.base_url} fell silent", status=504, code="timeout") from None
        except aiohttp.ClientError as error:
            raise BackendError(f"the backend at {self.base_url} broke off its answer: {error}") from None
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()
        for event in reader.end():
            yield event

    def _body(self, call: ChatCall) -> dict[str, Any]:
        sampling = call.sampling
        optional: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            "top_k": sampling.top_k or None,
            "tools": call.tools or None,
            "tool_choice": call.tool_choice,
        }
        body: dict[str, Any] = {
            **call.extra,
            "model": self._model or call.model,
            "messages": call.messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": sampling.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }
        if self.captures_tokens:
            body["return_token_ids"] = True
        if self.captures_tokens or call.logprobs:
            body["logprobs"] = True
        return body

    @asynccontextmanager
    async def _posted(self, body: bytes, headers: dict[str, str]) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The accepted response. A connection that cannot be made, or breaks before an answer, is tried again."""
        response = await self._connect(body, headers)
        try:
            if response.status != 200:
                raise await _refusal(response, self.base_url)
            yield response
        finally:
            response.close()  # an answer not read to its end must not go back into the pool: this cancels it

    async def _connect(self, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        for delay in (*_RETRY_DELAYS, None):
            try:
                # Redirects are not followed: the gateway calls no address that it was not given.
                url = f"{self.base_url}/chat/completions"
                return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
            except aiohttp.SocketTimeoutError:
                raise  # it was reached and fell silent; asking again would only wait again
            except (aiohttp.ClientConnectionError, ConnectionResetError) as error:
                if delay is None:
                    raise BackendError(
                        f"the backend at {self.base_url} cannot be reached: {error}; is it running?",
                        status=503,
                        code="backend_unreachable",
                    ) from None
                _log.warning("the backend at %s cannot be reached, trying again: %s", self.base_url, error)
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")


async def _refusal(response: aiohttp.ClientResponse, base_url: str) -> BackendError:
    """The upstream's refusal as this gateway's. A key that the upstream refuses is not the agent's to mend."""
    text = await response.text(errors="replace")
    message = text[:500]
    code: Any = None
    try:
        error = msgspec.json.decode(text)
        error = error.get("error", error)
        message, code = str(error.get("message", message)), error.get("code")
    except (msgspec.DecodeError, AttributeError):
        pass  # not JSON, or not an object: the text itself is the message
    if response.status in (401, 403):
        message = f"the backend at {base_url} refused the gateway's key: {message}"
        return BackendError(message, status=502, code="backend_key_refused")
    status = response.status if 400 <= response.status < 500 else 502
    return BackendError(message, status=status, code=code if isinstance(code, str) else "backend_error")


# --- the stream ---------------------------------------------------------------------------------------------------


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] = {}
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = "no message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    policy_version: int = 0
    error: _Error | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class _AnswerReader:
    """Chunks of one upstream answer → backend events. The usage it reports comes last."""

    def __init__(self, call: ChatCall, captures_tokens: bool) -> None:
        self._call = call
        self._captures_tokens = captures_tokens
        self._started = False
        self._unfinished = set(range(call.sampling.n))
        self._usage: _Usage | None = None
        constrained = call.tool_choice not in (None, "none", "auto") or "structured_outputs" in call.extra
        response_format = call.extra.get("response_format")
        free_format = not isinstance(response_format, dict) or response_format == {"type": "text"}
        self._constrained = constrained or not free_format or any(name.startswith("guided_") for name in call.extra)

    def read(self, data: bytes) -> list[BackendEvent]:
        try:
            chunk = _CHUNK.decode(data)
        except msgspec.DecodeError as error:
            raise BackendError(f"the backend sent something that is no chat.completion.chunk: {error}") from None
        if chunk.error is not None:
            raise BackendError(f"the backend failed in mid-answer: {chunk.error.message}")
        events: list[BackendEvent] = []
        if not self._started:
            self._started = True
            events.append(Started(tuple(chunk.prompt_token_ids or ())))
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            events.extend(self._read_choice(choice, chunk.policy_version))
        return events

    def _read_choice(self, choice: _Choice, version: int) -> list[BackendEvent]:
        if choice.index not in range(self._call.sampling.n):
            raise BackendError(f"the backend sent choice {choice.index}, which was not asked for")
        delta = {name: value for name, value in choice.delta.items() if name != "role" and value not in (None, "", [])}
        content = (choice.logprobs.content if choice.logprobs else None) or []
        ids = tuple(choice.token_ids or ())
        events: list[BackendEvent] = []
        if delta or ids or content:
            events.append(
                Delta(
                    index=choice.index,
                    delta=delta,
                    token_ids=ids,
                    logprobs=tuple(token.logprob for token in content),
                    version=version,
                    tokens=tuple(map(_bytes, content)) if self._call.logprobs else (),
                )
            )
        if choice.finish_reason is not None and choice.index in self._unfinished:
            self._unfinished.discard(choice.index)
            events.append(
                Finished(choice.index, _FINISH_REASONS.get(choice.finish_reason, "abort"), self._untrainable(choice))
            )
        return events

    def _untrainable(self, choice: _Choice) -> str | None:
        if self._constrained:
            return CONSTRAINED
        if choice.finish_reason not in _FINISH_REASONS:
            return "the backend aborted the answer"
        return STOPPED_BY_STRING if isinstance(choice.stop_reason, str) else None

    def end(self) -> list[BackendEvent]:
        if self._unfinished:
            raise BackendError("the backend ended its answer before every choice was finished")
        return [Usage(self._usage.prompt_tokens, self._usage.completion_tokens)] if self._usage else []


def _bytes(token: _TokenLogprob) -> bytes:
    return token.token.encode() if token.bytes is None else bytes(token.bytes)


async def _event_data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`; lines may be of any length."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data
