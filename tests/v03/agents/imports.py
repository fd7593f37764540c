"""An agent file in the style of Agent Lightning 0.3 that imports from its modules, also what is not
used here."""

import asyncio
from typing import Any, Optional, Sequence, cast

import agentlightning.emitter.annotation
from agentlightning.adapter import TraceToTripletBase
from agentlightning.adapter.messages import OpenAIMessages, TraceToMessages
from agentlightning.adapter.triplet import LlmProxyTraceToTriplet
from agentlightning.algorithm.utils import batch_iter_over_dataset
from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.litagent import LitAgent, rollout
from agentlightning.llm_proxy import ModelConfig
from agentlightning.reward import find_final_reward, reward
from agentlightning.store.mongo import MongoLightningStore
from agentlightning.tracer import AgentOpsTracer, OtelTracer
from agentlightning.tracer.weave import WeaveTracer
from agentlightning.utils import otel
from agentlightning.utils.metrics import ConsoleMetricsBackend
from openai import OpenAI

from agentlightning import LightningStoreServer, LLMProxy
from agentlightning.algorithm import VERL, Algorithm, FastAlgorithm
from agentlightning.algorithm.apo import APO
from agentlightning.runner import LitAgentRunner
from agentlightning.semconv import AGL_OPERATION, LightningSpanAttributes
from agentlightning.server import AgentLightningServer
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient
from agentlightning.types import (
    LLM,
    Dataset,
    Hook,
    NamedResources,
    ProxyLLM,
    Span,
    TaskInput,
    Triplet,
)

SERVED = [
    LightningStore,
    LightningStoreClient,
    Hook,
    Algorithm,
    APO[dict],
    TaskInput,
    Dataset[int],
    otel,
    OpenAIMessages,
]
REFUSED = [
    *(
        LightningStoreServer,
        LLMProxy,
        VERL,
        FastAlgorithm,
        batch_iter_over_dataset,
        resolve_bool_env_var,
        ModelConfig,
    ),
    *(
        SharedMemoryExecutionStrategy,
        LitAgentRunner,
        AgentLightningServer,
        MongoLightningStore,
        AgentOpsTracer,
    ),
    *(WeaveTracer, ConsoleMetricsBackend),
]


class Triplets(LlmProxyTraceToTriplet):
    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        return super().adapt(source)


class Proxy(LLMProxy):
    """Defined and never made."""


def debug(
    store: InMemoryLightningStore | None,
    runner: LitAgentRunner[TaskInput],
    tracer: Optional[OtelTracer] = None,
) -> TraceToTripletBase | TraceToMessages: ...


def attributes() -> Any:
    return LightningSpanAttributes.OPERATION_INPUT.value


def from_the_environment() -> Any:
    return LightningEnvVar.AGL_CURRENT_ROLE


@reward
def length(answer: str) -> float:
    return float(len(answer))


def ask(question: str, llm: LLM) -> str:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(
        model="gpt-4.1-nano", messages=[{"role": "user", "content": question}]
    )
    return answer.choices[0].message.content or ""


@rollout
def asks_by_a_name_of_its_own(task: TaskInput, llm: LLM) -> None:
    length(ask(task["input"], llm))


class ByResources(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Any) -> float:
        llm = cast(ProxyLLM, resources["main_llm"])
        assert llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id) == llm.endpoint
        assert agentlightning.emitter.annotation is not None and AGL_OPERATION
        answer = await asyncio.to_thread(ask, task["input"], llm)
        assert otel.make_tag_attributes([answer]) == {"agentlightning.tag.0": "hello"}
        return find_final_reward([]) or 0.5


class Parametrised(ByResources):
    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns
