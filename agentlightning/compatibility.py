"""Names of Agent Lightning 0.3 that are called otherwise here, and those that have no counterpart, with what to use.

`agentlightning.__getattr__` looks here last. `docs/compatibility.md` tells the whole story.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentlightning.errors import ConfigError

# Module → the names of 0.3 that it has, under the same names.
_KEPT: Final = {
    "agentlightning.compatibility": "configure_logger setup_logging",
    "agentlightning.data.adapters": (
        "Adapter LlmProxyTraceToTriplet TraceAdapter TraceToMessages TraceToTripletBase TracerTraceToTriplet"
    ),
    "agentlightning.types": (
        "AttemptStatus AttributeValue Attributes Resource ResourcesUpdate RolloutStatus StatusCode Worker"
    ),
}
# Name in 0.3 → `module:attribute` that serves in its place.
RENAMED: Final = {name: f"{module}:{name}" for module, names in _KEPT.items() for name in names.split()} | {
    "Dataset": "collections.abc:Sequence",
    "Event": "agentlightning.types:SpanEvent",
    "Link": "agentlightning.types:SpanLink",
    "ProxyLLM": "agentlightning.types:LLM",
    "ResourceUnion": "agentlightning.types:Resource",
    "RolloutMode": "agentlightning.types:Mode",
    "SpanCoreFields": "agentlightning.types:Span",
    "SpanLike": "agentlightning.types:Span",
    "TaskInput": "typing:Any",
    "TraceStatus": "agentlightning.types:SpanStatus",
}

# What to do instead → the names of 0.3 it stands for.
_INSTEAD: Final = {
    "train with agl.Trainer(model=…, algorithm=agl.GRPO(…)), whose learner is built in": "VERL Tinker",
    "the gateway is part of the Trainer and of `agl server`: agents get its URL as `llm.endpoint`. For models served "
    "elsewhere use `agl serve` or the server's table of models": "LLMProxy",
    "an attempt is traced without being asked to, so leave the argument out; spans of OpenTelemetry are taken as they "
    "come, and agentlightning.tracing.context.recording() records in a test": (
        "Tracer OtelTracer AgentOpsTracer WeaveTracer DummyTracer get_active_tracer set_active_tracer "
        "clear_active_tracer SpanRecordingContext"
    ),
    "spans come as agl.Span, whatever made them: derive from agl.TraceAdapter": "OtelTraceAdapter",
    "runners, store and algorithm share one process unless `agl server` and `agl runner` are started; leave the "
    "argument out": (
        "ExecutionStrategy ClientServerExecutionStrategy SharedMemoryExecutionStrategy ExecutionEvent ThreadingEvent "
        "MultiprocessingEvent"
    ),
    "use `store = await agl.SqlStore.open(':memory:')`, or a file's path": (
        "InMemoryLightningStore CollectionBasedLightningStore LightningStoreThreaded LightningStoreCapabilities "
        "LightningStoreStatistics"
    ),
    "start `agl server`, and connect with agl.LightningStoreClient(url)": "LightningStoreServer AgentLightningServer",
    "use `await agl.Runner(store, agent).run_one(task, resources)`, or `agl dev` on the command line": (
        "LitAgentRunner LegacyAgentRunner DevTaskLoader AgentLightningClient"
    ),
    "write a class with `name` and `async def run(self, context)` (agentlightning/algorithm/base.py), or decorate a "
    "function by agl.algo": "Algorithm FastAlgorithm",
    "describe the run in a file and start it by `agl train run.yaml`, whose keys are flags too": (
        "lightning_cli build_component LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var"
    ),
    "filter by agl.Condition, agl.And, agl.Or and sort by agl.Order": (
        "FilterField FilterOptions SortOptions PaginatedResult"
    ),
    "names of spans and attributes are in agentlightning.semconv": "SpanNames SpanAttributeNames",
    "a span holds its ids, its parent's id and the attributes of its resource itself: see agl.Span": (
        "SpanContext TraceState OtelResource"
    ),
    "use agl.Rollout: the forms of 0.1 are gone": (
        "Task TaskIfAny RolloutLegacy RolloutRawResultLegacy GenericResponse ParallelWorkerBase WorkerStatus"
    ),
    "use agl.setup_logging, or Python's logging": "setup_module_logging",
}
REPLACED: Final = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}


def find(name: str) -> Any:
    """What serves for `name` of 0.3. ConfigError says what to use where nothing does; AttributeError if 0.3 had no
    such name either."""
    if name in RENAMED:
        module, _, attribute = RENAMED[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in REPLACED:
        raise ConfigError(f"agentlightning.{name} of Agent Lightning 0.3 does not exist here: {REPLACED[name]}")
    raise AttributeError(name)


def setup_logging(
    level: int | str = "INFO",
    *,
    submodule_levels: Mapping[str, int | str] | None = None,
    apply_to: Iterable[str] = (),
) -> None:
    """Show the package's log on stderr, and that of the loggers in `apply_to`, from `level` on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name, wanted in {"agentlightning": level, **dict.fromkeys(apply_to, level), **(submodule_levels or {})}.items():
        logging.getLogger(name).setLevel(wanted)


def configure_logger(level: int | str = logging.INFO, name: str = "agentlightning") -> logging.Logger:
    """`setup_logging` for the logger called `name`, which is returned."""
    setup_logging(level, apply_to=[name])
    return logging.getLogger(name)
