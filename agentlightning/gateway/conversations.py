"""The conversation up to each recent response, so that a later call can continue it by its id.

Knows chat messages, and the spans that calls were captured in. Knows no HTTP and no backends.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.request import CallRefused, CallRequest
from agentlightning.store.base import LightningStore
from agentlightning.types import And, Attributes, Condition, Not

_ENDPOINT: Final = "responses"  # the one whose answers can be continued
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])


class _Captured(msgspec.Struct):
    """Fields of a captured request."""

    instructions: str | None = None
    store: bool | None = None


_CAPTURED: Final = msgspec.json.Decoder(_Captured)


class Conversations:
    """Remembers `limit_count` responses of `limit_bytes` in all, least recently used out; those of attempts that are
    not remembered are read from the store. An attempt finds its own responses alone, and a call that no attempt made
    those of such calls."""

    def __init__(
        self, store: LightningStore | None, *, limit_bytes: int = 64 * 1024 * 1024, limit_count: int = 20_000
    ) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._limit_count = limit_count
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # messages up to a response and its own, JSON
        self._bytes = 0

    async def join(self, caller: Caller, request: CallRequest) -> CallRequest:
        """The request with all that it continues in its messages.

        CallRefused (400) if the caller has no response of that id, or asked that it not be stored."""
        if request.continues is None:
            return request
        history = await self._messages(caller, request.continues)
        if history is None:
            message = f"Previous response with id '{request.continues}' not found."
            raise CallRefused(message, code="previous_response_not_found", param="previous_response_id")
        own = request.instructions
        return msgspec.structs.replace(request, messages=[*request.messages[:own], *history, *request.messages[own:]])

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

    async def _messages(self, caller: Caller, response_id: str) -> list[dict[str, Any]] | None:
        key = (_scope(caller), response_id)
        if key in self._kept:
            self._kept.move_to_end(key)
            return _MESSAGES.decode(self._kept[key])
        if self._store is None or caller.mode is None:
            return None
        conditions = (
            Condition("attempt_id", "eq", caller.attempt_id),
            Condition(f"attributes.{semconv.CALL_ENDPOINT}", "eq", _ENDPOINT),
            Condition(f"attributes.{semconv.GEN_AI_RESPONSE_ID}", "eq", response_id),
            Not(Condition(f"attributes.{semconv.GEN_AI_FINISH_REASONS}", "contains", "abort")),
        )
        found = await self._store.page_spans(And(conditions), limit=1)
        return _captured(found.items[0].attributes) if found.items else None


def _scope(caller: Caller) -> str:
    return caller.attempt_id if caller.mode else ""


def _captured(attributes: Attributes) -> list[dict[str, Any]] | None:
    """The conversation of a captured call; None if its response was not to be stored, or texts are not captured."""
    if semconv.GEN_AI_INPUT_MESSAGES not in attributes or semconv.GEN_AI_OUTPUT_MESSAGES not in attributes:
        return None
    request = _CAPTURED.decode(str(attributes[semconv.CALL_REQUEST]))
    if request.store is False:
        return None
    given = _MESSAGES.decode(str(attributes[semconv.GEN_AI_INPUT_MESSAGES]))
    answer = _MESSAGES.decode(str(attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    return given[request.instructions is not None :] + answer
