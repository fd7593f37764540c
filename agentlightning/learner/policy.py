"""A policy: a causal language model of `transformers` with its tokenizer, loaded from a path or a hub name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from agentlightning.data.references import is_reference, load_reference
from agentlightning.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    """The model and the tokenizer that are trained and served together."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str = "policy"

    def save(self, directory: Path) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load."""
        disable_progress_bar()  # of transformers: a bar per checkpoint would tear the display of the job
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def choose_device() -> str:
    """`cuda` where there is one, else `cpu`. MPS is taken only when asked for: its float32 kernels differ more."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_policy(source: str | Path, *, seed: int, device: str | None = None) -> Policy:
    """What `load_policy` loads, or what the function that `file.py:function` names makes of the seed.

    ConfigError as of `load_policy`, or where that function cannot be had or makes no policy."""
    if not is_reference(str(source)):
        return load_policy(source, device=device)
    policy = load_reference(str(source))(seed)
    if not isinstance(policy, Policy):
        raise ConfigError(f"{source} made a {type(policy).__name__}; it must return a Policy")
    return policy


def load_policy(source: str | Path, *, device: str | None = None, dtype: str = "float32") -> Policy:
    """Load a policy from a directory or a Hugging Face id.

    Weights are float32 on every device unless `dtype` says otherwise: AdamW's small steps vanish in bfloat16, whose
    numbers have 8 bits. ConfigError names what is wrong with the path, the model or the device."""
    path = Path(source)
    device = device or choose_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device it was built without
        reason = str(error).partition(". ")[0]
        raise ConfigError(f"device {device!r} cannot be used here ({reason}); choose cpu, cuda or mps") from None
    if "://" in str(source):
        raise ConfigError(
            f"{source} is the address of an endpoint, whose answers come without token ids and whose weights cannot be "
            "had from there; give a directory written by save_pretrained, or a Hugging Face id"
        )
    if path.exists() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} holds no model: config.json is missing. Give a directory written by save_pretrained"
            f"{_checkpoints_below(path)}"
        )
    if not path.exists() and (path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1):
        raise ConfigError(f"model path {source} does not exist")
    arguments: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, **arguments)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot load model {str(source)!r}: {reason}. Give a directory written by save_pretrained, or the id of a "
            "causal language model on the Hugging Face hub (which must be reachable, or in its local cache)"
        ) from None
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {str(source)!r} has no chat template; choose an instruction-tuned model, or "
            "set one with tokenizer.chat_template = … and save_pretrained"
        )
    return Policy(cast(Any, model).to(device), tokenizer, name=path.name if path.exists() else str(source))


def _checkpoints_below(path: Path) -> str:
    found = sorted(path.glob("**/config.json"))
    return f", such as {found[-1].parent}" if found else ""
