"""Where text tokenised anew differs from what was recorded: the six kinds, and what is no drift."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from agentlightning.gateway.chat.template import ChatTemplate, RecordedAnswers
from agentlightning.learner.tiny import make_tokenizer
from scripts.drift import Comparison, Drift, DriftCheck, Kind, RecordedCall
from tests.gateway.talker import CALL, SEARCH_TOOL, user

END = "<|end|>"
LEARNED = ["there", "there is", "hello, friend", "yes, no, and then?", CALL]
TOKENIZER = make_tokenizer(LEARNED * 4, 400)
TEMPLATE = str(TOKENIZER.chat_template)
# where the template writes an earlier answer
ANSWER = "{{- '<|assistant|>' + text(message.content) -}}"


def make_chat(
    template: str = TEMPLATE, normalizer: normalizers.Normalizer | None = None
) -> ChatTemplate:
    """The tiny tokenizer, with a template or a normalizer of its own."""
    tokenizer = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return ChatTemplate(tokenizer, template, special_tokens=TOKENIZER.special_tokens_map)


CHAT = make_chat()


def letters(text: str) -> tuple[int, ...]:
    """The text in tokens of one character each."""
    return tuple(token_id for letter in text for token_id in CHAT.encode(letter))


def asked(text: str = "hello", *, chat: ChatTemplate = CHAT, **more: Any) -> RecordedCall:
    """A call that has not been answered."""
    known = {
        "model": "policy",
        "start_time": 0.0,
        "answers": (),
        "replies": [],
        "messages": user(text),
        **more,
    }
    prompt = chat.encode(chat.render(known["messages"], known.get("tools", ())))
    return RecordedCall(
        **{"rollout_id": "ro", "attempt_id": "at", "call_index": 0, "prompt": prompt, **known}
    )


def answered(call: RecordedCall, sampled: tuple[int, ...], **message: Any) -> RecordedCall:
    return replace(call, answers=(sampled,), replies=[{"role": "assistant", **message}])


def followed(
    call: RecordedCall, *, chat: ChatTemplate = CHAT, reply: dict[str, Any] | None = None
) -> RecordedCall:
    """The next call of the same conversation, its prompt rendered and tokenised as a whole."""
    messages = [*call.messages, reply or call.replies[0], *user("and then?")]
    return asked(chat=chat, messages=messages, tools=call.tools, call_index=1)


def compared(*calls: RecordedCall, chat: ChatTemplate = CHAT) -> list[Comparison]:
    check = DriftCheck(chat)
    return [comparison for call in calls for comparison in check.compare(call)]


def drift(*calls: RecordedCall, chat: ChatTemplate = CHAT) -> dict[str, Drift]:
    """The drift in these calls, by check."""
    return {one.check: one.drift for one in compared(*calls, chat=chat) if one.drift is not None}


def kinds(*calls: RecordedCall, chat: ChatTemplate = CHAT) -> dict[str, Kind]:
    return {check: found.kind for check, found in drift(*calls, chat=chat).items()}


SPLIT = (*letters("there"), *CHAT.encode(", friend" + END))
TRIMS = make_chat(TEMPLATE.replace(ANSWER, ANSWER.replace("content)", "content) | trim")))
FORGETS = make_chat(
    TEMPLATE.replace(ANSWER, ANSWER.replace("content)", "content).split('</think>')[-1]"))
)
NFC = make_chat(normalizer=normalizers.NFC())
BARE = make_chat(
    "{% for message in messages %}{{ message.role }}:{{ message.content }} {% endfor %}assistant:"
)
THOUGHT = "<think>hm</think>yes"
CAFE = "cafe\u0301 au lait"


def both(kind: Kind) -> dict[str, Kind]:
    return {"answer": kind, "history": kind}


@pytest.mark.parametrize(
    ("sampled", "content", "chat", "found"),
    [
        (SPLIT, "there, friend", CHAT, both("split")),
        # spelled out
        ((*letters("a<|end|>"), *CHAT.encode(END)), "a<|end|>", CHAT, both("special token")),
        # lost from the text
        (CHAT.encode(f"a<|user|>b{END}"), "ab", CHAT, {"history": "special token"}),
        (CHAT.encode("\nyes" + END), "\nyes", TRIMS, {"history": "turn boundary"}),
        (CHAT.encode("yes\n" + END), "yes\n", TRIMS, {"history": "turn boundary"}),
        # a token reaches across its end
        (CHAT.encode("yes,"), "yes,", BARE, {"history": "turn boundary"}),
        # cut by a stop string
        (CHAT.encode("yes STOP it"), "yes", CHAT, {"history": "turn boundary"}),
        (CHAT.encode(CAFE + END), CAFE, NFC, both("normalisation")),
        (letters("漢")[:1], "\ufffd", CHAT, both("normalisation")),  # half a character
        (CHAT.encode(THOUGHT + END), THOUGHT, FORGETS, {"history": "template"}),
    ],
)
def test_text_that_drifts_is_of_a_kind(
    sampled: Any, content: str, chat: ChatTemplate, found: dict[str, Kind]
) -> None:
    call = answered(asked(chat=chat if chat is BARE else CHAT), sampled, content=content)
    assert kinds(call, followed(call, chat=chat), chat=chat) == found


@pytest.mark.parametrize(
    "sampled", [CALL.replace(" ", ""), f"Let me look.\n{CALL}", f"{CALL}\n{CALL}"]
)
def test_tool_calls_are_written_as_the_template_does(sampled: str) -> None:
    tool_call = {
        "id": "1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"q":"sun"}'},
    }
    content = "Let me look." if sampled.startswith("Let") else None
    reply = {"content": content, "tool_calls": [tool_call] * sampled.count(CALL[:11])}
    call = answered(asked("weather", tools=[SEARCH_TOOL]), CHAT.encode(sampled + END), **reply)
    assert kinds(call, followed(call)) == {"history": "tool call"}


TOKENS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=20)


@given(TOKENS, TOKENS)
def test_a_prompt_that_extends_what_was_sampled_has_not_drifted(
    sampled: list[int], more: list[int]
) -> None:
    call = answered(asked(), tuple(sampled), content="whatever it was")
    later = replace(followed(call), prompt=(*call.prompt, *sampled, *more))
    (history,) = (one for one in compared(call, later) if one.check == "history")
    assert history.drift is None
    assert history.tokens == len(call.prompt) + len(sampled)


@given(TOKENS)
def test_an_answer_drifts_exactly_where_its_text_has_other_tokens(sampled: list[int]) -> None:
    found = drift(answered(asked(), tuple(sampled))).get("answer")
    anew = CHAT.encode(TOKENIZER.decode(sampled))
    assert (found is None) == (anew == tuple(sampled))
    assert found is None or found.kind in ("split", "special token", "normalisation")
    assert found is None or 1 <= found.tokens <= len(sampled)


def test_recorded_answers_in_a_prompt_are_there_on_purpose() -> None:
    recorded, call = RecordedAnswers(CHAT), asked()
    sampled = (*letters("there"), *CHAT.encode(END))
    recorded.record("at", recorded.encode("at", CHAT.render(call.messages)), list(sampled))
    call = answered(call, sampled, content="there")
    later = followed(call)
    prompt = recorded.encode("at", CHAT.render(later.messages))
    spliced = replace(later, prompt=prompt.token_ids, spliced_tokens=prompt.spliced_tokens)
    assert prompt.spliced_tokens == 6
    assert kinds(call, spliced) == {"answer": "split"}
    assert kinds(replace(spliced, spliced_tokens=0)) == {"prompt": "split"}


def histories(*calls: RecordedCall) -> list[int | None]:
    """Which calls' answers were found in later prompts."""
    return [one.call_index for one in compared(*calls) if one.check == "history"]


def test_an_answer_is_recognised_however_a_framework_writes_it_and_not_where_the_agent_changed_it() -> (
    None
):
    arguments = {"name": "search", "arguments": '{"q": "sun"}'}
    call = answered(
        asked(), CHAT.encode(CALL), content=None, tool_calls=[{"id": "1", "function": arguments}]
    )
    sent = {"id": "x", "function": {"name": "search", "arguments": '{"q":"sun"}'}}
    assert histories(
        call, followed(call, reply={"role": "assistant", "content": "", "tool_calls": [sent]})
    ) == [0]
    call = answered(asked(), CHAT.encode("yes"), content="yes\n")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
    assert histories(call, followed(call, reply=parts)) == [0]
    assert histories(call, followed(call, reply={"role": "assistant", "content": "no"})) == []
    assert histories(call, replace(followed(call), attempt_id="another")) == []
    assert histories(call, replace(followed(call), model="judge")) == []
