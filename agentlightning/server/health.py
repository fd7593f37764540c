"""What operators ask of a server: whether it lives (`/health`), whether it can do its work (`/ready`), and how much it
does (`/metrics`, in Prometheus's text format).

A registry per application and no globals. This module knows how things are counted; it does not know rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError
from agentlightning.gateway.app import Gateway
from agentlightning.server.access import Access
from agentlightning.server.logs import Finished
from agentlightning.server.requests import caller_of, in_json
from agentlightning.store.base import CALLS, LightningStore

_PATIENCE: Final = 2.0
_SECONDS: Final[Sequence[float]] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_QUEUED: Final = ("rollouts_queuing", "rollouts_requeuing")


class HealthRoutes:
    """The server is ready while its store, if it has one, answers a read within two seconds."""

    def __init__(self, store: LightningStore | None) -> None:
        self._store = store

    def routes(self) -> list[BaseRoute]:
        return [Route("/health", self._health, methods=["GET"]), Route("/ready", self._ready, methods=["GET"])]

    async def _health(self, request: Request) -> Response:
        return in_json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        trouble = await self._trouble()
        if trouble is None:
            return in_json({"status": "ready"})
        return in_json({"status": "unready", "reason": trouble}, 503)

    async def _trouble(self) -> str | None:
        """What is wrong, or None."""
        if self._store is None:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._store.get_resources_by_id("ready")
        except TimeoutError:
            return f"the store did not answer within {_PATIENCE:g} s"
        except AgentLightningError as error:
            return str(error)
        return None


class ServerMetrics:
    """Counts finished requests (`count`) and shows them with the rest at `/metrics`. `gauges` are read when asked:
    a name, what it says, and its value; `collectors` bring more."""

    def __init__(
        self,
        store: LightningStore | None,
        access: Access | None,
        gauges: Mapping[str, tuple[str, Callable[[], int]]],
        collectors: Iterable[Collector] = (),
    ) -> None:
        self._store = store
        self._access = access
        self._registry = registry = CollectorRegistry()
        self._answered = Counter("agl_requests", "Requests answered.", ["method", "route", "status"], registry=registry)
        meaning = "How long requests took; long polls include the wait."
        self._took = Histogram("agl_request_seconds", meaning, ["method", "route"], buckets=_SECONDS, registry=registry)
        for name, (meaning, read) in gauges.items():
            Gauge(name, meaning, registry=registry).set_function(read)
        self._stored = _Stored()
        for collector in (self._stored, *collectors):
            registry.register(collector)
        ProcessCollector(registry=registry)

    def count(self, finished: Finished) -> None:
        self._answered.labels(finished.method, finished.route, finished.status).inc()
        self._took.labels(finished.method, finished.route).observe(finished.ms / 1000)

    def route(self) -> Route:
        return Route("/metrics", self._show, methods=["GET"])

    async def _show(self, request: Request) -> Response:
        if self._access is not None:
            (await caller_of(request, self._access)).require(CALLS["statistics"])
        if self._store is not None:
            try:
                self._stored.statistics = await self._store.statistics()
            except AgentLightningError:
                self._stored.statistics = None  # the rest is worth showing, then more than ever
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Stored(Collector):
    """What the store holds, if that is known."""

    statistics: Mapping[str, int] | None = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        if self.statistics is None:
            return
        rollouts = GaugeMetricFamily("agl_rollouts", "Rollouts in the store.", labels=["status"])
        for name, count in self.statistics.items():
            if name.startswith("rollouts_"):
                rollouts.add_metric([name.removeprefix("rollouts_")], count)
        yield rollouts
        yield GaugeMetricFamily("agl_spans", "Spans in the store.", value=self.statistics["spans"])
        queued = sum(self.statistics[name] for name in _QUEUED)
        yield GaugeMetricFamily("agl_queue_length", "Rollouts that wait for a worker.", value=queued)


class GatewayMetrics(Collector):
    """Calls by model and outcome, why calls cannot be trained on, and what nobody received or was not recorded."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        counted = self._gateway.statistics
        yield GaugeMetricFamily("agl_gateway_running_calls", "LLM calls being answered.", value=self._gateway.running)
        calls = CounterMetricFamily("agl_gateway_calls", "LLM calls by outcome.", labels=["model", "outcome"])
        for (model, outcome), count in counted.calls.items():
            calls.add_metric([model, outcome], count)
        yield calls
        untrainable = CounterMetricFamily(
            "agl_gateway_untrainable_calls", "Recorded calls that must not be trained on.", labels=["reason"]
        )
        for reason, count in counted.untrainable.items():
            untrainable.add_metric([reason], count)
        yield untrainable
        for name, meaning, count in (
            ("undelivered_answers", "Answers whose client had left.", counted.undelivered),
            ("held_calls", "Recorded calls that waited while weights were updated.", counted.held),
            ("held_seconds", "For how long they waited in all.", counted.held_seconds),
            ("unrecorded_calls", "Calls that were answered and not recorded.", self._gateway.shed),
        ):
            yield CounterMetricFamily(f"agl_gateway_{name}", meaning, value=count)
