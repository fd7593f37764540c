"""The environment variables by which a process is an attempt's agent, whatever it is written in.

They are those that SDKs read by themselves (OpenAI's, Anthropic's, Google's, OpenTelemetry's), a few of our own, and
those of Agent Lightning 1.0 (AGL_OPENAI_BASE_URL, AGL_KEY, AGL_EVENT_URL). This module knows names of variables; it
does not start processes.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from urllib.parse import quote

from agentlightning.semconv import ATTEMPT_ID, ROLLOUT_ID
from agentlightning.types import LLM

current_server: ContextVar[str | None] = ContextVar("agentlightning_server", default=None)
"""The URL of the server that the runner of the running code leases from; None where its store is at hand."""

_OPENTELEMETRY = {
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "10000",  # of the 128 that is usual a long conversation takes more
}


def agent_environment(
    llm: LLM | None,
    rollout_id: str,
    attempt_id: str,
    server_url: str | None,
    api_key: str,
    *,
    reward_key: str | None = None,
) -> dict[str, str]:
    """Variables to add to those of a process, so that its LLM calls, spans and rewards are those of the attempt.

    Without `llm`, which is named as it is, there are no variables for LLM calls. `api_key` is the attempt's own, for
    spans sent to `server_url`, the root of the server; without it there are none for spans and rewards. With
    `reward_key` (`AttemptedRollout.reward_key`) the process may give its own rewards, at `AGL_REWARD_URL`."""
    variables = {"AGL_ROLLOUT_ID": rollout_id, "AGL_ATTEMPT_ID": attempt_id}
    if llm is not None:
        endpoint, key = llm.endpoint, llm.api_key or "none"
        variables |= {
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_API_BASE": endpoint,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": llm.model,
            "ANTHROPIC_BASE_URL": endpoint.rstrip("/").removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": llm.model,
            "GOOGLE_GEMINI_BASE_URL": endpoint.rstrip("/").removesuffix("/v1"),
            "GEMINI_API_KEY": key,
            "GEMINI_MODEL": llm.model,
            "AGL_MODEL": llm.model,
            "AGL_OPENAI_BASE_URL": endpoint,
            "AGL_KEY": key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it would send its traces to OpenAI, with a key not of theirs
        }
        if "GOOGLE_API_KEY" in os.environ:  # Google's SDK prefers it, and warns where both are set
            variables["GOOGLE_API_KEY"] = key
    if server_url is not None:
        root = server_url.rstrip("/").removesuffix("/v1")
        variables |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{root}/rollout/{rollout_id}/attempt/{attempt_id}",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{quote(api_key)}",
            "OTEL_RESOURCE_ATTRIBUTES": f"{ROLLOUT_ID}={quote(rollout_id)},{ATTEMPT_ID}={quote(attempt_id)}",
            **_OPENTELEMETRY,
        }
        if reward_key is not None:
            variables |= dict.fromkeys(("AGL_REWARD_URL", "AGL_EVENT_URL"), f"{root}/rewards/{reward_key}")
    return variables


def inherited_environment() -> dict[str, str]:
    """This process's variables for a program below it, without the keys that are ours alone, which open more than an
    agent's own, and without those that would come before the attempt's with an exporter."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("AGL_KEY", "AGL_BACKEND_KEY") and not name.startswith("OTEL_EXPORTER_OTLP_TRACES_")
    }
