"""Chooses the tracer of an attempt by what is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from agentlightning.errors import ConfigError, nearest
from agentlightning.tracing.context import AttemptTracer

TracerKind: TypeAlias = Literal["auto", "opentelemetry", "light"]


def choose_tracer(kind: TracerKind = "auto") -> Callable[[str, str], AttemptTracer]:
    """A function that makes an attempt's tracer from its rollout's id and its own.

    `light` records our emitters and operations; `opentelemetry` also records what OpenTelemetry's SDK traces in the
    attempt's code; `auto` is `opentelemetry` if the SDK is installed and not disabled. ConfigError for `opentelemetry`
    without the SDK, and for any other name."""
    if kind not in get_args(TracerKind):
        raise ConfigError(f"tracer is {kind!r}; {nearest(kind, get_args(TracerKind))}")
    if kind == "light":
        return AttemptTracer
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        missing = "OTEL_SDK_DISABLED switches it off; unset that variable"
    else:
        try:
            from agentlightning.tracing.opentelemetry import OpenTelemetryTracer

            return OpenTelemetryTracer
        except ImportError:
            missing = "which is not installed: pip install 'agent-lightning-next[otel]'"
    if kind == "opentelemetry":
        raise ConfigError(f"tracer='opentelemetry' needs OpenTelemetry's SDK; {missing}, or take tracer='auto'")
    return AttemptTracer
