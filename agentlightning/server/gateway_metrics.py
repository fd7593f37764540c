"""The gateway's counts for `/metrics`. Knows what is counted, not how it is shown or who asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agentlightning.gateway.app import Gateway


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
            ("retried_calls", "Calls that a client repeated because it had not heard the answer.", counted.retried),
            ("undelivered_answers", "Answers whose client had left.", counted.undelivered),
            ("held_calls", "Recorded calls that waited while weights were updated.", counted.held),
            ("held_seconds", "For how long they waited in all.", counted.held_seconds),
            ("unrecorded_calls", "Calls that were answered and not recorded.", self._gateway.shed),
        ):
            yield CounterMetricFamily(f"agl_gateway_{name}", meaning, value=count)
