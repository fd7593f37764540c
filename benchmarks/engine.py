"""Tokens per second of the embedded engine beside transformers' `generate`, with dynamic and with
static cache.

All makers get the same models, prompts, output lengths and threads, and take turns in one process.
Prompts are distinct and random, so that the prefix cache has nothing to win. In the mixed workload
prompts and outputs differ in length: `generate` gets one left-padded batch, has to run every row to
the longest output, and only the tokens that were asked for count; the engine keeps as many requests
open as the batch has rows. In the uniform workload all prompts and outputs have the same length, so
that `generate` wastes nothing. CPU seconds are those of the whole process.

    python benchmarks/engine.py [--threads 1] [--repeats 5] [--quick]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentlightning.engine.engine import Engine, GenerationRequest

RESULTS = Path(__file__).parent / "results" / "engine.json"
VOCABULARY = 704
SIZES = {
    "0.5M": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4},
    "2M": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8},
}


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens to sample after each."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.outputs)


def make_model(size: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SIZES[size]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        head_dim=32,
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    return Qwen3ForCausalLM(config).eval()


def make_workload(batch: int, *, mixed: bool) -> Workload:
    rng = random.Random(batch)
    prompts = [
        [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(40, 120) if mixed else 80)]
        for _ in range(batch)
    ]
    return Workload(prompts, [rng.randint(8, 88) if mixed else 48 for _ in range(batch)])


class EngineMaker:
    """The embedded engine; sampling at temperature 1, ids and logprobs delivered."""

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        self._engine = Engine(model, eos_token_ids=[], max_sequence_length=224, slots=batch)

    def run(self, workload: Workload) -> None:
        outputs: list[list[object]] = []
        for prompt, length in zip(workload.prompts, workload.outputs, strict=True):
            outputs.append([])
            self._engine.submit(
                GenerationRequest(prompt, max_tokens=length), outputs[-1].append, print
            )
        while self._engine.step():
            pass
        assert [len(output) for output in outputs] == workload.outputs
        # The next repeat must find nothing of this one's prompts.
        self._engine.update_weights(0)


class GenerateMaker:
    """`model.generate` on one left-padded batch; sampling at temperature 1, logprobs gathered from
    its logits."""

    def __init__(self, model: PreTrainedModel, cache: str) -> None:
        self._model = model
        self._options = (
            {}
            if cache == "dynamic"
            else {"cache_implementation": "static", "disable_compile": True}
        )

    def run(self, workload: Workload) -> None:
        longest = max(len(prompt) for prompt in workload.prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
        )
        steps = max(workload.outputs)
        result = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=steps,
            max_new_tokens=steps,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
            **self._options,
        )
        new = result.sequences[:, longest:]
        torch.stack(result.logits, 1).log_softmax(-1).gather(2, new[..., None])


def measure(size: str, batch: int, *, mixed: bool, repeats: int) -> list[dict[str, object]]:
    model = make_model(size)
    workload = make_workload(batch, mixed=mixed)
    makers = {
        "engine": EngineMaker(model, batch),
        "generate, dynamic cache": GenerateMaker(model, "dynamic"),
        "generate, static cache": GenerateMaker(model, "static"),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for repeat in range(repeats + 1):
        for name, maker in makers.items():
            wall, cpu = time.perf_counter(), time.process_time()
            maker.run(workload)
            if repeat > 0:  # the first round warms up
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    rows: list[dict[str, object]] = []
    ours = [statistics.median(column) for column in zip(*seconds["engine"], strict=True)]
    for name, times in seconds.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append(
            {
                "model": size,
                "batch": batch,
                "lengths": "mixed" if mixed else "uniform",
                "maker": name,
                "tokens_per_second_wall": round(workload.tokens / wall),
                "tokens_per_cpu_second": round(workload.tokens / cpu),
                "engine_ratio_wall": round(wall / ours[0], 2),
                "engine_ratio_cpu": round(cpu / ours[1], 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the 0.5M model with mixed lengths only; writes no file",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    rows: list[dict[str, object]] = []
    print(
        f"{'model':6}{'batch':>6}  {'lengths':9}{'maker':26}{'tok/s wall':>11}{'tok/s CPU':>11}"
        f"{'ratio wall':>12}{'ratio CPU':>11}"
    )
    for size in ["0.5M"] if arguments.quick else SIZES:
        for mixed in [True] if arguments.quick else [True, False]:
            for batch in (16, 128):
                for row in measure(size, batch, mixed=mixed, repeats=arguments.repeats):
                    rows.append(row)
                    print(
                        f"{row['model']:6}{row['batch']:>6}  "
                        f"{row['lengths']:9}{row['maker']:26}{row['tokens_per_second_wall']:>11}{row['tokens_per_cpu_second']:>11}{row['engine_ratio_wall']:>12}{row['engine_ratio_cpu']:>11}",
                        flush=True,
                    )
    if arguments.quick:
        return
    setting = {
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "statistic": "median",
        "dtype": "float32",
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
