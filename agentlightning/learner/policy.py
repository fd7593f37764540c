"""A policy: a causal language model of `transformers` with its tokenizer, loaded from a path or a
hub name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from warnings import catch_warnings, simplefilter

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from agentlightning.data.references import is_reference, load_reference
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.datasets.hub import check_model_path, fetched_model, reachable_model
from agentlightning.errors import ConfigError
from agentlightning.learner.policy_config import DType, LoRA

if TYPE_CHECKING:
    from agentlightning.learner.lora import Adapter

ADAPTER_CONFIG = "adapter_config.json"  # `peft`'s name


@dataclass(frozen=True)
class Policy:
    """The model and tokenizer that are trained and served together; with an `adapter`, only that is
    trained."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: Adapter | None = None

    @property
    def token_bytes(self) -> TokenBytes | None:
        """The texts of its tokens; None if the tokenizer does not provide them."""
        tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
        return TokenBytes(tokenizer) if isinstance(tokenizer, Tokenizer) else None

    def save(self, directory: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write a directory that `AutoModelForCausalLM` and `AutoTokenizer` load with
        `from_pretrained`; with an adapter, only what `peft` needs. `weights` are by name; default:
        the model's own."""
        disable_progress_bar()  # a progress bar per checkpoint would break the job's display
        with written():
            if self.adapter is not None:
                self.adapter.save(directory)
            else:
                self.model.save_pretrained(directory, state_dict=weights)
            self.tokenizer.save_pretrained(directory)


@contextmanager
def written() -> Generator[None]:
    """OSError if a library reports a full disk with another exception."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(str(error)) from error


def choose_device(device: str | None = None) -> str:
    """The given device, else `cuda` if available, else `cpu`. MPS only on request: its float32
    kernels differ more. ConfigError for a device that torch cannot use here."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # what torch raises for a device it was built without
        here = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()]
        why = f"torch {torch.__version__} finds {' and '.join(here) or 'no GPU'} on this machine"
        raise ConfigError(
            f"device {device!r} cannot be used: {why}; choose {', '.join(['cpu', *here])}"
        ) from None
    return device


def open_policy(
    source: str | Path | Policy,
    *,
    seed: int,
    device: str | None = None,
    dtype: DType | None = None,
    lora: LoRA | None = None,
) -> Policy:
    """The policy of `source`: itself, a model to load (`load_policy`), or the result of a function
    named `file.py:function`, called with the seed. `dtype` is that of its weights (default:
    unchanged; float32 if loaded); `lora` adds an adapter to train. It is moved to `device`
    (default: as in `load_policy`, but a given Policy stays).

    ConfigError as in `load_policy`, or if the function is missing or returns no Policy."""
    if isinstance(source, Policy):
        policy = source
        if device is not None:
            _move(policy, device)
    elif is_reference(str(source := fetched_model(source))):
        make = load_reference(str(source))
        try:
            inspect.signature(make).bind(seed)
        except TypeError as error:
            raise ConfigError(
                f"{source} must be a function that takes a seed and returns a Policy: {error}"
            ) from None
        policy = make(seed)
        if not isinstance(policy, Policy):
            raise ConfigError(f"{source} made a {type(policy).__name__}; it must return a Policy")
        _move(policy, device)
    else:
        policy = load_policy(source, device=device, dtype=dtype or "float32")
    if dtype is not None:
        # not buffers: rotary angles need full precision
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    if lora is None or policy.adapter is not None:
        return policy
    from agentlightning.learner.lora import Adapter  # peft takes a second to import

    return replace(policy, adapter=Adapter(policy.model, lora, seed=seed))


def _move(policy: Policy, device: str | None) -> None:
    device = choose_device(device)
    for model in (policy.model, *(() if policy.adapter is None else (policy.adapter.merged,))):
        cast(Any, model).to(device)


def load_policy(source: str | Path, *, device: str | None = None, dtype: str = "float32") -> Policy:
    """Load a policy from a directory or a Hugging Face id; an adapter in `peft`'s format is merged
    into its model.

    Weights are float32 on every device unless `dtype` is given. ConfigError for a problem with
    path, model or device."""
    device = choose_device(device)
    tokenizer = load_tokenizer(source)
    with _resolved_source(source) as place:
        model = _load_model(place, getattr(torch, dtype))
    return Policy(cast(Any, model).to(device), tokenizer)


def empty_policy(source: str | Path, *, dtype: str = "float32") -> Policy:
    """Like `load_policy`, with an `empty_model`."""
    return Policy(empty_model(source, dtype=dtype), load_tokenizer(source))


def saved_weights(directory: Path) -> dict[str, Tensor]:
    """The weights that `Policy.save` wrote for a model without an adapter, by name. OSError or
    SafetensorError."""
    files = sorted(directory.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def weight_names(directory: Path) -> set[str]:
    """The names of what `saved_weights` reads, without reading it."""
    names: set[str] = set()
    for file in directory.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as saved:
            names.update(saved.keys())
    return names


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or a Hugging Face id. ConfigError if it cannot be loaded or has
    no chat template."""
    with _resolved_source(source) as place:
        tokenizer = AutoTokenizer.from_pretrained(place)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {str(source)!r} has no chat template; choose an instruction-tuned "
            "model, or set one with tokenizer.chat_template = … and save_pretrained"
        )
    return tokenizer


def empty_model(source: str | Path, *, dtype: str = "float32") -> PreTrainedModel:
    """Like the model of `load_policy`, with shapes but without values: it takes no memory."""
    with _resolved_source(source) as place, torch.device("meta"):
        config = AutoConfig.from_pretrained(place)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def _load_model(source: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    arguments: dict[str, Any] = {"dtype": dtype}
    if not isinstance(source, Path) or not (source / ADAPTER_CONFIG).is_file():
        return AutoModelForCausalLM.from_pretrained(source, **arguments)
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(source)).base_model_name_or_path
    if not base:
        raise ConfigError(
            f"{source} holds an adapter of a model that a function made: load it with peft, on "
            "what the function makes"
        )
    # `peft`'s own loader would cut the model to the tokenizer's size.
    with catch_warnings():
        simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
        wrapped: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, **arguments), str(source)
        )
    return wrapped.merge_and_unload()


@contextmanager
def _resolved_source(source: str | Path) -> Generator[str | Path]:
    """The directory or hub id for transformers to load; its errors become ConfigErrors."""
    path = Path(source)
    if "://" in str(source):
        raise ConfigError(
            f"{source} is the URL of an endpoint, which has no weights; give a path or a hub id"
        )
    if path.exists() and not any(
        (path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)
    ):
        raise ConfigError(
            f"{path} holds no model: config.json is missing. Give a directory written by "
            "save_pretrained, such as a checkpoint of a run, or path/to/file.py:function, which "
            "makes one"
        )
    check_model_path(source)
    try:
        yield path if path.exists() else reachable_model(str(source))
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot load model {str(source)!r}: {reason}. Give a directory written by "
            "save_pretrained, or the id of a causal language model on the Hugging Face hub "
            "(which must be reachable, or in its local cache)"
        ) from None
