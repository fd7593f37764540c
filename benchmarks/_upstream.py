"""A server that answers chat completions as vLLM does, in no time of its own: prebuilt bytes over
bare sockets.

    python benchmarks/_upstream.py        prints where it listens

Of a request it looks at whether the answer is to be streamed, and at the path: its first part is a
pace."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

PROMPT_TOKENS: Final = 512
SAMPLED_TOKENS: Final = 128
_WORDS: Final = [
    "the",
    "agent",
    "searches",
    "several",
    "flights,",
    "compares",
    "departures",
    "and",
    "reserves",
    "available",
    "seats",
    "for",
    "everybody",
]


@dataclass(frozen=True)
class Pace:
    """Seconds before the first event of an answer, then before the second, then before each further
    one."""

    first: float = 0.0
    second: float = 0.0
    further: float = 0.0


PACES: Final = {
    "at-once": Pace(),
    "slow": Pace(first=2.0),
    "first-token": Pace(second=0.002),
    "typing": Pace(second=0.005, further=0.005),
}

_random = random.Random(0)
PROMPT_TOKEN_IDS: Final = [_random.randrange(1_000, 150_000) for _ in range(PROMPT_TOKENS)]
TOKEN_IDS: Final = [_random.randrange(1_000, 150_000) for _ in range(SAMPLED_TOKENS)]
LOGPROBS: Final = [-round(_random.expovariate(2.0), 15) for _ in range(SAMPLED_TOKENS)]
TOKENS: Final = [f" {_random.choice(_WORDS)}" for _ in range(SAMPLED_TOKENS)]
_HEAD: Final = {"id": "chatcmpl-0f1c6a1e5b0d4b0f9f3a", "created": 1_760_000_000, "model": "m"}
_USAGE: Final = {
    "prompt_tokens": PROMPT_TOKENS,
    "total_tokens": PROMPT_TOKENS + SAMPLED_TOKENS,
    "completion_tokens": SAMPLED_TOKENS,
}


def _logprobs(first: int, last: int) -> dict[str, Any]:
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(TOKENS[first:last], LOGPROBS[first:last], strict=True)
    ]
    return {"content": content}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def whole_body() -> bytes:
    """The `chat.completion` object."""
    message = {
        "role": "assistant",
        "content": "".join(TOKENS),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning_content": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(0, SAMPLED_TOKENS),
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": TOKEN_IDS,
    }
    return _json(
        {
            **_HEAD,
            "object": "chat.completion",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {**_USAGE, "prompt_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": PROMPT_TOKEN_IDS,
            "kv_transfer_params": None,
        }
    )


def event_bodies() -> list[bytes]:
    """The `chat.completion.chunk` objects: the role with the prompt's ids, one for each token, the
    usage."""
    head = {**_HEAD, "object": "chat.completion.chunk"}
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    events = [_json({**head, "choices": [choice], "prompt_token_ids": PROMPT_TOKEN_IDS})]
    for number, (token, token_id) in enumerate(zip(TOKENS, TOKEN_IDS, strict=True)):
        choice = {
            "index": 0,
            "delta": {"content": token},
            "logprobs": _logprobs(number, number + 1),
        }
        ended = (
            {"finish_reason": "stop", "stop_reason": None} if number == SAMPLED_TOKENS - 1 else {}
        )
        events.append(
            _json(
                {
                    **head,
                    "choices": [choice | {"finish_reason": None, "token_ids": [token_id]} | ended],
                }
            )
        )
    return [*events, _json({**head, "choices": [], "usage": _USAGE})]


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_WHOLE: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (
        len(whole_body()),
        whole_body(),
    )
)
_EVENTS: Final = [_chunked(b"data: " + body + b"\n\n") for body in event_bodies()]
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_PARTS: Final = [
    _STREAM_HEAD + _EVENTS[0],
    *_EVENTS[1:-1],
    _EVENTS[-1] + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n",
]
EVENTS: Final = len(_PARTS)

Schedule: TypeAlias = list[tuple[float, bytes]]
"""What is sent how many seconds after the request."""


def _schedule(pace: Pace, parts: Sequence[bytes]) -> Schedule:
    """Parts that are due at the same time are sent in one piece."""
    waits = itertools.chain([pace.first, pace.second], itertools.repeat(pace.further))
    due = zip(itertools.accumulate(waits), parts, strict=False)
    return [
        (after, b"".join(part for _, part in group))
        for after, group in itertools.groupby(due, lambda one: one[0])
    ]


_SCHEDULES: Final = {
    (name, streamed): _schedule(pace, _PARTS if streamed else [_WHOLE])
    for name, pace in PACES.items()
    for streamed in (False, True)
}


class _Connection(asyncio.Protocol):
    """One caller, one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._expected = 0  # bytes of the request, once its head is there

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._expected:
            end = self._received.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head = self._received[:end].lower()
            place = head.index(b"content-length:") + 15
            self._expected = end + int(head[place : head.index(b"\r", place)])
        if len(self._received) >= self._expected:
            request, self._received, self._expected = self._received, b"", 0
            pace = request.split(b"/", 2)[1].decode()
            self._send(_SCHEDULES[pace, b'"stream":true' in request], 0, self._loop.time())

    def _send(self, schedule: Schedule, index: int, begin: float) -> None:
        """Send what is due of `schedule` from `index` on, and the rest when its time has come."""
        for number in range(index, len(schedule)):
            after, part = schedule[number]
            if after and begin + after > self._loop.time():
                self._loop.call_at(begin + after, self._send, schedule, number, begin)
                return
            if not self._transport.is_closing():
                self._transport.write(part)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(
        _Connection, "127.0.0.1", 0, backlog=2048
    )
    print(f"upstream at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    gc.disable()
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
