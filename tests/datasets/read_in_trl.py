"""Run by the Python of .venv-trl: TRL reads exported files as docs/fine-tuning.md shows, and makes
one step on each.

    python read_in_trl.py MODEL FOLDER

FOLDER has sft.jsonl and transitions.parquet. Prints, for each, the text that TRL made of the first
row, what of it is trained, and the loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Json, List, load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


def conversations(path: Path) -> Dataset:
    features = Features({"messages": List(Json()), "tools": List(Json())})
    return load_dataset("json", data_files=str(path), features=features, split="train")


def tokens(path: Path) -> Dataset:
    rows = load_dataset("parquet", data_files=str(path), split="train").filter(
        lambda row: row["trained"]
    )
    return rows.map(
        lambda row: {
            "input_ids": row["prompt_ids"] + row["response_ids"],
            "completion_mask": [0] * len(row["prompt_ids"]) + [1] * len(row["response_ids"]),
        },
        remove_columns=rows.column_names,
    )


def one_step(model: str, dataset: Dataset, folder: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=1,
        per_device_train_batch_size=2,
        max_length=None,
        use_cpu=True,
        bf16=False,
        completion_only_loss="completion_mask" in dataset.column_names,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    loss = trainer.train().training_loss
    row = next(iter(trainer.train_dataset))
    labels = row.get("labels") or row["input_ids"]
    trained = [label for label in labels if label != -100]
    return {
        "loss": loss,
        "text": tokenizer.decode(row["input_ids"]),
        "trained": tokenizer.decode(trained),
    }


def main(model: str, folder: Path) -> None:
    read = {
        "sft": conversations(folder / "sft.jsonl"),
        "parquet": tokens(folder / "transitions.parquet"),
    }
    print(json.dumps({name: one_step(model, dataset, folder) for name, dataset in read.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
