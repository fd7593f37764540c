"""The weights a tiny policy begins with: random, but for a circuit that copies and a head that reads the request.

Knows the layout of a Qwen3 model with 128 channels and heads of 32. Does not know tokens beyond the id of `<|user|>`.

Copying (names, numbers, tool results) is what a tiny model learns slowest, so it begins with the circuit for it. The
residual stream is divided: channel 0 is a constant, 1..63 say which token this is, 64..95 which token came before,
96..127 the one before that. Layer 0 fills the last two by attending one and two places back. Layer 1 looks for places
whose predecessors match what is being read now, and copies what stands there:

    … from: Oslo …  "from": "  →  Oslo     (the same word two places back, whatever the separator)

A third head of layer 1 always looks at the first word after `<|user|>`, so that what was asked is known at every
token. Everything stays trainable.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

WIDTH, HEAD_SIZE = 128, 32
ROTARY_BASE = 1e6
CONSTANT = 0
IDENTITY = slice(1, 64)
BEFORE = slice(64, 96)
BEFORE_THAT = slice(96, 128)

EMBEDDING_SCALE = 0.2  # larger weights move relatively less in a step of AdamW: policies then survive its first steps
SHARPNESS = 2.2  # of the query and key norms: an attention score is at most about 27
COPY_STRENGTH = 6.0  # of what is copied, beside the embedding of the token that is being read
REQUEST_STRENGTH = 1.0  # of what the request's first word adds

# One rotary frequency per pair of rows (i, i + 16) of a head. The fast ones tell neighbouring places apart; the slow
# ones hardly turn over a conversation, so that tokens can be compared however far apart they are.
FREQUENCIES = ROTARY_BASE ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
FAST = torch.arange(3)
SLOW = torch.nonzero(FREQUENCIES < 0.03).flatten()
COMPARED = torch.cat([SLOW, SLOW + HEAD_SIZE // 2])


@torch.no_grad()
def initialise(model: Qwen3ForCausalLM, *, user_id: int, seed: int) -> None:
    """Set every weight of `model` from `seed`; torch's global generator is not used."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (cast(Qwen3Attention, model.model.layers[index].self_attn) for index in (0, 1))
    embedding = model.model.embed_tokens.weight
    randomise(model, generator)
    divide_embedding(embedding, generator)
    for attention in (first, second):
        attention.q_norm.weight.fill_(SHARPNESS)
        attention.k_norm.weight.fill_(SHARPNESS)
    view = identity_view(generator)
    look_back(first, view)
    match_and_copy(second, view, generator)
    look_at_request(second, view @ embedding[user_id], generator)


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Normal weights, scaled so that what a layer adds begins small beside what it reads."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        scale = 1 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= 0.3 * EMBEDDING_SCALE
        parameter.normal_(0.0, scale, generator=generator)


def divide_embedding(embedding: torch.Tensor, generator: torch.Generator) -> None:
    """Token embeddings [V, width]: a constant, an identity, and next to nothing where layer 0 is going to write."""
    embedding.normal_(0.0, EMBEDDING_SCALE / 10, generator=generator)
    embedding[:, IDENTITY].normal_(0.0, EMBEDDING_SCALE, generator=generator)
    embedding[:, CONSTANT] = 3 * EMBEDDING_SCALE


def identity_view(generator: torch.Generator) -> torch.Tensor:
    """A random view [head, width] of a token's identity, with orthonormal rows."""
    channels = IDENTITY.stop - IDENTITY.start
    view = torch.zeros(HEAD_SIZE, WIDTH)
    view[:, IDENTITY] = torch.linalg.qr(torch.randn(channels, HEAD_SIZE, generator=generator))[0].T
    return view


def look_back(attention: Qwen3Attention, view: torch.Tensor) -> None:
    """Layer 0, heads 0 and 1: write a view of the last token, and of the one before it, into their channels.

    A constant key and a constant query that is turned by `offset` places meet where the distance is `offset`."""
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


def match_and_copy(attention: Qwen3Attention, view: torch.Tensor, generator: torch.Generator) -> None:
    """Layer 1, heads 0 and 2: attend where the token before is this one, and where the token before that is the last
    one; copy a view of what stands there."""
    for group, reads, target in ((0, view, BEFORE), (1, channels_of(BEFORE), BEFORE_THAT)):
        query, key = torch.zeros(HEAD_SIZE, WIDTH), torch.zeros(HEAD_SIZE, WIDTH)
        query[COMPARED], key[COMPARED] = reads[COMPARED], channels_of(target)[COMPARED]
        attention.q_proj.weight[rows(2 * group)] = query
        attention.k_proj.weight[rows(group)] = key
        copied = identity_view(generator)
        attention.v_proj.weight[rows(group)] = copied
        attention.o_proj.weight[:, rows(2 * group)] = copied.T * COPY_STRENGTH * EMBEDDING_SCALE


def look_at_request(attention: Qwen3Attention, user: torch.Tensor, generator: torch.Generator) -> None:
    """Layer 1, head 1: attend where the token before is `<|user|>` (its view [head]) and add a random image of what
    stands there, for the layers above to make sense of. It shares its keys with head 0."""
    query = torch.zeros(HEAD_SIZE, WIDTH)
    query[COMPARED, CONSTANT] = user[COMPARED]
    attention.q_proj.weight[rows(1)] = query
    scale = REQUEST_STRENGTH * EMBEDDING_SCALE / math.sqrt(HEAD_SIZE)
    attention.o_proj.weight[:, rows(1)].normal_(0.0, scale, generator=generator)


def channels_of(target: slice) -> torch.Tensor:
    """What reads [head, width] the channels that layer 0 wrote."""
    channels = torch.zeros(HEAD_SIZE, WIDTH)
    channels[:, target] = torch.eye(HEAD_SIZE)
    return channels


def rows(head: int) -> slice:
    """The rows of a head in a projection (or its columns in the output projection)."""
    return slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
