"""`/metrics` in Prometheus's text format: requests, LLM calls, what waits, what is stored, and the process itself.

A registry per application and no globals. This module knows how things are counted; it does not know routes or rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import UnavailableError
from agentlightning.gateway.app import Gateway
from agentlightning.server.access import Access
from agentlightning.server.logs import Finished
from agentlightning.server.remembered import Remembered
from agentlightning.server.requests import caller_of
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Statistics

_COUNTED_EVERY: Final = 10.0  # seconds: counting what a large store holds takes a while
_SECONDS: Final[Sequence[float]] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_QUEUED: Final = ("rollouts_queuing", "rollouts_requeuing")


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
        self._access = access
        self._statistics = None if store is None else Remembered(lambda: store.perform(Statistics()), _COUNTED_EVERY)
        self._registry = CollectorRegistry()
        self._requests = _Requests()
        self._now = _Now(gauges)
        for collector in (self._requests, self._now, *collectors):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def count(self, finished: Finished) -> None:
        self._requests.count(finished)

    def route(self) -> Route:
        return Route("/metrics", self._show, methods=["GET"])

    async def _show(self, request: Request) -> Response:
        if self._access is not None:
            (await caller_of(request, self._access)).require(Statistics)
        if self._statistics is not None:
            try:
                self._now.statistics = await self._statistics.get()
            except UnavailableError:
                self._now.statistics = None  # the rest is worth showing, then more than ever
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Requests(Collector):
    """How many requests of each method, route and status were answered, and how long they took. The library's own
    counters take a lock and several calls for each: a hundredth of an LLM call."""

    def __init__(self) -> None:
        self._answered: dict[tuple[str, str, int], int] = {}
        self._took: dict[tuple[str, str], list[int]] = {}  # requests in each bucket
        self._seconds: dict[tuple[str, str], float] = {}

    def count(self, finished: Finished) -> None:
        asked, seconds = (finished.method, finished.route), finished.ms / 1000
        answered = (*asked, finished.status)
        self._answered[answered] = self._answered.get(answered, 0) + 1
        if asked not in self._took:
            self._took[asked], self._seconds[asked] = [0] * (len(_SECONDS) + 1), 0.0
        self._took[asked][bisect_left(_SECONDS, seconds)] += 1
        self._seconds[asked] += seconds

    def collect(self) -> Iterable[CounterMetricFamily | HistogramMetricFamily]:
        answered = CounterMetricFamily("agl_requests", "Requests answered.", labels=["method", "route", "status"])
        for (method, route, status), count in self._answered.items():
            answered.add_metric([method, route, str(status)], count)
        yield answered
        meaning = "How long requests took; long polls include the wait."
        took = HistogramMetricFamily("agl_request_seconds", meaning, labels=["method", "route"])
        for asked, counts in self._took.items():
            upto = zip([*map(floatToGoString, _SECONDS), "+Inf"], itertools.accumulate(counts), strict=True)
            took.add_metric(asked, list(upto), self._seconds[asked])
        yield took


class _Now(Collector):
    """What is true at the moment of asking."""

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], int]]]) -> None:
        self._gauges = gauges
        self.statistics: Mapping[str, int] | None = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, (meaning, read) in self._gauges.items():
            yield GaugeMetricFamily(name, meaning, value=read())
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
