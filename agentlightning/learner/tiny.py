"""A tiny policy made on the spot: a tokenizer with a chat template, and a Qwen3-style transformer of half a million
parameters.

Knows how a conversation becomes text and text becomes tokens. Does not know tasks, training or serving, nor which
weights a small model had better begin with (`learner.tiny_weights`). What it makes is saved and loaded by transformers
like any other model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from agentlightning.errors import ConfigError
from agentlightning.learner import tiny_weights

PAD, END, ASSISTANT = "<|pad|>", "<|end|>", "<|assistant|>"
SPEAKERS = ("<|system|>", "<|user|>", ASSISTANT, "<|tool|>")
TOOL_CALL = ("<tool_call>", "</tool_call>")

# Numbers of up to three digits, words, and runs of anything else (with its spaces) are never merged with each other, so
# that a name or a number is the same token wherever it stands. The fixed parts of a tool call are one token each: what
# the policy decides, the tool and its arguments, then stands next to what it depends on.
PIECES = r'\{"name": "|", "arguments": \{"|\d{1,3}|[A-Za-z]+|[^A-Za-z\d]+'

# A turn is `<|speaker|>text<|end|>`; an assistant's turn is, token for token, what the model samples.
CHAT_TEMPLATE = """
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro signatures() -%}
    {%- for tool in tools or [] -%}
        {%- set parameters = (tool.function.parameters or {}).properties or {} -%}
        {{- '\\n' + tool.function.name + '(' + parameters | join(', ') + ')' -}}
    {%- endfor -%}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role not in ('system', 'developer')) -%}
    {{- '<|system|>' + signatures() + '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ('system', 'developer') -%}
        {{- '<|system|>' + text(message.content) + (signatures() if loop.first else '') -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
        {%- endfor -%}
    {%- elif message.role in ('user', 'tool') -%}
        {{- '<|' + message.role + '|>' + text(message.content) -}}
    {%- else -%}
        {{- raise_exception('a message has the role ' + message.role | tojson) -}}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def chat_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """A whole conversation as the tiny policy's template writes it; needs no tokenizer."""
    conversation = [dict(message) for message in messages]
    rendered, _ = render_jinja_template(
        [conversation], tools=[dict(tool) for tool in tools], chat_template=CHAT_TEMPLATE, add_generation_prompt=False
    )
    return rendered[0]


def make_tokenizer(corpus: Iterable[str], vocabulary_size: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on `corpus`, of at most `vocabulary_size` tokens, with the chat template.

    Any text survives encoding and decoding. The end of a turn, `<|end|>`, is the end-of-sequence token; `<tool_call>`
    is a single token that decoding keeps. ConfigError if the size leaves no room for the 256 bytes."""
    added = [PAD, END, *SPEAKERS, *TOOL_CALL]
    if vocabulary_size < len(added) + 256:
        raise ConfigError(f"vocabulary_size is {vocabulary_size}; it must be at least {len(added) + 256}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(TOOL_CALL),
        special_tokens=[PAD, END, *SPEAKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    between = re.compile("|".join(map(re.escape, added)))  # training, unlike encoding, does not cut the text at these
    tokenizer.train_from_iterator((piece for text in corpus for piece in between.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(SPEAKERS),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, layers: int = 2, max_positions: int = 1024
) -> Qwen3ForCausalLM:
    """A policy for `tokenizer` with tied embeddings and grouped queries (four heads on two key-value heads).

    The weights depend on `seed` and the vocabulary alone; torch's global generator is left as it was."""
    if layers < 2:
        raise ConfigError(f"layers is {layers}; copying takes two layers, so it must be at least 2")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny_weights.WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=tiny_weights.HEAD_SIZE,
        intermediate_size=384,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": tiny_weights.ROTARY_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    with torch.random.fork_rng(devices=[]):  # transformers draws weights of its own, which are not kept
        model = Qwen3ForCausalLM(config)
    tiny_weights.initialise(model, user_id=token_id(tokenizer, "<|user|>"), seed=seed)
    return model


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token. ConfigError if the tokenizer does not have it."""
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int) or tokenizer.convert_ids_to_tokens(found) != token:
        raise ConfigError(f"the tokenizer has no token {token}; make one with learner.tiny.make_tokenizer")
    return found
