"""Whatever samples tokens as a gateway backend: chats become token ids, sampled ids become text and
tool calls.

Knows chat templates and token ids. Does not know who samples, rollouts or spans.
"""

from __future__ import annotations

import asyncio
import hashlib
import string
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from agentlightning.arrays import TokenIds, int32
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.errors import BackendError
from agentlightning.gateway.admission import asks_for_nothing, forces_a_call
from agentlightning.gateway.backend import (
    CONSTRAINED,
    BackendEvent,
    Delta,
    Finished,
    ModelCall,
    Recital,
    RelayedAnswer,
    RelayedCall,
    Started,
    unsupported,
)
from agentlightning.gateway.chat.forms import Form, form_of
from agentlightning.gateway.chat.template import ChatTemplate, EncodedPrompt, RecordedAnswers
from agentlightning.gateway.chat.text import (
    BEGIN,
    Part,
    Reasoning,
    StopStrings,
    ToolCall,
    ToolCallParser,
)
from agentlightning.gateway.generation import (
    Ending,
    GenerationRequest,
    SampledToken,
    TokenGenerator,
    choice_seed,
)
from agentlightning.gateway.request import NEUTRAL_PENALTIES
from agentlightning.types import FinishReason, SampledChoice

_MANY: Final = 1000  # messages, which take some milliseconds to render: the same
# characters, which take a tenth of a second to tokenise: other calls go on meanwhile
_LONG: Final = 100_000
# Fields that the chat template is given.
_VARIABLES: Final = ("reasoning_effort", "documents")
_HINTS: Final = frozenset({"verbosity", *NEUTRAL_PENALTIES})
# Of fields that cannot be honoured, the values that state what holds here anyway.
_NEUTRAL: Final[dict[str, Any]] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "modalities": ["text"],
}


class TokenBackend:
    """Answers chats and continues prompts with the tokens of `generator`; every sampled id comes
    with its logprob and policy version. JSON output and forced calls are enforced where the
    generator can; elsewhere they are hints in an attempt, so that what is measured is what is
    trained, and refused without one. What else would constrain tokens is refused by name.

    `name` is what spans say of it. Prompt and answer have `max_sequence_length` tokens at most,
    where it is given. The generator belongs to its owner. The seed of a call decides its random
    numbers alone, where the generator honours seeds. Hints, such as penalties, are dropped, or
    refused if `strict`, so that another backend can follow them."""

    captures_tokens = seeded = True
    relays: frozenset[str] = frozenset()

    def __init__(
        self,
        chat: ChatTemplate,
        generator: TokenGenerator,
        *,
        name: str,
        max_sequence_length: int | None = None,
        strict: bool = False,
    ) -> None:
        self.name = name
        self.generator = generator
        self.max_sequence_length = max_sequence_length
        self._chat = chat
        self._strict = strict
        self._recorded = RecordedAnswers(chat)

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes that the token ids of its prompts and answers stand for."""
        return self._chat.token_bytes

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.answer`. BackendError 400 names what a free-running sampler cannot
        honour."""
        variables, dropped = self._check(call)
        prompt = await self._prompt(call, variables)
        form = form_of(call, self._chat.tool_format) if self.generator.enforces else None
        self._check_length(prompt)  # before it is sent, as often as there are choices
        if (self._request(call, 0, prompt).max_tokens or 0) < (call.sampling.max_tokens or 0):
            dropped.append("max_tokens")  # there is no room for more
        sampled = self.generator.generate
        choices = [
            self._choice(call, index, prompt, form, sampled) for index in range(call.sampling.n)
        ]
        started = False
        async with aclosing(choices[0] if len(choices) == 1 else _merged(choices)) as events:
            async for event in events:
                if not started:  # a request that cannot be served is refused before the first event
                    started = True
                    yield Started(prompt.token_ids, prompt.spliced_tokens, dropped=tuple(dropped))
                yield event

    async def recite(self, call: ModelCall, recital: Recital) -> AsyncGenerator[BackendEvent, None]:
        """See `Reciter`. Of several choices the first comes first."""
        prompt = self._recorded_prompt(recital)
        form = form_of(call, self._chat.tool_format) if self.generator.enforces else None
        yield Started(prompt.token_ids, prompt.spliced_tokens, extra=recital.extra)
        for index, choice in enumerate(recital.tokens.choices):
            recited = partial(_recited, choice, self._chat.stop_token_ids, call.sampling.stop)
            async for event in self._choice(call, index, prompt, form, recited):
                yield event

    def prime(self, session: str | None, recital: Recital) -> None:
        """See `Reciter`."""
        prompt = self._recorded_prompt(recital)
        for choice in recital.tokens.choices:
            self._recorded.record(session, prompt, choice.token_ids)

    def _recorded_prompt(self, recital: Recital) -> EncodedPrompt:
        ids = recital.tokens.prompt_token_ids
        return EncodedPrompt(self.token_bytes.text(ids), ids, recital.spliced_tokens)

    async def prompt_ids(self, call: ModelCall) -> TokenIds:
        return (await self._prompt(call, self._check(call)[0])).token_ids

    async def count_tokens(self, call: ModelCall) -> int:
        return len(await self.prompt_ids(call))

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        raise unsupported(call.path, f"{self.name} answers with text only")

    async def close(self) -> None:
        """The generator belongs to its owner."""

    async def _prompt(self, call: ModelCall, variables: dict[str, Any]) -> EncodedPrompt:
        if isinstance(call.prompt, tuple):
            known = self._chat.tokenizer.get_vocab_size()
            for token_id in call.prompt:
                if not 0 <= token_id < known:  # some servers end of it
                    raise BackendError(
                        f"prompt holds token id {token_id}; there are 0 to {known - 1}", status=400
                    )
            return EncodedPrompt("", int32(call.prompt))
        if call.prompt is None:
            tools = [] if call.tool_choice == "none" else call.tools
            if tools:
                self._chat.tool_call_parser()  # refuses tools before anything is computed
            render = partial(self._chat.render, call.messages, tools, **variables)
            text = await asyncio.to_thread(render) if len(call.messages) > _MANY else render()
            encode = partial(self._recorded.encode, call.session)
        else:
            text = call.prompt
            encode = self._as_it_stands
        return await asyncio.to_thread(encode, text) if len(text) > _LONG else encode(text)

    def _check_length(self, prompt: EncodedPrompt) -> None:
        if (
            self.max_sequence_length is not None
            and len(prompt.token_ids) >= self.max_sequence_length
        ):
            raise BackendError(
                f"the prompt has {len(prompt.token_ids)} tokens, and prompt and answer together "
                f"have at most {self.max_sequence_length} (max_sequence_length)",
                status=400,
                code="context_length_exceeded",
            )

    def _as_it_stands(self, text: str) -> EncodedPrompt:
        """Text that no template wrote gets the tokenizer's own beginning: a BOS where the model
        expects one."""
        return EncodedPrompt(text, int32(self._chat.tokenizer.encode_batch([text])[0].ids))

    def _check(self, call: ModelCall) -> tuple[dict[str, Any], list[str]]:
        """(template variables, hints that are dropped); BackendError 400 for what cannot be
        honoured or is unknown."""
        enforces = self.generator.enforces
        is_hint = not (enforces or self._strict) and call.session is not None
        variables = dict[str, Any]()
        dropped = list[str]()
        if forces_a_call(call.tool_choice) and not enforces:
            if not is_hint:
                raise unsupported(
                    "tool_choice",
                    "it forces a call, but tokens are sampled freely: use 'auto' or 'none', or "
                    "a vLLM or SGLang server, which enforces it",
                )
            dropped.append("tool_choice")
        for name, value in call.extra.items():
            if name == "chat_template_kwargs" and isinstance(value, dict):
                variables |= value
            elif name in _VARIABLES:
                variables.setdefault(name, value)
            elif name in _HINTS and not self._strict:
                dropped += [name] if value != NEUTRAL_PENALTIES.get(name) else []
            elif name == "parallel_tool_calls" and not self._strict:
                pass  # of several the gateway gives the agent the first
            elif name == "response_format" and enforces:
                pass  # see form_of
            elif name in ("response_format", "structured_outputs") and is_hint:
                dropped += [] if asks_for_nothing(name, value) else [name]
            elif not asks_for_nothing(name, value) and (
                name not in _NEUTRAL or value != _NEUTRAL[name]
            ):
                raise unsupported(
                    name, f"tokens are sampled freely here, without {name}={value!r}; leave it out"
                )
        return variables, dropped

    def _request(self, call: ModelCall, index: int, prompt: EncodedPrompt) -> GenerationRequest:
        sampling = call.sampling
        max_tokens = call.sampling.max_tokens
        if self.max_sequence_length is not None:
            room = self.max_sequence_length - len(prompt.token_ids)
            max_tokens = min(room, max_tokens or room)
        return GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            max_tokens=max_tokens,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=sampling.top_k or 0,
            seed=None if sampling.seed is None else choice_seed(sampling.seed, index),
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=call.top_logprobs,
            model=call.model,
            whole=not (call.stream or sampling.stop),
        )

    async def _choice(
        self,
        call: ModelCall,
        index: int,
        prompt: EncodedPrompt,
        form: Form | None,
        generate: Callable[[GenerationRequest], AsyncGenerator[list[SampledToken], None]],
    ) -> AsyncGenerator[BackendEvent, None]:
        request = self._request(call, index, prompt)
        thinks = self._chat.reasons and call.prompt is None
        begun = prompt.text.rstrip().endswith(BEGIN)
        if form is not None:
            request = replace(request, structural_tag=form.structural_tag())
        reasoning = Reasoning(begun=begun) if thinks else None
        writer = _ChoiceWriter(call, index, self._chat, reasoning=reasoning, form=form)
        together = attrgetter("version") if request.whole else id
        async with aclosing(generate(request)) as pieces:
            async for tokens in pieces:
                for _, run in groupby(tokens, key=together):
                    yield writer.delta(list(run))
                    if writer.stop_string is not None:
                        break
                if writer.stop_string is not None:
                    break
        if call.prompt is None:
            self._recorded.record(call.session, prompt, writer.token_ids)
        yield writer.finished()


async def _recited(
    choice: SampledChoice,
    ends: frozenset[int],
    stops: tuple[str, ...],
    request: GenerationRequest,
) -> AsyncGenerator[list[SampledToken], None]:
    """The tokens of a recorded choice, one at a time, or all at once where they were. Those that a
    stop string ended have no end of their own."""
    versions = [version for version, count in choice.versions for _ in range(count)]
    last = len(choice.token_ids) - 1
    end = "length" if choice.finish_reason == "length" else "stop"
    if stops and end == "stop" and choice.token_ids[last] not in ends:
        end = None
    tokens = [
        SampledToken(token_id, logprob, versions[place] if versions else 0)
        for place, (token_id, logprob) in enumerate(
            zip(choice.token_ids, choice.logprobs, strict=True)
        )
    ]
    tokens[last] = tokens[last]._replace(finish_reason=end)
    for piece in [tokens] if request.whole else [[token] for token in tokens]:
        yield piece


class _ChoiceWriter:
    """Turns one choice's sampled tokens into deltas: characters whole, stop strings cut, reasoning
    split off, tool calls parsed."""

    def __init__(
        self,
        call: ModelCall,
        index: int,
        chat: ChatTemplate,
        *,
        reasoning: Reasoning | None,
        form: Form | None,
    ) -> None:
        parse_tools = call.prompt is None and call.tool_choice != "none" and bool(call.tools)
        self.token_ids = int32()
        self._finish_reason: FinishReason | None = None
        self._ending = Ending()
        self._form = form
        self._call = call
        self._index = index
        self._token_bytes = chat.token_bytes
        markers = parse_tools or form is not None
        self._detokenizer = chat.detokenizer(
            keep_markers=markers, keep_reasoning=reasoning is not None
        )
        self._stops = StopStrings(call.sampling.stop)
        self._reasoning = reasoning
        self._parser = chat.tool_call_parser() if parse_tools else ToolCallParser()
        self._tool_calls = 0

    def delta(self, tokens: list[SampledToken]) -> Delta:
        """The delta that these tokens add, held-back text aside. Tokens are of one version."""
        ids = tuple(token.token_id for token in tokens)
        self.token_ids.extend(ids)
        reason = tokens[-1].finish_reason
        self._ending = tokens[-1].ending
        # The token that ends an answer is not part of its text.
        text = "".join(map(self._detokenizer.add, ids[:-1] if reason == "stop" else ids))
        if reason is not None:
            text += self._detokenizer.flush()
        certain = self._stops.feed(text)
        if self._stops.matched is None and reason is not None:
            certain += self._stops.finish()
        ends = self._stops.matched is not None or reason is not None
        thought = ""
        if self._reasoning is not None:
            thought, certain = self._reasoning.feed(certain, last=ends)
        parts = self._parser.feed(certain)
        if ends:
            parts += self._parser.finish()
            self._finish_reason = "stop" if self._stops.matched is not None else reason
        return Delta(
            index=self._index,
            delta=self._openai_delta(thought, parts),
            token_ids=ids,
            logprobs=tuple(token.logprob for token in tokens),
            version=tokens[-1].version,
            logprob_entries=tuple(map(self._entry, tokens)) if self._call.logprobs else (),
        )

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def finished(self) -> Finished:
        assert self._finish_reason is not None, "a generation ended without saying why"
        reason = (
            "tool_calls"
            if self._tool_calls and self._finish_reason == "stop"
            else self._finish_reason
        )
        untrainable, version, versions = self._ending
        if self._form is not None:
            untrainable = CONSTRAINED
        return Finished(self._index, reason, untrainable, self.stop_string, version, list(versions))

    def _entry(self, token: SampledToken) -> dict[str, Any]:
        tops = [self._named(token_id, logprob) for token_id, logprob in token.top_logprobs]
        return {**self._named(token.token_id, token.logprob), "top_logprobs": tops}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._token_bytes[token_id]
        return {
            "token": written.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(written),
        }

    def _openai_delta(self, thought: str, parts: list[Part]) -> dict[str, Any]:
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [self._tool_call(part) for part in parts if isinstance(part, ToolCall)]
        delta = {"reasoning_content": thought, "content": content, "tool_calls": calls}
        return {name: value for name, value in delta.items() if value}

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        position = self._tool_calls
        self._tool_calls = self._tool_calls + 1
        name = f"{self._call.request_id}/{self._index}/{position}"
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")
        letters = "".join(_LETTERS[number // 62**place % 62] for place in range(20))
        return {
            "index": position,
            "id": f"call_{letters}",  # agno replaces an id that does not begin like OpenAI's
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


_LETTERS = string.ascii_letters + string.digits


async def _merged(
    choices: list[AsyncGenerator[BackendEvent, None]],
) -> AsyncGenerator[BackendEvent, None]:
    """Events of several choices as they come. Closing it, or a failure of one, ends all."""
    coming = {asyncio.ensure_future(anext(choice, None)): choice for choice in choices}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                choice = coming.pop(task)
                if (event := task.result()) is not None:
                    coming[asyncio.ensure_future(anext(choice, None))] = choice
                    yield event
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for choice in choices:
            await choice.aclose()
