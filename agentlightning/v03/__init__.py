"""Names and modules of Agent Lightning 0.3 that have another name here, or no counterpart.

`agentlightning.__getattr__` and Python's import look here last. Nothing below the trainer imports this room.
`docs/reference/compatibility.md` describes all of it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from agentlightning.errors import ConfigError

# Package → modules of 0.3 in it that have no counterpart here. Each of them has all names.
_MODULES: Final = {
    "agentlightning": (
        "adapter client config emitter env_var execution instrumentation litagent llm_proxy logging reward tracer "
        "utils verl"
    ),
    "agentlightning.adapter": "base messages triplet",
    "agentlightning.algorithm": "decorator fast utils verl",
    "agentlightning.emitter": "annotation exception message object reward",
    "agentlightning.execution": "base client_server events shared_memory",
    "agentlightning.instrumentation": "agentops agentops_langchain litellm vllm weave",
    "agentlightning.litagent": "decorator litagent",
    "agentlightning.runner": "base legacy",
    "agentlightning.store": "client_server collection collection_based memory mongo threading utils",
    "agentlightning.tracer": "agentops base dummy otel weave",
    "agentlightning.utils": "id metrics otel otlp server_launcher system_snapshot",
    "agentlightning.verl": "daemon dataset entrypoint trainer",
}
# Module → the names of 0.3 that it has, under the same names.
_KEPT: Final = {
    "agentlightning.v03": "configure_logger setup_logging",
    "agentlightning.v03.adapters": (
        "Adapter LlmProxyTraceToTriplet TraceAdapter TraceToMessages TraceToTripletBase TracerTraceToTriplet Triplet"
    ),
    "agentlightning.types": (
        "Attempt AttemptStatus AttemptedRollout AttributeValue Attributes EnqueueRolloutRequest NamedResources "
        "Resource ResourcesUpdate RolloutStatus StatusCode Worker"
    ),
    "agentlightning.runner.agent": "RolloutRawResult",
    "agentlightning.tracing.emit": "emit_exception emit_message emit_object",
    "agentlightning.tracing.links": "extract_links_from_attributes",
    "agentlightning.v03.emitters": (
        "extract_tags_from_attributes get_message_value get_object_value make_link_attributes make_tag_attributes "
        "query_linked_spans reward"
    ),
    "agentlightning.tracing.rewards": "find_reward_spans get_reward_value get_rewards_from_span is_reward_span",
}
# Name in 0.3 → `module:attribute` that serves in its place.
RENAMED: Final = (
    {name: f"{module}:{name}" for module, names in _KEPT.items() for name in names.split()}
    | {
        "Dataset": "collections.abc:Sequence",
        "Event": "agentlightning.types:SpanEvent",
        "Link": "agentlightning.types:SpanLink",
        "OpenAIMessages": "builtins:dict",
        "ProxyLLM": "agentlightning.types:LLM",
        "ResourceUnion": "agentlightning.types:Resource",
        "RolloutMode": "agentlightning.types:Mode",
        "SpanCoreFields": "agentlightning.types:Span",
        "SpanLike": "agentlightning.types:Span",
        "TaskInput": "typing:Any",
        "TraceStatus": "agentlightning.types:SpanStatus",
    }
    | {
        f"AGL_{name}": f"agentlightning.semconv:{name}"
        for name in ("ANNOTATION", "EXCEPTION", "MESSAGE", "OBJECT", "OPERATION", "REWARD")
    }
)

# What to do instead → the names of 0.3 it stands for.
_INSTEAD: Final = {
    "train with agl.Trainer(model=…, algorithm=agl.GRPO(…))": "VERL Tinker",
    "the gateway is part of the Trainer and of `agl server`: agents get its URL as `llm.endpoint`": (
        "LLMProxy ModelConfig get_active_llm_proxy with_llm_proxy"
    ),
    "every attempt is traced: leave the argument out (docs/tracing.md)": (
        "Tracer OtelTracer AgentOpsTracer WeaveTracer DummyTracer get_active_tracer set_active_tracer "
        "clear_active_tracer SpanRecordingContext get_tracer get_tracer_provider instrument_all uninstrument_all"
    ),
    "one process, or `agl server` and `agl runner`: leave the argument out": (
        "ExecutionStrategy ClientServerExecutionStrategy SharedMemoryExecutionStrategy ExecutionEvent ThreadingEvent "
        "MultiprocessingEvent"
    ),
    "use `store = await agl.SqlStore.open(':memory:')`, or a file's path": (
        "InMemoryLightningStore CollectionBasedLightningStore LightningStoreThreaded LightningStoreCapabilities "
        "LightningStoreStatistics MongoLightningStore"
    ),
    "start `agl server`, and connect with agl.LightningStoreClient(url)": "LightningStoreServer AgentLightningServer",
    "use `await agl.Runner(store, agent).run_one(task, resources)`": (
        "LitAgentRunner LegacyAgentRunner DevTaskLoader AgentLightningClient"
    ),
    "write a class with `name` and `async def run(self, context)`, or decorate a function by agl.algo": (
        "Algorithm FastAlgorithm batch_iter_over_dataset with_store"
    ),
    "describe the run in a file and start it by `agl train run.yaml`": (
        "lightning_cli build_component LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var"
    ),
    "filter by And, Or, Not and Condition, and sort by Order, of agentlightning.types": (
        "FilterField FilterOptions SortOptions PaginatedResult"
    ),
    "read agl.Span and its attributes; their names are in agentlightning.semconv": (
        "SpanNames SpanAttributeNames LightningResourceAttributes LightningSpanAttributes LinkAttributes "
        "RewardAttributes AGL_VIRTUAL filter_attributes filter_and_unflatten_attributes flatten_attributes "
        "unflatten_attributes SpanContext TraceState OtelResource OtelTraceAdapter"
    ),
    "the server's metrics are at /metrics": (
        "MetricsBackend ConsoleMetricsBackend MultiMetricsBackend PrometheusMetricsBackend"
    ),
    "use agl.Rollout: the forms of 0.1 are gone": (
        "Task TaskIfAny RolloutLegacy RolloutRawResultLegacy GenericResponse ParallelWorkerBase WorkerStatus"
    ),
    "use agl.setup_logging, or Python's logging": "setup_module_logging",
}
REPLACED: Final = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}


class Refused(type):
    """A name without a counterpart. You can import it, annotate with it and derive from it; calling it, or an
    attribute, is a ConfigError."""

    _instead: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):  # typing, inspect and others ask for those
            raise AttributeError(name)
        raise ConfigError(cls._instead)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise ConfigError(cls._instead)

    def __getitem__(cls, parameters: object) -> Refused:
        return cls


def find(name: str) -> Any:
    """The counterpart of `name` of 0.3, or a `Refused` that says what to use. AttributeError if 0.3 had no such
    name."""
    if name in RENAMED:
        module, _, attribute = RENAMED[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in REPLACED:
        why = f"agentlightning.{name} of Agent Lightning 0.3 does not exist here: {REPLACED[name]}"
        return Refused(name, (), {"__module__": "agentlightning", "_instead": why})
    raise AttributeError(name)


class Module(ModuleType):
    """A module of 0.3. It is callable, because `import agentlightning.reward` hides the decorator `agl.reward`."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module("agentlightning").__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("reward")(*args, **kwargs)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up on access."""


def find_spec(name: str) -> ModuleSpec | None:
    """The module of 0.3 named `name`, such as `agentlightning.adapter.triplet`; None if 0.3 had none."""
    package, _, module = name.rpartition(".")
    known = module in _MODULES.get(package, "").split()
    return ModuleSpec(name, _Loader(), is_package=True) if known else None


def setup_logging(
    level: int | str = "INFO",
    *,
    submodule_levels: Mapping[str, int | str] | None = None,
    apply_to: Iterable[str] = (),
) -> None:
    """Show the logs of the package and of the loggers in `apply_to` on stderr, from `level` up."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    levels = {"agentlightning": level, **dict.fromkeys(apply_to, level), **(submodule_levels or {})}
    for name, minimum in levels.items():
        logging.getLogger(name).setLevel(minimum)


def configure_logger(level: int | str = logging.INFO, name: str = "agentlightning") -> logging.Logger:
    """`setup_logging` for the logger `name`, which is returned."""
    setup_logging(level, apply_to=[name])
    return logging.getLogger(name)
