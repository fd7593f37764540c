"""Answers what operators ask of a server: whether it lives (`/health`), whether it can do its work
(`/ready`), and how much it does (`/metrics`, in Prometheus's text format). A registry per
application and no globals."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError
from agentlightning.gateway.gateway import Gateway
from agentlightning.server.access import Access
from agentlightning.server.request_log import Finished
from agentlightning.server.requests import caller_of, in_json
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.store.sql import SqlStore

_PATIENCE: Final = 2.0
_SECONDS: Final[Sequence[float]] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    30.0,
)
_QUEUED: Final = ("rollouts_queuing", "rollouts_requeuing")


def health_routes(store: LightningStore | None) -> list[BaseRoute]:
    async def health(request: Request) -> Response:
        return in_json({"status": "ok"})

    async def ready(request: Request) -> Response:
        try:
            if store is not None:
                async with asyncio.timeout(_PATIENCE):
                    await (
                        store.availability.check()
                        if isinstance(store, SqlStore)
                        else store.get_time()
                    )
        except TimeoutError:
            return in_json(
                {"status": "unready", "reason": f"the store did not answer within {_PATIENCE:g} s"},
                503,
            )
        except AgentLightningError as error:
            return in_json({"status": "unready", "reason": str(error)}, 503)
        return in_json({"status": "ready"})

    return [Route("/health", health), Route("/ready", ready)]


class Reading(NamedTuple):
    """A number that somebody else keeps, or one for each value of a label: `name` ends in `_total`
    if it only grows."""

    name: str
    meaning: str
    read: Callable[[], float | Mapping[tuple[str, ...], float]]
    labels: Sequence[str] = ()


class ServerMetrics(Collector):
    """Counts finished requests (`count`) and shows them, what the store holds and other `readings`
    at `/metrics`."""

    def __init__(
        self, store: LightningStore | None, access: Access | None, readings: Iterable[Reading]
    ) -> None:
        self._store = store
        self._access = access
        self._stored: Mapping[str, int] = {}
        self._readings = [
            *readings,
            Reading("agl_rollouts", "Rollouts in the store.", self._rollouts, ["status"]),
            Reading("agl_spans", "Spans in the store.", lambda: self._sum("spans")),
            Reading(
                "agl_workers",
                "Workers heard of in the last minute.",
                lambda: self._sum("workers_alive"),
            ),
            Reading(
                "agl_queue_length", "Rollouts that wait for a worker.", lambda: self._sum(*_QUEUED)
            ),
        ]
        self._registry = registry = CollectorRegistry()
        self._answered = Counter(
            "agl_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        meaning = "How long requests took; long polls include the wait."
        self._took = Histogram(
            "agl_request_seconds", meaning, ["method", "route"], buckets=_SECONDS, registry=registry
        )
        registry.register(self)
        ProcessCollector(registry=registry)

    def count(self, finished: Finished) -> None:
        self._answered.labels(finished.method, finished.route, finished.status).inc()
        self._took.labels(finished.method, finished.route).observe(finished.ms / 1000)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        for reading in self._readings:
            kind = CounterMetricFamily if reading.name.endswith("_total") else GaugeMetricFamily
            family = kind(
                reading.name.removesuffix("_total"), reading.meaning, labels=reading.labels
            )
            value = reading.read()
            for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                family.add_metric(labels, number)
            yield family

    def route(self) -> Route:
        async def metrics(request: Request) -> Response:
            if self._access is not None:
                (await caller_of(request, self._access)).require(CALLS["statistics"])
            try:
                self._stored = {} if self._store is None else await self._store.statistics()
            except AgentLightningError:
                self._stored = {}  # the rest is worth showing, then more than ever
            return Response(
                generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST}
            )

        return Route("/metrics", metrics)

    def _rollouts(self) -> Mapping[tuple[str, ...], float]:
        prefix = "rollouts_"
        return {
            (name.removeprefix(prefix),): n
            for name, n in self._stored.items()
            if name.startswith(prefix)
        }

    def _sum(self, *names: str) -> float | Mapping[tuple[str, ...], float]:
        return sum(self._stored[name] for name in names) if self._stored else {}


def store_readings(store: SqlStore) -> list[Reading]:
    """Whether the store can be written, how many calls it had to refuse, and the space that is left
    for its file."""
    state = store.availability
    readings = [
        Reading(
            "agl_store_away", "1 while the store cannot be written.", lambda: float(state.away)
        ),
        Reading(
            "agl_store_refused_calls_total",
            "Calls that could not be written.",
            lambda: state.refused,
        ),
        Reading(
            "agl_store_transactions_total",
            "Transactions that were committed.",
            lambda: state.transactions,
        ),
        Reading(
            "agl_store_transaction_seconds_total",
            "How long they took in all.",
            lambda: state.seconds,
        ),
    ]
    folder = Path(store.address).absolute().parent
    if folder.is_dir():  # not for ":memory:" of a removed folder, nor for a postgresql:// URL
        free = Reading(
            "agl_store_free_bytes",
            "Space left for the store.",
            lambda: shutil.disk_usage(folder).free,
        )
        readings.append(free)
    return readings


def gateway_readings(gateway: Gateway) -> list[Reading]:
    """Calls by model and outcome, why calls cannot be trained on, and what nobody received or was
    not recorded."""
    rows: list[Reading] = [
        Reading(
            "policy_version",
            "The newest weights that answered a call.",
            lambda: {(model,): version for model, version in gateway.statistics.versions.items()},
            ["model"],
        ),
        Reading("running_calls", "LLM calls being answered.", lambda: gateway.running),
        Reading(
            "calls_total",
            "LLM calls by outcome.",
            lambda: gateway.statistics.calls,
            ["model", "outcome"],
        ),
        Reading(
            "untrainable_calls_total",
            "Recorded calls that must not be trained on.",
            lambda: {(reason,): count for reason, count in gateway.statistics.untrainable.items()},
            ["reason"],
        ),
        Reading(
            "undelivered_answers_total",
            "Answers whose client had left.",
            lambda: gateway.statistics.undelivered,
        ),
        Reading(
            "held_calls_total",
            "Recorded calls that waited while weights were updated.",
            lambda: gateway.statistics.held,
        ),
        Reading(
            "held_seconds_total",
            "For how long they waited in all.",
            lambda: gateway.statistics.held_seconds,
        ),
        Reading(
            "prompt_calls_total",
            "Calls by whether the prompts in production replaced a text in them.",
            lambda: {(met,): count for met, count in gateway.met.calls.items()},
            ["met"],
        ),
        Reading(
            "prompts_met_share",
            "Share of the latest 100 of them in which one was replaced.",
            gateway.met.shown,
        ),
        Reading(
            "unrecorded_calls_total",
            "Calls that were answered and not recorded.",
            lambda: gateway.shed,
        ),
    ]
    return [row._replace(name=f"agl_gateway_{row.name}") for row in rows]
