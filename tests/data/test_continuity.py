"""Which call goes on from which, and where one should and does not: every kind, from ids and
messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentlightning import semconv
from agentlightning.data.continuity import Break, find_breaks
from agentlightning.data.transitions import Transition
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.learner.tiny import make_tokenizer
from agentlightning.tracing.links import read_links
from agentlightning.types import SampledChoice, Span, TokenCapture
from tests.transitions import transition

END = "<|end|>"
TOOL_CALL = '<tool_call>{"name": "search", "arguments": {"q": "sun"}}</tool_call>'
TOKENIZER = make_tokenizer(
    ["there", "there is", "hello, friend", "yes, no, and then?", TOOL_CALL] * 4, 400
)
TEMPLATE = str(TOKENIZER.chat_template)
# where the template writes an earlier answer
ANSWER = "{{- '<|assistant|>' + text(message.content) -}}"
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
FETCH = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}


def make_chat(template: str = TEMPLATE) -> ChatTemplate:
    tokenizer = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    return ChatTemplate(tokenizer, template, special_tokens=TOKENIZER.special_tokens_map)


CHAT = make_chat()


def letters(text: str) -> tuple[int, ...]:
    """The text in tokens of one character each."""
    return tuple(token_id for letter in text for token_id in CHAT.encode(letter))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "You are the writer. Be there, friend."}


@dataclass
class Attempt:
    """The calls of one attempt, in order. Without `content` only ids were recorded."""

    chat: ChatTemplate = field(default_factory=lambda: CHAT)
    content: bool = True
    transitions: list[Transition] = field(default_factory=list[Transition])
    spans: list[Span] = field(default_factory=list[Span])

    def call(
        self,
        messages: list[dict[str, Any]],
        said: str,
        sampled: tuple[int, ...] | None = None,
        reply: dict[str, Any] | None = None,
        tools: tuple[dict[str, Any], ...] = (),
        agent: str = "writer",
    ) -> list[dict[str, Any]]:
        """A chat call; the messages with its answer."""
        prompt = self.chat.encode(self.chat.render(messages, tools))
        answer = reply or assistant(said)
        content = {
            semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([answer]),
            **({semconv.GEN_AI_TOOL_DEFINITIONS: json.dumps(tools)} if tools else {}),
        }
        self.ids(
            prompt, self.chat.encode(said + END) if sampled is None else sampled, agent, content
        )
        return [*messages, answer]

    def complete(self, prompt: str, said: str) -> str:
        """A call that continues a text, sampled letter by letter; the text with its answer."""
        content = {
            semconv.CALL_PROMPT: prompt,
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([assistant(said)]),
        }
        self.ids(self.chat.encode(prompt), letters(said), "writer", content)
        return prompt + said

    def ids(
        self,
        prompt: tuple[int, ...],
        answer: tuple[int, ...],
        agent: str = "writer",
        content: Any = None,
    ) -> tuple[int, ...]:
        index = len(self.transitions)
        given = {"rollout_id": "r", "attempt_id": "a", "span_id": f"{index:016x}"}
        self.transitions.append(transition(prompt, answer, **given, call_index=index, agent=agent))
        attributes = {
            semconv.CALL_INDEX: index,
            **(content if content is not None and self.content else {}),
        }
        choice = SampledChoice(
            token_ids=answer, logprobs=(-0.5,) * len(answer), finish_reason="stop"
        )
        tokens = TokenCapture(prompt_token_ids=prompt, choices=(choice,))
        times = {"start_time": float(index), "end_time": index + 0.5}
        self.spans.append(
            Span(
                **given,
                **times,
                sequence_id=index,
                trace_id="0" * 32,
                name="chat",
                attributes=attributes,
                tokens=tokens,
            )
        )
        return (*prompt, *answer)

    def breaks(self) -> tuple[Break, ...]:
        return find_breaks(self.transitions, self.spans)

    def links(self) -> list[tuple[int, bool | None] | None]:
        """The call that each call goes on from, and whether their tokens agree."""
        found = [read_links(self.spans).get(span.span_id) for span in self.spans]
        return [None if one is None else (one[1].call, one[1].tokens) for one in found]

    def break_(self) -> Break:
        (found,) = self.breaks()
        return found

    def kind(self) -> str:
        return self.break_().kind


@pytest.mark.parametrize("content", [True, False])
def test_agents_by_turns_each_go_on_with_their_own(content: bool) -> None:
    attempt = Attempt(content=content)
    writer, search = [SYSTEM, user("hello")], [user("yes, no?")]
    for turn in range(3):
        writer = [*attempt.call(writer, f"there {turn}"), user("and then?")]
        if turn < 2:
            search = [*attempt.call(search, f"friend {turn}", agent="search"), user("and then?")]
    assert attempt.links() == [None, None, (0, True), (1, True), (2, True)]
    assert attempt.breaks() == ()


def test_of_very_many_calls_only_the_latest_are_compared() -> None:
    attempt = Attempt(content=False)
    first = attempt.ids((1, 2), (3,))
    for number in range(150):
        attempt.ids((10 + number,), (4,))
    attempt.ids((*first, 5), (6,))
    last = attempt.ids((10 + 149, 4, 5), (6,))
    attempt.ids((*last, 7), (8,))
    assert attempt.links()[-3:] == [None, (150, True), (152, True)]


def broken(
    said: str, sampled: tuple[int, ...] | None = None, chat: ChatTemplate = CHAT, **more: Any
) -> Attempt:
    """A second call that sends the first one's answer back."""
    attempt = Attempt(chat)
    tools = more.pop("tools", ())
    history = attempt.call([SYSTEM, user("hello")], said, sampled, tools=tools, **more)
    attempt.call([*history, user("and then?")], "friend", tools=tools)
    return attempt


SEARCHES = assistant(
    None, tool_calls=[{"id": "1", "function": {"name": "search", "arguments": '{"q":"sun"}'}}]
)
FORGETS_THINKING = make_chat(
    TEMPLATE.replace(ANSWER, ANSWER.replace("content)", "content).split('</think>')[-1]"))
)
IN_LETTERS = (*letters("there"), *CHAT.encode(END))


@pytest.mark.parametrize(
    "make",
    [
        lambda: broken("there", IN_LETTERS),
        lambda: broken("a", CHAT.encode(f"a<|user|>b{END}"), reply=assistant("ab")),
        lambda: broken(
            "", CHAT.encode(TOOL_CALL.replace(" ", "") + END), reply=SEARCHES, tools=(SEARCH,)
        ),
        lambda: broken("<think>no</think>yes", chat=FORGETS_THINKING),
    ],
    ids=["split", "special token", "tool call", "template"],
)
def test_an_answer_that_came_back_in_other_tokens_is_reported(make: Any) -> None:
    attempt = make()
    found = attempt.break_()
    assert (found.kind, found.agent, found.earlier, found.call_index) == (
        "retokenised",
        "writer",
        0,
        1,
    )
    assert attempt.links() == [None, (0, False)]


def test_texts_that_are_glued_are_reported() -> None:
    attempt = Attempt()
    attempt.complete(attempt.complete("hello, friend ", "there") + " and then? ", "yes")
    assert attempt.kind() == "retokenised"


@pytest.mark.parametrize(
    "edit",
    [
        lambda history: [*history[:-1], assistant("there"), user("no?")],
        lambda history: [*history[:3], user("and?"), history[4], user("no?")],
        lambda history: [SYSTEM, *history[-2:], user("no?")],
        lambda history: [SYSTEM, user("hello, there and friend"), *history[-2:], user("no?")],
    ],
    ids=["answer", "earlier message", "old messages left out", "old messages summarised"],
)
def test_a_history_that_was_edited_is_reported(edit: Any) -> None:
    attempt = Attempt()
    history = attempt.call([SYSTEM, user("hello")], "there")
    history = attempt.call([*history, user("and then?")], "there is no")
    attempt.call(edit(history), "no")
    found = attempt.break_()
    assert (found.kind, found.earlier) == ("edited history", 1)


def test_tools_that_changed_are_reported() -> None:
    attempt = Attempt()
    history = attempt.call([SYSTEM, user("hello")], "there", tools=(SEARCH,))
    attempt.call([*history, user("and then?")], "yes", tools=(SEARCH, FETCH))
    found = attempt.break_()
    assert (found.kind, found.inside) == ("tools changed", "prompt")


def test_a_break_from_the_last_call_counts_although_an_earlier_one_is_continued() -> None:
    attempt = Attempt()
    history = attempt.call([SYSTEM, user("hello")], "there")
    history = attempt.call([*history, user("and then?")], "there", IN_LETTERS)
    attempt.call([*history, user("yes?")], "no")
    assert attempt.links() == [None, (0, True), (1, False)]
    assert [(found.kind, found.earlier) for found in attempt.breaks()] == [("retokenised", 1)]


def test_ids_alone_show_a_break_and_not_its_reason() -> None:
    attempt = Attempt(content=False)
    history = attempt.call([SYSTEM, user("hello")], "there", IN_LETTERS)
    attempt.call([*history, user("and then?")], "friend")
    assert attempt.kind() == "unknown"
