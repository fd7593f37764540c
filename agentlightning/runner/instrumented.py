"""The start of each Python process of a program under `--instrument`: switch instrumentation on,
and send the spans to the recording server.

It runs in the program's own environment, and knows no framework.
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
from urllib.parse import unquote

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.store.otel import span_of
from agentlightning.tracing.instrument import INSTRUMENT, instrument_from_environment

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExportResult

_HOOK: Final = Path(__file__).parent / "hook"  # Python imports the `sitecustomize` there by itself
_SEND_EVERY_MILLISECONDS: Final = 500
_ANSWER_SECONDS: Final = 10


def instrumenting() -> dict[str, str]:
    """Variables that make every Python process of a program call `start`; none if nothing is to be
    instrumented."""
    if INSTRUMENT not in os.environ:
        return {}
    path = os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))
    # what is instrumented is just that tracing
    return {"PYTHONPATH": path, "OPENAI_AGENTS_DISABLE_TRACING": "0"}


def start(hook: str) -> None:
    """Instrument this process. If that fails, say so on stderr and let the program run."""
    _import_own_sitecustomize(str(Path(hook).parent))
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider()
        # by its methods: OpenTelemetry is not imported before it is known to be there
        exporter: Any = _Exporter()
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=_SEND_EVERY_MILLISECONDS)
        )
        trace.set_tracer_provider(provider)
        instrument_from_environment()
    except ImportError as error:
        print(f"agl: not instrumented, {error}: pip install opentelemetry-sdk", file=sys.stderr)  # noqa: T201
    except (ConfigError, KeyError) as error:
        print(f"agl: not instrumented, {error}", file=sys.stderr)  # noqa: T201


def _import_own_sitecustomize(directory: str) -> None:
    """Import the environment's own `sitecustomize`, if there is one."""
    sys.path[:] = [path for path in sys.path if path != directory]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours


class _Exporter:
    """Posts spans of OpenTelemetry's SDK to the store's interface, in the thread of a span
    processor. The variables of `agent_environment` say where, and for which attempt."""

    def __init__(self) -> None:
        root = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"].partition("/rollout/")[0]
        self._url = f"{root}/api/v1/spans"
        key = unquote(os.environ["OTEL_EXPORTER_OTLP_HEADERS"].partition("=")[2])
        self._headers = {"authorization": key, "content-type": "application/json"}
        self._ids = os.environ["AGL_ROLLOUT_ID"], os.environ["AGL_ATTEMPT_ID"]

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        body = msgspec.json.encode({"spans": [span_of(*self._ids, None, span) for span in spans]})
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS):
                return SpanExportResult.SUCCESS
        except OSError as error:
            logging.getLogger(__name__).warning(
                "%d spans could not be recorded: %s", len(spans), error
            )
            return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is open."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True
