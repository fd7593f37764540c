"""The environment of an attempt's agent: resources that belong to the attempt and, for a process,
their environment variables.

The variables are those of OpenAI's, Anthropic's, Google's and OpenTelemetry's SDKs, a few of our
own, and those of Agent Lightning 1.0 (AGL_OPENAI_BASE_URL, AGL_KEY, AGL_EVENT_URL)."""

from __future__ import annotations

import asyncio
import os
from contextvars import ContextVar
from urllib.parse import quote

import msgspec

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.semconv import ATTEMPT_ID, ROLLOUT_ID
from agentlightning.store.base import LightningStore
from agentlightning.types import (
    LLM,
    OWN_ENDPOINT,
    AttemptedRollout,
    NamedResources,
    PromptCandidate,
    Resource,
)

current_server: ContextVar[str | None] = ContextVar("agentlightning_server", default=None)
"""The URL of the server that the runner of the running code leases from; None where its store is at
hand."""

_OPENTELEMETRY = {
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    # of the 128 that is usual a long conversation takes more
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "10000",
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
    """Variables for a process, so that its LLM calls, spans and rewards belong to the attempt.

    Without `llm`, there are none for LLM calls, and for the model `*` none that name it. `api_key`
    is the attempt's key for spans to `server_url`, the root of the server; without it, there are
    none for spans and rewards. With `reward_key` (`AttemptedRollout.reward_key`) the process may
    post rewards to `AGL_REWARD_URL`."""
    variables = {"AGL_ROLLOUT_ID": rollout_id, "AGL_ATTEMPT_ID": attempt_id}
    if llm is not None:
        endpoint = llm.endpoint
        root = endpoint.rstrip("/").removesuffix("/v1")
        key = llm.api_key or "none"
        variables |= {
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_API_BASE": endpoint,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": root,
            "GEMINI_API_KEY": key,
            "AGL_OPENAI_BASE_URL": endpoint,
            "AGL_KEY": key,
            # it would send its traces to OpenAI, with a key not of theirs
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        if "GOOGLE_API_KEY" in os.environ:  # Google's SDK prefers it, and warns where both are set
            variables["GOOGLE_API_KEY"] = key
        if llm.model != "*":  # any: the program knows which models it asks for
            variables |= dict.fromkeys(
                ("OPENAI_MODEL", "ANTHROPIC_MODEL", "GEMINI_MODEL", "AGL_MODEL"), llm.model
            )
    if server_url is not None:
        root = server_url.rstrip("/").removesuffix("/v1")
        variables |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{root}/rollout/{rollout_id}/attempt/{attempt_id}",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{quote(api_key)}",
            "OTEL_RESOURCE_ATTRIBUTES": (
                f"{ROLLOUT_ID}={quote(rollout_id)},{ATTEMPT_ID}={quote(attempt_id)}"
            ),
            **_OPENTELEMETRY,
        }
        if reward_key is not None:
            variables |= dict.fromkeys(
                ("AGL_REWARD_URL", "AGL_EVENT_URL"), f"{root}/rewards/{reward_key}"
            )
    return variables


def inherited_environment() -> dict[str, str]:
    """This process's variables for a child program, without our keys, which open more than an
    agent's, and without those that an exporter would prefer to the attempt's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("AGL_KEY", "AGL_BACKEND_KEY")
        and not name.startswith("OTEL_EXPORTER_OTLP_TRACES_")
    }


# --- resources ------------------------------------------------------------------------------------


class AgentResources(dict[str, Resource]):
    """Resources by name. Agents written for Agent Lightning 0.3 find `llm` under `main_llm`."""

    def __missing__(self, name: str) -> Resource:
        if name == "main_llm" and "llm" in self:
            return self["llm"]
        raise KeyError(name)


def serves_model(resources: NamedResources, rollout: AttemptedRollout) -> bool:
    """Whether one of the resources is a model behind the gateway."""
    return rollout.api_key is not None and rollout.api_key in [
        resource.api_key for resource in resources.values() if isinstance(resource, LLM)
    ]


class ResourceCache:
    """Immutable resources by id, and their form for one attempt. Candidates are for the gateway.

    An `LLM` of the gateway names the attempt in its URL and key. Any other endpoint (a judge, a
    hosted model) stays unchanged and gets no key of ours. `endpoint_override` replaces the
    gateway's URL if this process reaches it by another."""

    def __init__(self, store: LightningStore, endpoint_override: str | None = None) -> None:
        self._store = store
        self._endpoint_override = endpoint_override
        self._versions: dict[str, NamedResources] = {}
        self._lookup = asyncio.Lock()  # a burst of leases asks the store once, not once each

    async def bound_to(self, rollout: AttemptedRollout) -> NamedResources:
        """The resources of `rollout`, or the latest if it names none, for its current attempt.
        NotFoundError for an unknown id."""
        if rollout.resources_id is None:
            latest = await self._store.get_latest_resources()
            resources = latest.resources if latest else {}
        else:
            resources = await self._version(rollout.resources_id)
        return AgentResources(
            {
                name: self._bind(resource, rollout) if isinstance(resource, LLM) else resource
                for name, resource in resources.items()
                if not isinstance(resource, PromptCandidate)
            }
        )

    async def _version(self, resources_id: str) -> NamedResources:
        async with self._lookup:
            if resources_id not in self._versions:
                update = await self._store.get_resources_by_id(resources_id)
                if update is None:
                    raise NotFoundError(
                        f"the rollout names the resources {resources_id!r}, which the store lacks"
                    )
                if len(self._versions) == 32:
                    self._versions.clear()
                self._versions[resources_id] = update.resources
            return self._versions[resources_id]

    def _bind(self, llm: LLM, rollout: AttemptedRollout) -> LLM:
        if not llm.gateway:
            return llm
        endpoint = self._endpoint_override
        if endpoint is None and llm.endpoint == OWN_ENDPOINT:
            server = getattr(self._store, "url", None)
            if server is None:
                raise ConfigError(
                    f"{llm.model} is a model of an `agl server`: run its rollouts with --server URL"
                )
            endpoint = f"{server}{OWN_ENDPOINT}"
        if endpoint is not None:
            llm = msgspec.structs.replace(llm, endpoint=endpoint)
        endpoint = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        return msgspec.structs.replace(llm, endpoint=endpoint, api_key=rollout.api_key)
