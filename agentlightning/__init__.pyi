"""The public names, each with its home: what type checkers read, and what `__getattr__` of
`__init__.py` loads."""

from typing import Any

from agentlightning import environments as environments
from agentlightning import errors as errors
from agentlightning import rewards as rewards
from agentlightning.algorithm import APO as APO
from agentlightning.algorithm import CISPO as CISPO
from agentlightning.algorithm import DAPO as DAPO
from agentlightning.algorithm import GEPA as GEPA
from agentlightning.algorithm import GRPO as GRPO
from agentlightning.algorithm import GSPO as GSPO
from agentlightning.algorithm import OPD as OPD
from agentlightning.algorithm import PPO as PPO
from agentlightning.algorithm import RLOO as RLOO
from agentlightning.algorithm import SFT as SFT
from agentlightning.algorithm import Baseline as Baseline
from agentlightning.algorithm import Budget as Budget
from agentlightning.algorithm import DrGRPO as DrGRPO
from agentlightning.algorithm import REINFORCEPlusPlus as REINFORCEPlusPlus
from agentlightning.algorithm import REINFORCEPlusPlusBaseline as REINFORCEPlusPlusBaseline
from agentlightning.algorithm import algo as algo
from agentlightning.data.rewards import RewardSpec as RewardSpec
from agentlightning.learner.policy_config import AdamW as AdamW
from agentlightning.learner.policy_config import LoRA as LoRA
from agentlightning.runner.agent import LitAgent as LitAgent
from agentlightning.runner.agent import llm_rollout as llm_rollout
from agentlightning.runner.agent import prompt_rollout as prompt_rollout
from agentlightning.runner.agent import rollout as rollout
from agentlightning.runner.clients import openai_client as openai_client
from agentlightning.runner.command import CommandOutput as CommandOutput
from agentlightning.runner.command import command as command
from agentlightning.runner.execution import Hook as Hook
from agentlightning.runner.harnesses import harness as harness
from agentlightning.runner.runner import Runner as Runner
from agentlightning.store.base import LightningStore as LightningStore
from agentlightning.store.client import LightningStoreClient as LightningStoreClient
from agentlightning.store.sql import SqlStore as SqlStore
from agentlightning.tracing.emit import emit_annotation as emit_annotation
from agentlightning.tracing.emit import emit_reward as emit_reward
from agentlightning.tracing.instrument import instrument as instrument
from agentlightning.tracing.operation import operation as operation
from agentlightning.tracing.rewards import find_final_reward as find_final_reward
from agentlightning.trainer import Trainer as Trainer
from agentlightning.types import LLM as LLM
from agentlightning.types import FrozenModel as FrozenModel
from agentlightning.types import PromptTemplate as PromptTemplate
from agentlightning.types import Rollout as Rollout
from agentlightning.types import RolloutConfig as RolloutConfig
from agentlightning.types import Span as Span

__version__: str
__all__: list[str]

def clash_with_namesake() -> str | None: ...
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub] (names of 0.3)
