"""One run of TRL's GRPOTrainer on the travel desk, with TRL's own tool loop and environment;
`benchmarks/rl.py` starts it in .venv-trl. It prints an `Outcome`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flight"))

import _rl_sums as sums
import agent
import tasks
import torch
from _rl_options import Options, Outcome
from datasets import Dataset  # type: ignore
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore

# How an answer of the tiny tokenizer is read; TRL knows those of published models.
RESPONSES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


# The tools as the template lists them, here a part of the system message: TRL has them of Python's
# signatures, where no parameter can be called `from`. Prompts are the same, token for token.
LISTED = "".join(
    f"\n{tool['function']['name']}({', '.join(tool['function']['parameters']['properties'])})"
    for tool in agent.TOOLS
)


class Environment:
    """The travel desk's tools as TRL wants them: `reset` is given a row of the dataset."""

    def reset(self, **row: Any) -> None:
        self._task = json.loads(row["task"])
        self._calls: list[str] = []

    def memory(self, **given: str) -> str:
        """Look up the user's home city and budget.

        Args:
            given: The arguments.
        """
        return self._use("memory", given)

    def search(self, **given: str) -> str:
        """Find the best flight within a budget.

        Args:
            given: The arguments.
        """
        return self._use("search", given)

    def calculator(self, **given: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            given: The arguments.
        """
        return self._use("calculator", given)

    def _use(self, name: str, arguments: dict[str, Any]) -> str:
        self._calls.append(name)
        return agent.use_tool(self._task, name, json.dumps(arguments))

    def _grade(self, last: dict[str, Any]) -> float:
        if last["role"] != "assistant" or last.get("tool_calls"):
            return 0.0
        return agent.grade(self._task, last["content"], self._calls)


def reward(
    completions: list[list[dict[str, Any]]], environments: list[Environment], **_: Any
) -> list[float]:
    return [
        one._grade(messages[-1]) for messages, one in zip(completions, environments, strict=True)
    ]


def reward_of_sums(
    completions: list[list[dict[str, Any]]], answer: list[str], **_: Any
) -> list[float]:
    return [
        sums.grade({"answer": right}, messages[-1]["content"])
        for messages, right in zip(completions, answer, strict=True)
    ]


class Trainer(GRPOTrainer):
    """Measures how long the rollouts of training take; changes nothing."""

    sample_seconds = 0.0
    computed = 0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self.sample_seconds += time.perf_counter() - started
            self.computed += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        return inputs


class Clock(TrainerCallback):
    """The seconds of the steps, and the held-out rewards between them."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts = rollouts
        self.outcome = Outcome()
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.outcome.train_seconds += time.perf_counter() - self._started
        self.outcome.rollouts += self.rollouts

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        logs = logs or {}
        if "eval_reward" in logs:
            self.outcome.curve.append(
                (state.global_step, self.outcome.train_seconds, float(logs["eval_reward"]))
            )
        elif "completions/mean_length" in logs:
            self.outcome.generated += self.rollouts * float(logs["completions/mean_length"])


def dataset(some: list[dict[str, Any]]) -> Any:
    def opening(task: dict[str, Any]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": agent.SYSTEM + LISTED},
            {"role": "user", "content": task["question"]},
        ]

    return Dataset.from_list([{"prompt": opening(task), "task": json.dumps(task)} for task in some])


def task_of(options: Options) -> dict[str, Any]:
    """What differs between the tasks."""
    if options.sums:
        rows = {
            name: [task | {"prompt": sums.opening(task)} for task in sums.read(options.sums, name)]
            for name in ("train", "heldout")
        }
        return {
            "train_dataset": Dataset.from_list(rows["train"]),
            "eval_dataset": Dataset.from_list(rows["heldout"]),
            "reward_funcs": reward_of_sums,
        }
    return {
        "train_dataset": dataset(
            tasks.train_tasks(options.steps * options.tasks_per_step, options.seed)
        ),
        "eval_dataset": dataset(tasks.heldout_tasks(options.heldout)),
        "environment_factory": Environment,
        "reward_funcs": reward,
    }


def main() -> None:
    options = Options.parse(sys.argv[1])
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(options.start)
    tokenizer.response_template = RESPONSES
    tokenizer.chat_template = tokenizer.chat_template.replace("in tools or []", "in []")
    rollouts = options.tasks_per_step * options.group_size
    clock = Clock(rollouts)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32),
        processing_class=tokenizer,
        **task_of(options),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=options.directory,
            loss_type="bnpo",  # the mean over the tokens of the batch, as here
            per_device_train_batch_size=rollouts,
            per_device_eval_batch_size=rollouts,
            num_generations=options.group_size,
            num_generations_eval=1,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_completion_length=options.conversation_tokens,
            max_tool_calling_iterations=None if options.sums else agent.MAX_TURNS - 1,
            generation_kwargs={"max_new_tokens": options.call_tokens},
            eval_strategy="steps",
            eval_steps=options.evaluate_every,
            eval_on_start=True,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=options.seed,
        ),
    )
    trainer.train()
    outcome = clock.outcome
    outcome.whole_seconds = time.perf_counter() - started
    outcome.cpu_seconds = time.process_time()
    outcome.sample_seconds = trainer.sample_seconds
    outcome.learn_seconds = outcome.train_seconds - trainer.sample_seconds
    outcome.computed = trainer.computed
    outcome.trained = outcome.generated
    outcome.tell()


if __name__ == "__main__":
    main()
