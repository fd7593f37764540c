"""The exact sampled tokens of a call, with everything known about each; and the tokenizer that
provides their texts."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from agentlightning.dashboard.credit_views import TracedGroup
from agentlightning.data.continuity import Break, find_breaks
from agentlightning.data.transitions import FloatArray, TracedRollout
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.types import Span

if TYPE_CHECKING:  # a server without models need not have tokenizers installed
    from agentlightning.data.token_bytes import TokenBytes

_FILE: Final = "tokenizer.json"


class TokenCall(msgspec.Struct, frozen=True, kw_only=True):
    span_id: str
    call_index: int
    agent: str | None
    prompt_tokens: int
    sampled_tokens: int


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The call that this one goes on from has the first `shared` of these tokens."""

    ids: list[int]
    texts: list[str] | None
    shared: int


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    ids: list[int]
    texts: list[str] | None
    logprobs: list[float]
    versions: list[int]
    advantages: list[float] | None


class ExplainedBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A break, what you can do about it, and the texts of its tokens if a tokenizer is known."""

    found: Break
    suggestion: str
    before: list[str] | None
    recorded: list[str] | None
    anew: list[str] | None


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """One of a rollout's `calls`. Without a `tokenizer` there are no texts."""

    span_id: str
    calls: list[TokenCall]
    tokenizer: str | None
    prompt: PromptTokens
    sampled: SampledTokens
    found_break: ExplainedBreak | None = msgspec.field(name="break")


@runtime_checkable
class HasTokenBytes(Protocol):
    """A backend that knows the texts of its tokens."""

    @property
    def token_bytes(self) -> TokenBytes: ...


class Tokenizers:
    """The tokenizer of a model behind a gateway, or else of a policy of the rollout's run, whose
    files are beside the store; `address_of` a rollout is the store's address."""

    def __init__(
        self,
        address_of: Callable[[str], str | None],
        served: Mapping[str, TokenBytes] | None = None,
    ) -> None:
        self._address_of = address_of
        self._served = served or {}

    def find(self, rollout_id: str, model: str) -> tuple[str, TokenBytes] | None:
        """The tokenizer's name and its tokens' bytes; None if there is none. May read a file."""
        served = (
            model if model in self._served or len(self._served) != 1 else next(iter(self._served))
        )
        if served in self._served:  # under its own name, or as the only one there is
            return served, self._served[served]
        address = self._address_of(rollout_id)
        if address is None or "://" in address or address == ":memory:":
            return None
        # Training does not change the tokenizer, so any checkpoint has it; of several policies each
        # has a folder.
        checkpoints = sorted(Path(address).parent.glob("checkpoints/*"))
        folders = [Path(address).with_name("start"), *checkpoints]
        if re.fullmatch(r"\w[\w.-]{0,199}", model):  # a name that an agent made up is no path
            folders = [*(folder / model for folder in checkpoints), *folders]
        file = next((file for folder in folders if (file := folder / _FILE).is_file()), None)
        if file is None or importlib.util.find_spec("tokenizers") is None:
            return None
        return str(file.parent), _read(file)


@functools.lru_cache(maxsize=4)
def _read(file: Path) -> TokenBytes:
    from tokenizers import Tokenizer

    from agentlightning.data.token_bytes import TokenBytes

    return TokenBytes(Tokenizer.from_file(str(file)))


def texts_of(ids: Sequence[int], token_bytes: TokenBytes | None) -> list[str] | None:
    """The text of each token separately; incomplete characters become U+FFFD."""
    return (
        None
        if token_bytes is None
        else [token_bytes[token].decode(errors="replace") for token in ids]
    )


def token_view(
    traced: TracedRollout,
    spans: Sequence[Span],
    group: TracedGroup,
    span_id: str | None,
    tokenizers: Tokenizers,
) -> TokenView:
    """The call of a span, or the first one; `group` has the rollouts to compare with. NotFoundError
    if the rollout has no such call that trains. May read a file."""
    shown = next((call for call in traced.transitions if span_id in (None, call.span_id)), None)
    if shown is None:
        why = (
            traced.left_out.get(span_id or "")
            or "no call of it is recorded with token ids that train"
        )
        raise NotFoundError(
            f"there are no tokens to show of rollout {traced.rollout.rollout_id}: {why}"
        )
    name, token_bytes = tokenizers.find(traced.rollout.rollout_id, shown.model) or (None, None)
    breaks = find_breaks(traced.transitions, spans)
    found = next((each for each in breaks if each.call_index == shown.call_index), None)
    shared = 0 if found is None else found.position
    for call in traced.transitions:
        if call.span_id == shown.continues:
            shared = len(call.prompt_ids) + len(call.response_ids)
    prompt = shown.prompt_ids.tolist()
    sampled = shown.response_ids.tolist()
    return TokenView(
        span_id=shown.span_id,
        calls=[
            TokenCall(
                span_id=call.span_id,
                call_index=call.call_index,
                agent=call.agent,
                prompt_tokens=len(call.prompt_ids),
                sampled_tokens=len(call.response_ids),
            )
            for call in traced.transitions
        ],
        tokenizer=name,
        prompt=PromptTokens(ids=prompt, texts=texts_of(prompt, token_bytes), shared=shared),
        sampled=SampledTokens(
            ids=sampled,
            texts=texts_of(sampled, token_bytes),
            logprobs=shown.logprobs.tolist(),
            versions=shown.versions.tolist(),
            advantages=_advantages(group, shown.span_id),
        ),
        found_break=None if found is None else _explained(found, token_bytes),
    )


def _explained(found: Break, token_bytes: TokenBytes | None) -> ExplainedBreak:
    before, recorded, anew = (
        texts_of(ids, token_bytes) for ids in (found.before, found.recorded, found.found)
    )
    return ExplainedBreak(
        found=found, suggestion=found.suggestion, before=before, recorded=recorded, anew=anew
    )


def _advantages(group: TracedGroup, span_id: str) -> list[float] | None:
    try:
        found: FloatArray | None = group.advantages(group.settings).get(span_id)
    except (ConfigError, TypeError, ValueError):
        return None
    return None if found is None else found.tolist()
