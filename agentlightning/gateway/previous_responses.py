"""The conversation up to each recent response, so that a later call can continue it by its id."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.request import CallRefused, CallRequest

_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])


class Conversations:
    """Remembers `limit_bytes` of conversations and `limit_count` of them, least recently used out.
    An attempt finds its own responses alone, and a call that no attempt made those of such
    calls."""

    def __init__(self, *, limit_bytes: int = 64 * 1024 * 1024, limit_count: int = 20_000) -> None:
        self._limit_bytes = limit_bytes
        self._limit_count = limit_count
        # messages up to a response and its own, JSON
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._bytes = 0

    def join(self, caller: Caller, request: CallRequest) -> CallRequest:
        """The request with all that it continues in its messages.

        CallRefused (400) if the caller has no response of that id here, or asked that it not be
        stored."""
        if request.continues is None:
            return request
        key = (_scope(caller), request.continues)
        if key not in self._kept:
            message = f"Previous response with id '{request.continues}' not found."
            raise CallRefused(
                message, code="previous_response_not_found", param="previous_response_id"
            )
        self._kept.move_to_end(key)
        own = request.instructions
        history = _MESSAGES.decode(self._kept[key])
        return msgspec.structs.replace(
            request, messages=[*request.messages[:own], *history, *request.messages[own:]]
        )

    def answer(self, caller: Caller, response_id: str) -> dict[str, Any] | None:
        """The message of a response of the caller's, None if it is not kept."""
        kept = self._kept.get((_scope(caller), response_id))
        return None if kept is None else _MESSAGES.decode(kept)[-1]

    def remember(self, caller: Caller, request: CallRequest, answer: Answer) -> None:
        """Keep a response that was answered, for later calls to continue."""
        if not request.continuable or answer.choices[0].finish_reason == "abort":
            return
        conversation = [*request.messages[request.instructions :], answer.choices[0].message()]
        key = (_scope(caller), answer.response_id)
        self._bytes -= len(self._kept.pop(key, b""))
        self._kept[key] = msgspec.json.encode(conversation)
        self._bytes += len(self._kept[key])
        while self._bytes > self._limit_bytes or len(self._kept) > self._limit_count:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest)


def _scope(caller: Caller) -> str:
    return caller.attempt_id if caller.mode else ""
