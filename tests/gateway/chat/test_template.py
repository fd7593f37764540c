"""Rendering as transformers does it, tokenising, detokenising, and recorded answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentlightning.arrays import int32
from agentlightning.data.token_bytes import TokenBytes, splits_at_special_tokens
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.chat.template import ChatTemplate, RecordedAnswers
from agentlightning.gateway.chat.text import Detokenizer, StopStrings
from tests.gateway.talker import SEARCH_TOOL, make_talker, user

CHATML = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}
{%- endfor %}{{- '<tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- generation %}{{- '<tool_call>' + (call.function.arguments | tojson) + '</tool_call>' }}{% endgeneration -%}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def tool_turn(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [
        *user("hé <b>"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sun"}]},
    ]


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate.from_pretrained(make_talker().tokenizer)


def test_messages_are_rendered_as_templates_expect_them() -> None:
    tokenizer = make_talker().tokenizer
    plain = tool_turn("{}")
    plain[1]["content"] = ""
    plain[1]["tool_calls"][0]["function"]["arguments"] = {"q": "ü", "n": 1}
    plain[2]["content"] = "sun"
    options = {
        "chat_template": CHATML,
        "tools": [SEARCH_TOOL],
        "tokenize": False,
        "add_generation_prompt": True,
    }
    ours = ChatTemplate(tokenizer.backend_tokenizer, CHATML, special_tokens={})
    assert ours.render(
        tool_turn('{"q":"ü","n":1}'), [SEARCH_TOOL]
    ) == tokenizer.apply_chat_template(plain, **options)


def test_arguments_that_are_no_object_stay_text(chat: ChatTemplate) -> None:
    assert '"arguments": oops}' in chat.render(tool_turn("oops"), [SEARCH_TOOL])
    assert f'"arguments": {"[" * 5000}}}' in chat.render(tool_turn("[" * 5000), [SEARCH_TOOL])


@pytest.mark.parametrize(
    ("template", "messages", "variables", "says"),
    [
        (None, [{"role": "king", "content": "x"}], {}, "role"),
        (None, user("x"), {"messages": []}, "multiple values"),
        ("{{ ''.__class__.__mro__ }}", user("x"), {}, "unsafe"),  # it cannot leave its sandbox
    ],
)
def test_what_a_template_refuses_is_the_callers_error(
    chat: ChatTemplate, template, messages, variables, says
) -> None:
    ours = chat if template is None else ChatTemplate(chat.tokenizer, template, special_tokens={})
    with pytest.raises(BackendError, match=says) as caught:
        ours.render(messages, [], **variables)
    assert caught.value.status == 400


def test_a_tokenizer_without_a_template_or_a_format_of_tool_calls_is_refused(
    chat: ChatTemplate,
) -> None:
    class Bare:
        chat_template = None

    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate.from_pretrained(Bare())
    with pytest.raises(ConfigError, match="cannot be compiled"):
        ChatTemplate(chat.tokenizer, "{% if %}", special_tokens={})
    with pytest.raises(ConfigError, match="tool-call format"):
        ChatTemplate(
            chat.tokenizer, "{{ messages[0].content }}", special_tokens={}
        ).tool_call_parser()


def spoken(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.slow
@given(st.text(max_size=30), st.lists(st.integers(0, 400), max_size=30))
def test_any_ids_stream_to_the_text_they_decode_to_and_never_in_halves(
    text: str, more: list[int]
) -> None:
    talker = make_talker()
    chat = ChatTemplate.from_pretrained(talker.tokenizer)
    for ids in (list(chat.encode(text)), [token_id % len(talker.tokenizer) for token_id in more]):
        pieces = spoken(chat.detokenizer(keep_markers=False), ids)
        visible = [token_id for token_id in ids if token_id not in chat.token_bytes.special_ids]
        assert "".join(pieces) == (whole := talker.tokenizer.decode(visible))
        assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


def sentencepiece_like(*more: Any) -> Tokenizer:
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    return tokenizer


@pytest.mark.parametrize("strips", [False, True])  # and then text depends on its context
@given(text=st.text("ab \u6f22\u00e9", max_size=30))
def test_vocabularies_that_are_not_byte_level_stream_as_they_decode(
    strips: bool, text: str
) -> None:
    tokenizer = sentencepiece_like(*[decoders.Strip(" ", 1, 0)] * strips)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    token_bytes = TokenBytes(tokenizer)
    pieces = spoken(Detokenizer(token_bytes, keep_markers=False), ids)
    assert not token_bytes.exact
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_stray_byte_after_a_character_of_bytes_changes_neither_what_was_given_nor_what_follows() -> (
    None
):
    token_bytes = TokenBytes(tokenizer := sentencepiece_like(decoders.Strip(" ", 1, 0)))
    ids = [
        tokenizer.token_to_id(piece)
        for piece in ("<0xC3>", "<0xA9>", "<0xFF>", "z", "▁", "a", "<0xC3>", "<0xA9>", "b")
    ]
    assert spoken(Detokenizer(token_bytes, keep_markers=False), ids)[1] == "é"
    assert "".join(spoken(Detokenizer(token_bytes, keep_markers=False), ids)).endswith("z aéb")


def test_only_tokenizers_that_split_at_special_tokens_are_spliced() -> None:
    assert splits_at_special_tokens(make_talker().tokenizer.backend_tokenizer)
    assert not splits_at_special_tokens(sentencepiece_like())


HELLO = "<|user|>hello<|end|><|assistant|>"
PROMPT_TOKENS = len(ChatTemplate.from_pretrained(make_talker().tokenizer).encode(HELLO))


def test_a_recorded_answer_is_repeated_in_its_own_ids(chat: ChatTemplate) -> None:
    recorded = RecordedAnswers(chat)
    end = make_talker().tokenizer.eos_token_id
    prompt = recorded.encode("s", HELLO)
    unusual = [chat.encode(letter)[0] for letter in "there"]  # not how the tokenizer splits it
    assert int32(unusual) != chat.encode("there")
    recorded.record("s", prompt, int32([*unusual, end]))
    longer = f"{HELLO}there<|end|><|user|>more<|end|>"
    again = recorded.encode("s", longer)
    assert again.token_ids == prompt.token_ids + int32([*unusual, end]) + chat.encode(
        "<|user|>more<|end|>"
    )
    assert again.spliced_tokens == 6
    assert recorded.encode("other", longer).token_ids == chat.encode(longer)


def test_the_least_recently_used_session_is_forgotten(chat: ChatTemplate) -> None:
    recorded = RecordedAnswers(chat, tokens=2 * PROMPT_TOKENS + 2)
    prompt = recorded.encode(None, HELLO)
    for session in ("a", "b", "c"):
        recorded.record(session, prompt, int32([make_talker().tokenizer.eos_token_id]))
    recorded.record("d", prompt, chat.encode("t")[:1])  # an answer without an end is not recorded
    spliced = [recorded.encode(session, HELLO + "<|end|>").spliced_tokens for session in "abcd"]
    assert spliced == [0, 1, 1, 0]


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_text_is_cut_at_its_first_stop_string_however_it_arrives(
    text: str, stops: list[str]
) -> None:
    whole = StopStrings(tuple(stops))
    pieces: list[str] = []
    for letter in text:
        pieces.append(whole.feed(letter))
        if whole.matched is not None:
            break
    else:
        pieces.append(whole.finish())
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert "".join(pieces) == text and whole.matched is None
    else:
        said = "".join(pieces)
        assert text.startswith(said + (whole.matched or ""))
        assert len(said) + len(whole.matched or "") == min(ends)


def test_a_developers_and_a_later_system_message_are_what_the_template_knows(
    chat: ChatTemplate,
) -> None:
    refuses = (
        "{%- if message.role == 'system' and not loop.first %}{{ raise_exception('not here') "
        "}}{%- endif %}"
    )
    strict = CHATML.replace(
        "{%- for message in messages %}", "{%- for message in messages %}" + refuses
    )
    ours = ChatTemplate(chat.tokenizer, strict, special_tokens={})
    later = [{"role": "developer", "content": "S"}, *user("A"), {"role": "system", "content": "B"}]
    assert ours.render(later) == ours.render([{"role": "system", "content": "S"}, *user("A\n\nB")])
