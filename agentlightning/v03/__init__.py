"""Names and modules of Agent Lightning 0.3 that have another name here, or no counterpart.

`agentlightning.__getattr__` and Python's import look here last. Nothing below the trainer imports
this room. `docs/reference/compatibility.md` describes all of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, TypeVar, cast

from agentlightning.errors import ConfigError, InvalidError, docs_page
from agentlightning.semconv import LINK, TAG
from agentlightning.types import Attributes

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Package → modules of 0.3 in it that have no counterpart here. Each of them has all names.
_MODULES: Final = {
    "agentlightning": (
        "adapter client config emitter env_var execution instrumentation litagent llm_proxy "
        "logging reward tracer utils verl"
    ),
    "agentlightning.adapter": "base messages triplet",
    "agentlightning.algorithm": "decorator fast utils verl",
    "agentlightning.emitter": "annotation exception message object reward",
    "agentlightning.execution": "base client_server events shared_memory",
    "agentlightning.instrumentation": "agentops agentops_langchain litellm vllm weave",
    "agentlightning.litagent": "decorator litagent",
    "agentlightning.runner": "base legacy",
    "agentlightning.store": (
        "client_server collection collection_based memory mongo threading utils"
    ),
    "agentlightning.tracer": "agentops base dummy otel weave",
    "agentlightning.utils": "id metrics otel otlp server_launcher system_snapshot",
    "agentlightning.verl": "daemon dataset entrypoint trainer",
}
# Module → the names of 0.3 that it has, under the same names.
_KEPT: Final = {
    "agentlightning.v03": (
        "configure_logger make_link_attributes make_tag_attributes reward setup_logging"
    ),
    "agentlightning.v03.adapters": (
        "Adapter LlmProxyTraceToTriplet TraceAdapter TraceToMessages TraceToTripletBase "
        "TracerTraceToTriplet Triplet"
    ),
    "agentlightning.types": (
        "Attempt AttemptStatus AttemptedRollout AttributeValue Attributes EnqueueRolloutRequest "
        "NamedResources Resource ResourcesUpdate RolloutStatus StatusCode Worker"
    ),
    "agentlightning.runner.agent": "RolloutRawResult",
    "agentlightning.tracing.emit": "emit_exception emit_message emit_object",
    "agentlightning.tracing.rewards": (
        "find_reward_spans get_reward_value get_rewards_from_span is_reward_span"
    ),
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

# The names of 0.3 that have no counterpart; `_INSTEAD` says what to do where many would ask.
_GONE: Final = """
AgentLightningClient AgentLightningServer AgentOpsTracer AGL_VIRTUAL Algorithm
batch_iter_over_dataset build_component clear_active_tracer ClientServerExecutionStrategy
CollectionBasedLightningStore ConsoleMetricsBackend DevTaskLoader DummyTracer ExecutionEvent
ExecutionStrategy extract_links_from_attributes extract_tags_from_attributes FastAlgorithm
filter_and_unflatten_attributes filter_attributes FilterField FilterOptions flatten_attributes
GenericResponse get_active_llm_proxy get_active_tracer get_message_value get_object_value
get_tracer get_tracer_provider InMemoryLightningStore instrument_all LegacyAgentRunner
lightning_cli LightningEnvVar LightningResourceAttributes LightningSpanAttributes
LightningStoreCapabilities LightningStoreServer LightningStoreStatistics LightningStoreThreaded
LinkAttributes LitAgentRunner LLMProxy MetricsBackend ModelConfig MongoLightningStore
MultiMetricsBackend MultiprocessingEvent OtelResource OtelTraceAdapter OtelTracer PaginatedResult
ParallelWorkerBase PrometheusMetricsBackend query_linked_spans resolve_bool_env_var
resolve_int_env_var resolve_str_env_var RewardAttributes RolloutLegacy RolloutRawResultLegacy
set_active_tracer setup_module_logging SharedMemoryExecutionStrategy SortOptions SpanAttributeNames
SpanContext SpanNames SpanRecordingContext Task TaskIfAny ThreadingEvent Tinker Tracer TraceState
unflatten_attributes uninstrument_all VERL WeaveTracer with_llm_proxy with_store WorkerStatus
"""
_INSTEAD: Final = {
    "VERL": "train with agl.Trainer(model=…, algorithm=agl.GRPO(…))",
    "LLMProxy": (
        "the gateway is part of the Trainer and of `agl server`: agents get its URL as "
        "`llm.endpoint`"
    ),
    "InMemoryLightningStore": "use `store = await agl.SqlStore.open(':memory:')`, or a file's path",
    "LitAgentRunner": "use `await agl.Runner(store, agent).run_one(task, resources)`",
}


class Refused(type):
    """A name without a counterpart. You can import it, annotate with it and derive from it; calling
    it, or an attribute, is a ConfigError."""

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
    """The counterpart of `name` of 0.3, or a `Refused` that says what to use. AttributeError if 0.3
    had no such name."""
    if name in RENAMED:
        module, _, attribute = RENAMED[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in _GONE.split():
        instead = _INSTEAD.get(
            name, f"{docs_page('reference/compatibility.md')} says what to do instead"
        )
        why = f"agentlightning.{name} of Agent Lightning 0.3 does not exist here: {instead}"
        return Refused(name, (), {"__module__": "agentlightning", "_instead": why})
    raise AttributeError(name)


class Module(ModuleType):
    """A module of 0.3. It is callable, because `import agentlightning.reward` hides the decorator
    `agl.reward`."""

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
    """The module of 0.3 named `name`, such as `agentlightning.adapter.triplet`; None if 0.3 had
    none."""
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


def configure_logger(
    level: int | str = logging.INFO, name: str = "agentlightning"
) -> logging.Logger:
    """`setup_logging` for the logger `name`, which is returned."""
    setup_logging(level, apply_to=[name])
    return logging.getLogger(name)


def reward(function: FunctionT) -> FunctionT:
    """Decorate a function, sync or async, so that the reward it returns is also emitted."""
    # which may be what is looking for a name here
    from agentlightning.tracing.emit import emit_reward

    def emitted(value: Any) -> Any:
        emit_reward(value)
        return value

    async def emitting_async(*args: Any, **kwargs: Any) -> Any:
        return emitted(await function(*args, **kwargs))

    def emitting(*args: Any, **kwargs: Any) -> Any:
        return emitted(function(*args, **kwargs))

    wrapper = emitting_async if inspect.iscoroutinefunction(function) else emitting
    return cast(FunctionT, functools.wraps(function)(wrapper))


def make_link_attributes(links: Mapping[str, str]) -> Attributes:
    """`{"span_id": "r1"}` → `{"agentlightning.link.0.key_match": "span_id",
    "agentlightning.link.0.value_match": "r1"}`

    Pass them to an emitter: `emit_reward(0.5, attributes=make_link_attributes(…))`. InvalidError
    for a value that is not text."""
    attributes: Attributes = {}
    for index, (key, value) in enumerate(links.items()):
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] - given by users
            raise InvalidError(
                f"the link {key!r} is a {type(value).__name__}; links are matched as text, give a "
                "str"
            )
        attributes |= {f"{LINK}.{index}.key_match": key, f"{LINK}.{index}.value_match": value}
    return attributes


def make_tag_attributes(tags: Sequence[str]) -> Attributes:
    """`["fast"]` → `{"agentlightning.tag.0": "fast"}`"""
    return {f"{TAG}.{index}": tag for index, tag in enumerate(tags)}
