"""Makes a tiny policy: a tokenizer with a chat template, and a Qwen3-style transformer with half a
million parameters, warm-started on demonstrations. The result is saved and loaded by transformers
like any other model.

Tiny models learn copying (names, numbers, tool results) slowest, so the random weights start with a
circuit for it. The residual stream is divided: channel 0 is a constant, 1..63 identify the token,
64..95 the previous token, 96..127 the one before that. Layer 0 writes the last two by attending one
and two positions back. Layer 1 finds positions whose predecessors match the current tokens, and
copies what is there:
    … from: Oslo …  "from": "  →  Oslo   (the same word two positions back, whatever the separator)

A third head of layer 1 always attends to the first word after `<|user|>`, so every token knows the
request. All weights stay trainable."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from msgspec.structs import replace
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils.chat_template_utils import render_jinja_template

from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.torch import TorchLearner

PAD = "<|pad|>"
END = "<|end|>"
ASSISTANT = "<|assistant|>"
SPEAKERS = ("<|system|>", "<|user|>", ASSISTANT, "<|tool|>")
TOOL_CALL = ("<tool_call>", "</tool_call>")

# Numbers of up to three digits, words, and runs of anything else (with its spaces) are never merged
# with each other, so that a name or a number is the same token wherever it stands. The fixed parts
# of a tool call are one token each: what the policy decides, the tool and its arguments, then
# stands next to what it depends on.
PIECES = r'\{"name": "|", "arguments": \{"|\d{1,3}|[A-Za-z]+|[^A-Za-z\d]+'

WIDTH = 128
HEAD_SIZE = 32
ROTARY_BASE = 1e6
CONSTANT = 0
IDENTITY = slice(1, 64)
BEFORE = slice(64, 96)
BEFORE_THAT = slice(96, 128)

# larger weights move relatively less in a step of AdamW: policies then survive its first steps
EMBEDDING_SCALE = 0.2
SHARPNESS = 2.2  # of the query and key norms: attention scores are at most about 27
COPY_STRENGTH = 6.0  # of the copied token, relative to the current token's embedding
REQUEST_STRENGTH = 1.0  # of the request's first word

# The warm start: demonstrations of a step, and the steps in which the learning rate rises, and
# falls to 0.
BATCH = 32
WARM_UP = 10
COOL_DOWN = 60
KEPT = 50  # the steps between two checkpoints
# Where it chooses its steps: the demonstrations held out at most, the steps between two looks at
# their loss, the looks without a fall by this share, and by so much, after which the learning rate
# falls, and the steps after which it does in any case.
HELD_OUT = 200
LOOK = 20
PATIENCE = 3
LEAST_SHARE = 0.005
LEAST_FALL = 0.001
MOST = 2000
# the decay of the average of weights that is looked at: single weights follow their last batches
AVERAGED = 0.95

# One rotary frequency per pair of rows (i, i + 16) of a head. The fast ones tell neighbouring
# places apart; the slow ones hardly turn over a conversation, so that tokens can be compared
# however far apart they are.
FREQUENCIES = ROTARY_BASE ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
FAST = torch.arange(3)
SLOW = torch.nonzero(FREQUENCIES < 0.03).flatten()
COMPARED = torch.cat([SLOW, SLOW + HEAD_SIZE // 2])

# A turn is `<|speaker|>text<|end|>`; an assistant's turn is, token for token, what the model
# samples.
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


def chat_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """A whole conversation in the format of the tiny policy's template; needs no tokenizer."""
    conversation = [dict(message) for message in messages]
    rendered, _ = render_jinja_template(
        [conversation],
        tools=[dict(tool) for tool in tools],
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=False,
    )
    return rendered[0]


def _text(demonstration: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    return chat_text(demonstration["messages"], demonstration.get("tools") or tools)


def make_tokenizer(corpus: Iterable[str], vocabulary_size: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on `corpus`, with at most `vocabulary_size` tokens and the chat
    template.

    Decoding restores any encoded text. The end of a turn, `<|end|>`, is the end-of-sequence token;
    `<tool_call>` is a single token that decoding keeps. ConfigError if the size leaves no room for
    the 256 bytes."""
    added = [PAD, END, *SPEAKERS, *TOOL_CALL]
    if vocabulary_size < len(added) + 256:
        raise ConfigError(
            f"vocabulary_size is {vocabulary_size}; it must be at least {len(added) + 256}"
        )
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
    # training, unlike encoding, does not split texts at these
    between = re.compile("|".join(map(re.escape, added)))
    tokenizer.train_from_iterator(
        (piece for text in corpus for piece in between.split(text)), trainer
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in TOOL_CALL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(SPEAKERS),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    layers: int = 2,
    inner: int = 384,
    max_positions: int = 1024,
) -> Qwen3ForCausalLM:
    """A policy for `tokenizer` with tied embeddings and grouped queries (four heads on two
    key-value heads); `inner` is the width of its feed-forward layers.

    The weights depend only on `seed` and the vocabulary; torch's global generator is unchanged."""
    if layers < 2:
        raise ConfigError(f"layers is {layers}; copying takes two layers, so it must be at least 2")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        intermediate_size=inner,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    # transformers draws initial weights, which are replaced
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config)
    initialise(model, user_id=token_id(tokenizer, "<|user|>"), seed=seed)
    return model


def make_policy(
    demonstrations: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int,
    vocabulary_size: int = 1024,
    steps: int | None = None,
    layers: int = 2,
    inner: int = 384,
    max_positions: int = 1024,
) -> Policy:
    """A tiny policy made only from `demonstrations`: they give the vocabulary, and it is
    warm-started on them.

    A demonstration is a conversation as `agl export --format sft` writes it: `messages`, as OpenAI
    clients send them, and the `tools` that the model was offered. `tools` are those of
    demonstrations that have none.

    The same seed gives the same policy. `layers`, `inner` and `max_positions` are as in
    `make_model`, and `steps` as in `warm_start`; these also say what is raised."""
    torch.set_num_threads(1)  # more would slow down so small a model
    tokenizer = make_tokenizer((_text(shown, tools) for shown in demonstrations), vocabulary_size)
    model = make_model(
        tokenizer, seed=seed, layers=layers, inner=inner, max_positions=max_positions
    )
    warm_start(model, tokenizer, demonstrations, tools=tools, seed=seed, steps=steps)
    return Policy(model, tokenizer)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int,
    steps: int | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train `model` in place on the assistant's turns of `demonstrations`: it learns the form of a
    conversation, and to copy.

    Without `steps` a tenth of the demonstrations is held out, and training ends when their loss
    falls no more; a line on stderr says after how many steps. Give `steps` for a policy that is to
    begin half-trained. Only then can it be resumed: it keeps its state in the file `checkpoint`;
    one that finds that file, of a call with the same arguments, goes on from there, to the same
    bits as one that was not interrupted.

    Demonstrations are as for `make_policy`. ConfigError if there are too few for a batch, or for a
    `checkpoint` without `steps`, TrainingError if the loss is not finite."""
    if checkpoint and steps is None:
        raise ConfigError("a warm start with a checkpoint needs a number of steps")
    texts = [_text(demonstration, tools) for demonstration in demonstrations]
    encoded: list[list[int]] = (
        tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    )
    sequences = [answers_of(tokenizer, token_ids) for token_ids in encoded]
    generator = random.Random(f"warm start/{seed}")
    held_out = _HeldOut()
    if steps is None:
        sequences = generator.sample(sequences, len(sequences))
        held_out = _HeldOut(
            Policy(model, tokenizer), sequences[: min(HELD_OUT, len(sequences) // 10)]
        )
        sequences = sequences[len(held_out.sequences) :]
    if len(sequences) < BATCH:
        raise ConfigError(f"{len(demonstrations)} demonstrations are too few: a step takes {BATCH}")
    left = list[TrainingSequence]()
    config = AdamW(1e-3, (0.9, 0.98), 0.01, micro_batch_tokens=2048)
    learner = TorchLearner(Policy(model, tokenizer), config)
    done = _resume(learner, checkpoint) if checkpoint and checkpoint.is_file() else 0
    step = 0
    while steps is None or step < steps:
        step += 1
        if len(left) < BATCH:
            left = generator.sample(sequences, len(sequences))
        batch = left[:BATCH]
        left = left[BATCH:]
        if step <= done:
            continue
        share = min(1.0, step / WARM_UP)
        if steps is not None:
            share = min(share, (steps - step + 1) / min(COOL_DOWN, 0.6 * steps))
        learner.config = replace(config, learning_rate=config.learning_rate * share)
        learner.step(batch, Loss("policy_gradient"))
        if checkpoint and step % KEPT == 0:
            _keep(learner, checkpoint)
        if steps is None and held_out.is_learned(step):
            steps = step + COOL_DOWN
    held_out.report(steps)


def _keep(learner: TorchLearner, checkpoint: Path) -> None:
    """Write the state of training; who is killed meanwhile leaves the earlier one."""
    state = {
        "model": learner.model.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "steps": learner.steps,
    }
    new = checkpoint.with_suffix(".new")
    torch.save(state, new)
    new.replace(checkpoint)


def _resume(learner: TorchLearner, checkpoint: Path) -> int:
    """The steps that were made before the state in `checkpoint`, which is loaded."""
    state = torch.load(checkpoint, weights_only=True)
    learner.model.load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.steps = state["steps"]
    return learner.steps


class _HeldOut:
    """The loss of demonstrations that are not trained on, of an average of the weights."""

    def __init__(
        self, policy: Policy | None = None, sequences: Sequence[TrainingSequence] = ()
    ) -> None:
        self.sequences = sequences
        if policy is None:
            return
        self._trained = TorchLearner(policy)
        self._average = AveragedModel(policy.model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGED))
        self._learner = TorchLearner(Policy(cast(Any, self._average.module), policy.tokenizer))
        self._model = policy.model
        self._best = math.inf
        self._looks = 0

    def is_learned(self, step: int) -> bool:
        """Whether the loss no longer falls, after this step."""
        self._average.update_parameters(self._model)
        if step % LOOK:
            return False
        loss = self._loss(self._learner)
        self._looks += 1
        if loss < min(self._best * (1 - LEAST_SHARE), self._best - LEAST_FALL):
            self._best = loss
            self._looks = 0
        return self._looks == PATIENCE or step >= MOST

    def report(self, steps: int) -> None:
        if self.sequences:
            loss = self._loss(self._trained)
            sys.stderr.write(f"warm start: {steps} steps, held-out loss {loss:.3f} per token\n")

    def _loss(self, learner: TorchLearner) -> float:
        logprobs = torch.cat(learner.logprobs(self.sequences))
        return -float(logprobs.mean())


def answers_of(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> TrainingSequence:
    """A conversation of which only the assistant's turns are learned."""
    begin = token_id(tokenizer, ASSISTANT)
    end = token_id(tokenizer, END)
    positions: list[int] = []
    speaking = False
    for position, token in enumerate(token_ids):
        if speaking:
            positions.append(position)
        speaking = token == begin or (speaking and token != end)
    # All start with the same instructions.
    return TrainingSequence.of("demonstration", token_ids, positions, advantage=1.0, tree=True)


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token. ConfigError if the tokenizer does not have it."""
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int) or tokenizer.convert_ids_to_tokens(found) != token:
        raise ConfigError(
            f"the tokenizer has no token {token}; make one with learner.tiny.make_tokenizer"
        )
    return found


@torch.no_grad()
def initialise(model: Qwen3ForCausalLM, *, user_id: int, seed: int) -> None:
    """Set every weight of `model` from `seed`, without torch's global generator.

    Weights are normal, scaled so that each layer's output is small beside its input; embeddings
    have a constant, an identity, and almost nothing in the channels that layer 0 writes."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (cast(Qwen3Attention, model.model.layers[index].self_attn) for index in (0, 1))
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        scale = 1 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= 0.3 * EMBEDDING_SCALE
        parameter.normal_(0.0, scale, generator=generator)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, EMBEDDING_SCALE / 10, generator=generator)
    embedding[:, IDENTITY].normal_(0.0, EMBEDDING_SCALE, generator=generator)
    embedding[:, CONSTANT] = 3 * EMBEDDING_SCALE
    for attention in (first, second):
        attention.q_norm.weight.fill_(SHARPNESS)
        attention.k_norm.weight.fill_(SHARPNESS)
    view = identity_view(generator)
    look_back(first, view)
    match_and_copy(second, view, generator)
    look_at_request(second, view @ embedding[user_id], generator)


def identity_view(generator: torch.Generator) -> torch.Tensor:
    """A random projection [head, width] of a token's identity, with orthonormal rows."""
    channels = IDENTITY.stop - IDENTITY.start
    view = torch.zeros(HEAD_SIZE, WIDTH)
    view[:, IDENTITY] = torch.linalg.qr(torch.randn(channels, HEAD_SIZE, generator=generator))[0].T
    return view


def look_back(attention: Qwen3Attention, view: torch.Tensor) -> None:
    """Layer 0, heads 0 and 1: write a view of the previous token, and of the one before it, into
    their channels.

    A constant key and a constant query rotated by `offset` positions match at distance `offset`."""
    attention.k_proj.weight[rows(0)] = 0.0
    attention.k_proj.weight[FAST, CONSTANT] = 1.0
    attention.v_proj.weight[rows(0)] = view
    for head, offset, target in ((0, 1, BEFORE), (1, 2, BEFORE_THAT)):
        query = torch.zeros(HEAD_SIZE, WIDTH)
        query[FAST, CONSTANT] = torch.cos(FREQUENCIES[FAST] * offset)
        query[FAST + HEAD_SIZE // 2, CONSTANT] = -torch.sin(FREQUENCIES[FAST] * offset)
        attention.q_proj.weight[rows(head)] = query
        attention.o_proj.weight[:, rows(head)] = 0.0
        attention.o_proj.weight[target, rows(head)] = torch.eye(HEAD_SIZE) * EMBEDDING_SCALE


def match_and_copy(
    attention: Qwen3Attention, view: torch.Tensor, generator: torch.Generator
) -> None:
    """Layer 1, heads 0 and 2: attend to positions whose previous token is this one, and whose one
    before that is the previous one; copy a view of the token there."""
    for group, reads, target in ((0, view, BEFORE), (1, channels_of(BEFORE), BEFORE_THAT)):
        query = torch.zeros(HEAD_SIZE, WIDTH)
        key = torch.zeros(HEAD_SIZE, WIDTH)
        query[COMPARED] = reads[COMPARED]
        key[COMPARED] = channels_of(target)[COMPARED]
        attention.q_proj.weight[rows(2 * group)] = query
        attention.k_proj.weight[rows(group)] = key
        copied = identity_view(generator)
        attention.v_proj.weight[rows(group)] = copied
        attention.o_proj.weight[:, rows(2 * group)] = copied.T * COPY_STRENGTH * EMBEDDING_SCALE


def look_at_request(
    attention: Qwen3Attention, user: torch.Tensor, generator: torch.Generator
) -> None:
    """Layer 1, head 1: attend to the position after `<|user|>` (its view [head]) and add a random
    projection of the token there, for later layers to use. It shares its keys with head 0."""
    query = torch.zeros(HEAD_SIZE, WIDTH)
    query[COMPARED, CONSTANT] = user[COMPARED]
    attention.q_proj.weight[rows(1)] = query
    scale = REQUEST_STRENGTH * EMBEDDING_SCALE / math.sqrt(HEAD_SIZE)
    attention.o_proj.weight[:, rows(1)].normal_(0.0, scale, generator=generator)


def channels_of(target: slice) -> torch.Tensor:
    """Reads [head, width] the channels that layer 0 wrote."""
    channels = torch.zeros(HEAD_SIZE, WIDTH)
    channels[:, target] = torch.eye(HEAD_SIZE)
    return channels


def rows(head: int) -> slice:
    """The rows of a head in a projection (or its columns in the output projection)."""
    return slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
