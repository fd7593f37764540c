"""Records the gradients of TRL's GRPOTrainer on a tiny Qwen3 model, for `tests/learner/test_trl.py`
to compare with.

    make .venv-trl/.setup
    .venv-trl/bin/python scripts/record_trl_gradients.py tests/oracles/trl_gradients.json

TRL trains as its users let it: a rollout function gives it two groups of four rollouts, some of two
turns with an observation between them, and it makes two steps of plain SGD on them. In the second
the weights have moved, so that ratios are clipped and the KL is not 0. The gradient of each step is
what the optimiser is about to apply."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl  # type: ignore
from datasets import Dataset  # type: ignore
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

VOCABULARY, GROUP_SIZE, MAX_LENGTH, TEMPERATURE = 24, 4, 16, 0.9
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
REWARDS = [1.0, 0.0, 0.25, 0.5, 0.0, 0.7, 0.7, -1.0]
# How far a step goes: far enough that many a ratio leaves the clip range, not so far that k3 passes
# 10, where it is cut here.
LEARNING_RATE = 1.0
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "gradient_accumulation_steps": 2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05},
    "kl": {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
}


def make_rollouts() -> list[dict[str, list[int]]]:
    """A row of ids each: the prompt, what follows it, and which of that was sampled."""
    random = np.random.default_rng(0)
    rollouts: list[dict[str, list[int]]] = []
    for group in range(len(REWARDS) // GROUP_SIZE):
        prompt = random.integers(2, VOCABULARY, 3 + 2 * group).tolist()
        for member in range(GROUP_SIZE):
            parts = [(random.integers(2, VOCABULARY, int(random.integers(2, 6))).tolist(), 1)]
            if member % 2:  # a second turn, after an observation
                parts.append(
                    (random.integers(2, VOCABULARY, int(random.integers(2, 5))).tolist(), 0)
                )
                parts.append(
                    (random.integers(2, VOCABULARY, int(random.integers(1, 6))).tolist(), 1)
                )
            ids = [token for part, _ in parts for token in part]
            sampled = [kind for part, kind in parts for _ in part]
            rollouts.append({"prompt": prompt, "completion": ids, "sampled": sampled})
    return rollouts


def make_model(folder: Path) -> dict[str, str]:
    """Write the model and its tokenizer to `folder`; returns its weights, by name."""
    random = np.random.default_rng(1)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = random.normal(
                1.0 if name.endswith("norm.weight") else 0.0, 0.2, parameter.shape
            )
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token="t1"
    ).save_pretrained(folder)
    return {name: packed(parameter) for name, parameter in model.named_parameters()}


def packed(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.detach().numpy().astype("<f4").tobytes()).decode()


class Gradients(TrainerCallback):
    """What the optimiser is about to apply, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, str]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        parameters = given["model"].named_parameters()
        self.steps.append(
            {name: packed(one.grad) for name, one in parameters if one.grad is not None}
        )


def record(
    folder: Path, rollouts: list[dict[str, list[int]]], options: dict[str, Any]
) -> list[dict[str, str]]:
    """The gradients of two steps of TRL on the same rollouts."""

    def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(rollouts)
        order = [
            GROUP_SIZE * int(prompt) + place % GROUP_SIZE for place, prompt in enumerate(prompts)
        ]
        return {
            "prompt_ids": [rollouts[row]["prompt"] for row in order],
            "completion_ids": [rollouts[row]["completion"] for row in order],
            # it computes its own
            "logprobs": [[0.0] * len(rollouts[row]["completion"]) for row in order],
            "env_mask": [rollouts[row]["sampled"] for row in order],
            "row": order,
        }

    def reward(row: list[int], **_: Any) -> list[float]:
        return [REWARDS[index] for index in row]

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accumulated = options.get("gradient_accumulation_steps", 1)
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=len(rollouts) // accumulated,
        num_generations=GROUP_SIZE,
        num_iterations=2,
        max_steps=2,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        max_grad_norm=0.0,  # which switches clipping off
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    gradients = Gradients()
    trainer = trl.GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        rollout_func=play,
        train_dataset=Dataset.from_dict(
            {"prompt": [str(i) for i in range(len(rollouts) // GROUP_SIZE)]}
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        optimizers=(optimizer, schedule),
        callbacks=[gradients],
    )
    trainer.train()
    assert len(gradients.steps) == 2
    return gradients.steps


def main() -> None:
    torch.set_num_threads(1)
    rollouts = make_rollouts()
    with tempfile.TemporaryDirectory() as folder:
        golden = {
            "versions": {
                module.__name__: module.__version__ for module in (trl, transformers, torch)
            },
            "model": MODEL,
            "weights": make_model(Path(folder)),
            "rollouts": rollouts,
            "rewards": REWARDS,
            "group_size": GROUP_SIZE,
            "max_length": MAX_LENGTH,
            "temperature": TEMPERATURE,
            "learning_rate": LEARNING_RATE,
            "gradients": {
                name: record(Path(folder), rollouts, options) for name, options in CASES.items()
            },
        }
    Path(sys.argv[1]).write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main()
