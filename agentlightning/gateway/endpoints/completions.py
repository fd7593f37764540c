"""OpenAI's completions: a text, or token ids, continued as they stand.

Knows the wire format and nothing else: no backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, TypeAlias, cast

import msgspec

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started
from agentlightning.gateway.endpoints.base import Endpoint, Head, OpenAIStream, choice_body, whole_body
from agentlightning.gateway.endpoints.chat_completions import SAMPLING_TYPES, TopLogprobs, sampling_fields
from agentlightning.gateway.request import CallRefused, CallRequest, Fields, rest_json

MAX_TOKENS: Final = 16
"""How many tokens are sampled where the request does not say, as in OpenAI's protocol."""

_Prompt: TypeAlias = str | list[int | str | list[int]]
_FIELDS = Fields(
    types={**SAMPLING_TYPES, "prompt": _Prompt, "logprobs": TopLogprobs, "echo": bool, "best_of": int}, shapes={}
)


class Completions(Endpoint):
    """`POST /v1/completions`, of one prompt. With `return_token_ids` each choice holds `prompt_token_ids`, `token_ids`
    and `policy_versions` (run-length, as in `SampledChoice.versions`)."""

    path = "completions"
    operation = "text_completion"
    id_prefix = "cmpl-"

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _FIELDS.read(body, "model", "prompt")
        if values.get("echo"):
            raise CallRefused("echo is not supported: the prompt is not repeated; leave it out", param="echo")
        n = values.get("n", 1)
        if values.get("best_of", n) != n:
            raise CallRefused("best_of is not supported: every choice is given; leave it out", param="best_of")
        return CallRequest(
            messages=[],
            prompt=_prompt(values["prompt"]),
            logprobs="logprobs" in values,
            top_logprobs=values.get("logprobs", 0),
            extra=extra,
            request_json=rest_json(raw, "prompt"),
            **sampling_fields(values, values.get("max_tokens", MAX_TOKENS)),
        )

    def whole(self, request: CallRequest, answer: Answer, head: Head) -> bytes:
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(answer.choices):
            written = choice_body(index, {"text": choice.string("content")}, choice)
            if request.logprobs:
                written["logprobs"] = _Logprobs(request.top_logprobs).columns(choice.logprob_entries)
            if request.return_token_ids:
                written["prompt_token_ids"] = answer.prompt_token_ids
                written |= {"token_ids": choice.token_ids, "policy_versions": choice.versions}
            choices.append(written)
        return whole_body(head, "text_completion", choices, answer)

    def stream(self, request: CallRequest, head: Head) -> CompletionWriter:
        return CompletionWriter(request, head)


def _prompt(given: _Prompt) -> str | tuple[int, ...]:
    """The one prompt of a request: a text or token ids, perhaps in a list of its own."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise CallRefused(
                f"prompt holds {len(given)} prompts; one is answered per request: send a request for each",
                param="prompt",
            )
        given = cast(str | list[int | str | list[int]], given[0])
    if not given:
        raise CallRefused("prompt is empty; give a text or token ids", param="prompt")
    if isinstance(given, str):
        return given
    if not all(isinstance(token_id, int) for token_id in given):
        raise CallRefused("prompt mixes token ids and texts; give one text, or a list of token ids", param="prompt")
    return tuple(cast(list[int], given))


class CompletionWriter(OpenAIStream):
    """Writes one streamed answer, each event `data: {text_completion}`."""

    kind = "text_completion"

    def __init__(self, request: CallRequest, head: Head) -> None:
        super().__init__(request, head)
        self._logprobs: defaultdict[int, _Logprobs] = defaultdict(lambda: _Logprobs(request.top_logprobs))

    def started(self, event: Started) -> bytes:
        """The prompt's ids, for each choice, where they were asked for."""
        self._head |= event.extra
        if not self._request.return_token_ids:
            return b""
        ids = {"prompt_token_ids": event.prompt_token_ids, "token_ids": ()}
        numbers = range(self._request.sampling.n)
        return b"".join(self.event([choice_body(index, self.said({})) | ids]) for index in numbers)

    def said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}

    def logprobs(self, event: Delta) -> dict[str, Any]:
        return self._logprobs[event.index].columns(event.logprob_entries)


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None = None


class _Entry(_TokenLogprob):
    written: list[int] | None = msgspec.field(default=None, name="bytes")
    top_logprobs: list[_TokenLogprob] = []


class _Logprobs:
    """Turns the logprobs of one choice, part by part, into columns: `tokens`, `token_logprobs`, `top_logprobs` and
    `text_offset`, the place of each token in the answer's text, in characters."""

    def __init__(self, top_logprobs: int) -> None:
        self._with_top = top_logprobs > 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def columns(self, entries: Iterable[Any]) -> dict[str, Any]:
        """Of `Delta.logprob_entries`."""
        read = msgspec.json.decode(msgspec.json.encode(entries), type=list[_Entry])  # some may still be JSON
        return {
            "tokens": [entry.token for entry in read],
            "token_logprobs": [entry.logprob for entry in read],
            "top_logprobs": [{top.token: top.logprob for top in entry.top_logprobs} for entry in read]
            if self._with_top
            else None,
            "text_offset": [self._place(entry) for entry in read],
        }

    def _place(self, entry: _Entry) -> int:
        place = self._offset
        written = entry.token.encode() if entry.written is None else bytes(entry.written)
        self._offset += len(self._decoder.decode(written))
        return place
