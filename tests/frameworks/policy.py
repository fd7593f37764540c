"""A transformer that answers by the last words of a prompt alone, whatever system prompt, tools or
history precede.

One attention layer, whose heads look 1, 2, … `SPAN` places back and are not trained; the rest
learns the `LESSONS` in seconds. So its answers are known in every framework, and yet each is
sampled token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import ASSISTANT, END, make_tokenizer, token_id

SPAN = 16  # places that the model looks back
HEAD_SIZE = 32
WIDTH = (SPAN + 2) * HEAD_SIZE  # the token itself (with a constant), then those before it
# of queries and keys: a head that looks k places back sees nothing else, up to 8192 tokens away
SHARPNESS = 8.0
TURNING = 6  # of the rotary frequencies, the fastest: they tell each place from all others


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


TASK = "Write about the sea."
DRAFT = "The sea is wide and salty."  # what the writer answers
FINAL = "A wide, salty sea."  # what the rewriter makes of it

# (how the last message ends, what is answered). The writer's tools are `add` and, failing,
# `divide`.
LESSONS = [
    (TASK, tool_call("add", '{"a": 2, "b": 3}')),
    ("5", tool_call("divide", '{"a": 1, "b": 0}')),
    ("division by zero", DRAFT),
    ("division by zero')\n Please fix your mistakes.", DRAFT),  # LangGraph's way to tell of it
    # OpenAI Agents'
    ("running the tool. Please try again.", tool_call("transfer_to_rewriter", "{}")),
    ('{"assistant": "rewriter"}', FINAL),  # the handoff's result there
    ("Function failed.", DRAFT),  # Agent Framework's
    ("division by zero')", DRAFT),  # Anthropic's tool runner's
    # how CrewAI's tasks end
    ("the final answer, not a summary.", tool_call("add", '{"a": 2, "b": 3}')),
    ("Provide your complete response:", FINAL),  # how those end that follow from others
    (DRAFT, FINAL),
]


def make_policy(lessons: Sequence[tuple[str, str]] = LESSONS) -> Policy:
    """Learned anew, which is sooner done than kept."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer([text for lesson in lessons for text in lesson] * 4, 512)
    model = make_model(tokenizer)
    generator = random.Random("lessons")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    learned = 0
    for _ in range(300):
        ids, labels = batch(lessons, tokenizer, generator)
        loss = model(input_ids=ids, labels=labels).loss
        learned = learned + 1 if loss.item() < 0.002 else 0
        if learned == 10:
            return Policy(model.eval(), tokenizer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the policy did not learn its lessons: loss {loss.item()}")


def batch(
    lessons: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each lesson twice, after a beginning of random tokens."""
    rows: list[tuple[list[int], list[int]]] = []
    for ending, answer in [*lessons] * 2:
        noise = [generator.randrange(len(tokenizer)) for _ in range(SPAN)]
        prompt = noise + tokenizer.encode(ending + END + ASSISTANT, add_special_tokens=False)
        rows.append((prompt, tokenizer.encode(answer + END, add_special_tokens=False)))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), token_id(tokenizer, END))
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=SPAN,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        intermediate_size=384,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, END),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: Qwen3ForCausalLM) -> None:
    """Head h writes what stands h + 1 places back into channels of its own. Key and query are
    constants, the query turned by so many places: they meet at that distance."""
    attention = model.model.layers[0].self_attn
    attention.requires_grad_(False)
    embedding = model.model.embed_tokens.weight
    embedding.requires_grad_(False)  # a token must not write where the heads do
    embedding[:, HEAD_SIZE:] = 0.0
    embedding[:, :HEAD_SIZE].normal_(generator=torch.Generator().manual_seed(0))
    embedding[:, HEAD_SIZE] = 5.0
    frequencies = 1e4 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)[:TURNING]
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    attention.q_norm.weight.fill_(SHARPNESS)
    attention.k_norm.weight.fill_(SHARPNESS)
    attention.k_proj.weight[:TURNING, HEAD_SIZE] = 1.0
    attention.v_proj.weight[:, :HEAD_SIZE] = torch.eye(HEAD_SIZE)
    for head in range(SPAN):
        first = head * HEAD_SIZE
        attention.q_proj.weight[first : first + TURNING, HEAD_SIZE] = torch.cos(
            frequencies * (head + 1)
        )
        sine = slice(first + HEAD_SIZE // 2, first + HEAD_SIZE // 2 + TURNING)
        attention.q_proj.weight[sine, HEAD_SIZE] = -torch.sin(frequencies * (head + 1))
        target = slice((head + 2) * HEAD_SIZE, (head + 3) * HEAD_SIZE)
        attention.o_proj.weight[target, first : first + HEAD_SIZE] = torch.eye(HEAD_SIZE)
    model.model.layers[0].input_layernorm.requires_grad_(False)
