"""What `agl run --instrument` has each Python process of the program do before anything else: switch instrumentation
on, and send the spans to the server that records.

It runs in the program's own environment. It knows how the two are told of each other, and no framework.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.store.otel import span_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExportResult

_VARIABLE: Final = "AGL_INSTRUMENT"
_SEND_EVERY_MILLISECONDS: Final = 500
_ANSWER_SECONDS: Final = 10


class Told(msgspec.Struct, frozen=True):
    """What the program's processes are told. Without `names` everything that can be instrumented is."""

    names: tuple[str, ...]
    url: str  # that spans are posted to
    key: str
    rollout_id: str
    attempt_id: str


def variables(told: Told, directory: Path) -> dict[str, str]:
    """The environment that makes every Python process below call `start`: Python imports `sitecustomize` by itself,
    and finds the one in `directory` first."""
    (directory / "sitecustomize.py").write_text(
        "from agentlightning.cli import instrumented\n\ninstrumented.start(__file__)\n", encoding="utf-8"
    )
    before = os.environ.get("PYTHONPATH")
    path = str(directory) if not before else f"{directory}{os.pathsep}{before}"
    return {_VARIABLE: msgspec.json.encode(told).decode(), "PYTHONPATH": path}


def start(hook: str) -> None:
    """Instrument this process; what prevents that is said on stderr, and the program runs on without it."""
    _make_way(str(Path(hook).parent))
    told = msgspec.json.decode(os.environ[_VARIABLE], type=Told)
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from agentlightning.tracing.instrument import instrument

        provider = TracerProvider()
        exporter: Any = _Exporter(told)  # by its methods: OpenTelemetry is not imported before it is known to be there
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_SEND_EVERY_MILLISECONDS))
        trace.set_tracer_provider(provider)
        instrument(*told.names)
    except ImportError as error:
        print(f"agl run: not instrumented, {error}: pip install opentelemetry-sdk", file=sys.stderr)
    except ConfigError as error:
        print(f"agl run: not instrumented, {error}", file=sys.stderr)


def _make_way(directory: str) -> None:
    """Import the `sitecustomize` that the environment may have of its own."""
    sys.path[:] = [path for path in sys.path if path != directory]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours


class _Exporter:
    """Posts spans of OpenTelemetry's SDK to the store's interface, in the thread of a span processor."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        told = self._told
        body = msgspec.json.encode({"spans": [span_of(told.rollout_id, told.attempt_id, None, span) for span in spans]})
        headers = {"authorization": f"Bearer {told.key}", "content-type": "application/json"}
        request = urllib.request.Request(told.url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS):
                return SpanExportResult.SUCCESS
        except OSError as error:
            logging.getLogger(__name__).warning("%d spans could not be recorded: %s", len(spans), error)
            return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is kept open."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True
