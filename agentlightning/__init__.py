"""Agent Lightning: train any AI agent with reinforcement learning, without changing the agent.

    import agentlightning as agl

Every public name is here and is loaded when it is first used, so that importing the package costs neither torch, nor a
web framework, nor a database.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning import rewards as rewards
    from agentlightning.algorithm import APO as APO
    from agentlightning.algorithm import CISPO as CISPO
    from agentlightning.algorithm import DAPO as DAPO
    from agentlightning.algorithm import GEPA as GEPA
    from agentlightning.algorithm import GRPO as GRPO
    from agentlightning.algorithm import GSPO as GSPO
    from agentlightning.algorithm import PPO as PPO
    from agentlightning.algorithm import RLOO as RLOO
    from agentlightning.algorithm import SFT as SFT
    from agentlightning.algorithm import Baseline as Baseline
    from agentlightning.algorithm import DrGRPO as DrGRPO
    from agentlightning.algorithm import REINFORCEPlusPlus as REINFORCEPlusPlus
    from agentlightning.algorithm import REINFORCEPlusPlusBaseline as REINFORCEPlusPlusBaseline
    from agentlightning.algorithm import algo as algo
    from agentlightning.data.rewards import RewardSpec as RewardSpec
    from agentlightning.display import LiveProgress as LiveProgress
    from agentlightning.learner.base import AdamW as AdamW
    from agentlightning.learner.base import LoRA as LoRA
    from agentlightning.runner.agent import LitAgent as LitAgent
    from agentlightning.runner.agent import RolloutRawResult as RolloutRawResult
    from agentlightning.runner.agent import llm_rollout as llm_rollout
    from agentlightning.runner.agent import prompt_rollout as prompt_rollout
    from agentlightning.runner.agent import rollout as rollout
    from agentlightning.runner.clients import openai_client as openai_client
    from agentlightning.runner.command import CommandOutput as CommandOutput
    from agentlightning.runner.command import command as command
    from agentlightning.runner.hooks import Hook as Hook
    from agentlightning.runner.runner import Runner as Runner
    from agentlightning.store.base import LightningStore as LightningStore
    from agentlightning.store.client import LightningStoreClient as LightningStoreClient
    from agentlightning.store.sql import SqlStore as SqlStore
    from agentlightning.tracing.emit import emit_annotation as emit_annotation
    from agentlightning.tracing.emit import emit_exception as emit_exception
    from agentlightning.tracing.emit import emit_message as emit_message
    from agentlightning.tracing.emit import emit_object as emit_object
    from agentlightning.tracing.emit import emit_reward as emit_reward
    from agentlightning.tracing.emit import get_message_value as get_message_value
    from agentlightning.tracing.emit import get_object_value as get_object_value
    from agentlightning.tracing.emit import reward as reward
    from agentlightning.tracing.instrument import instrument as instrument
    from agentlightning.tracing.links import extract_links_from_attributes as extract_links_from_attributes
    from agentlightning.tracing.links import extract_tags_from_attributes as extract_tags_from_attributes
    from agentlightning.tracing.links import make_link_attributes as make_link_attributes
    from agentlightning.tracing.links import make_tag_attributes as make_tag_attributes
    from agentlightning.tracing.links import query_linked_spans as query_linked_spans
    from agentlightning.tracing.operation import operation as operation
    from agentlightning.tracing.rewards import find_final_reward as find_final_reward
    from agentlightning.tracing.rewards import find_reward_spans as find_reward_spans
    from agentlightning.tracing.rewards import get_reward_value as get_reward_value
    from agentlightning.tracing.rewards import get_rewards_from_span as get_rewards_from_span
    from agentlightning.tracing.rewards import is_reward_span as is_reward_span
    from agentlightning.trainer import Trainer as Trainer
    from agentlightning.types import LLM as LLM
    from agentlightning.types import And as And
    from agentlightning.types import Attempt as Attempt
    from agentlightning.types import AttemptedRollout as AttemptedRollout
    from agentlightning.types import Condition as Condition
    from agentlightning.types import EnqueueRolloutRequest as EnqueueRolloutRequest
    from agentlightning.types import FrozenModel as FrozenModel
    from agentlightning.types import NamedResources as NamedResources
    from agentlightning.types import Not as Not
    from agentlightning.types import Or as Or
    from agentlightning.types import Order as Order
    from agentlightning.types import PromptTemplate as PromptTemplate
    from agentlightning.types import Rollout as Rollout
    from agentlightning.types import RolloutConfig as RolloutConfig
    from agentlightning.types import Span as Span
    from agentlightning.types import Triplet as Triplet

__version__ = "0.1.0"

_HOMES = {
    "agentlightning.algorithm": (
        "APO",
        "Baseline",
        "CISPO",
        "DAPO",
        "DrGRPO",
        "GEPA",
        "GRPO",
        "GSPO",
        "PPO",
        "REINFORCEPlusPlus",
        "REINFORCEPlusPlusBaseline",
        "RLOO",
        "SFT",
        "algo",
    ),
    "agentlightning.display": ("LiveProgress",),
    "agentlightning.data.rewards": ("RewardSpec",),
    "agentlightning.learner.base": ("AdamW", "LoRA"),
    "agentlightning.runner.agent": ("LitAgent", "RolloutRawResult", "llm_rollout", "prompt_rollout", "rollout"),
    "agentlightning.runner.clients": ("openai_client",),
    "agentlightning.runner.command": ("CommandOutput", "command"),
    "agentlightning.runner.hooks": ("Hook",),
    "agentlightning.runner.runner": ("Runner",),
    "agentlightning.store.base": ("LightningStore",),
    "agentlightning.store.client": ("LightningStoreClient",),
    "agentlightning.store.sql": ("SqlStore",),
    "agentlightning.tracing.emit": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "get_message_value",
        "get_object_value",
        "reward",
    ),
    "agentlightning.tracing.links": (
        "extract_links_from_attributes",
        "extract_tags_from_attributes",
        "make_link_attributes",
        "make_tag_attributes",
        "query_linked_spans",
    ),
    "agentlightning.tracing.instrument": ("instrument",),
    "agentlightning.tracing.operation": ("operation",),
    "agentlightning.tracing.rewards": (
        "find_final_reward",
        "find_reward_spans",
        "get_reward_value",
        "get_rewards_from_span",
        "is_reward_span",
    ),
    "agentlightning.trainer": ("Trainer",),
    "agentlightning.types": (
        "LLM",
        "And",
        "Attempt",
        "AttemptedRollout",
        "Condition",
        "EnqueueRolloutRequest",
        "FrozenModel",
        "NamedResources",
        "Not",
        "Or",
        "Order",
        "PromptTemplate",
        "Rollout",
        "RolloutConfig",
        "Span",
        "Triplet",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "rewards":
        return importlib.import_module("agentlightning.rewards")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        value = _of_0_3(name)
    globals()[name] = value
    return value


def _of_0_3(name: str) -> Any:
    """What serves for a name of Agent Lightning 0.3; ConfigError says what to use instead, where nothing does."""
    if not name.startswith("_"):  # tools ask every module for names with underscores
        with contextlib.suppress(AttributeError):
            return importlib.import_module("agentlightning.compatibility").find(name)
    raise AttributeError(f"module 'agentlightning' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def clash_with_namesake() -> str | None:
    """What to do when Microsoft's `agentlightning` distribution is installed beside this one, else None.

    Both install a package of this name into one folder, so whichever was installed last has overwritten parts of the
    other. The folders on the path are listed here because `importlib.metadata` would be most of the package's import
    time."""
    ours, other = _installed("agent_lightning_next-"), _installed("agentlightning-")
    if ours is None or other is None:
        return None
    return (
        f"two distributions provide the package 'agentlightning' here: agent-lightning-next {ours} and Microsoft's "
        f"agentlightning {other}; they overwrite each other's files. Keep one: "
        "pip uninstall -y agentlightning agent-lightning-next && pip install agent-lightning-next"
    )


def _installed(prefix: str) -> str | None:
    """The version in the name of the `<prefix><version>.dist-info` folder on the path, if there is one."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue  # an entry of the path need not exist, nor be a folder
        for name in names:
            if name.startswith(prefix) and name.endswith(".dist-info"):
                return name.removeprefix(prefix).removesuffix(".dist-info")
    return None


if (_clash := clash_with_namesake()) is not None:
    warnings.warn(_clash, RuntimeWarning, stacklevel=2)
