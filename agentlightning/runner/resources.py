"""The agent's view of the resources: looked up once per version, bound to each attempt. Knows nothing of agents."""

from __future__ import annotations

import asyncio

import msgspec

from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, AttemptedRollout, NamedResources, Resource

VERSIONS_KEPT = 32


class AgentResources(dict[str, Resource]):
    """Resources by name; agents written for Agent Lightning 0.3 find the policy, `llm`, under `main_llm`."""

    def __missing__(self, name: str) -> Resource:
        if name == "main_llm" and "llm" in self:
            return self["llm"]
        raise KeyError(name)


def serves_model(resources: NamedResources, rollout: AttemptedRollout) -> bool:
    """Whether one of the bound resources is a model behind the gateway."""
    return any(isinstance(one, LLM) and one.api_key == rollout.api_key is not None for one in resources.values())


class ResourceCache:
    """Resources by id, immutable and therefore cached; and their view for one attempt.

    The view of an `LLM` of the gateway names the attempt, in the URL and by the attempt's key. Any other is an endpoint
    of its own (a judge, a hosted model) and stays as it is: it gets no key of ours. `endpoint_override` replaces the
    gateway's URL where this process reaches it by another one."""

    def __init__(self, store: LightningStore, endpoint_override: str | None = None) -> None:
        self._store = store
        self._endpoint_override = endpoint_override
        self._versions: dict[str, NamedResources] = {}
        self._lookup = asyncio.Lock()  # a burst of leases asks the store once, not once each

    async def bound_to(self, rollout: AttemptedRollout) -> NamedResources:
        """The resources of `rollout` (the latest where it names none) for its present attempt.
        NotFoundError for an id that the store does not have."""
        if rollout.resources_id is None:
            latest = await self._store.get_latest_resources()
            resources = latest.resources if latest else {}
        else:
            resources = await self._version(rollout.resources_id)
        return AgentResources(
            {
                name: self._bind(resource, rollout) if isinstance(resource, LLM) else resource
                for name, resource in resources.items()
            }
        )

    async def _version(self, resources_id: str) -> NamedResources:
        async with self._lookup:
            if resources_id not in self._versions:
                update = await self._store.get_resources_by_id(resources_id)
                if update is None:
                    raise NotFoundError(f"the rollout names the resources {resources_id!r}, which the store lacks")
                if len(self._versions) == VERSIONS_KEPT:
                    del self._versions[next(iter(self._versions))]
                self._versions[resources_id] = update.resources
            return self._versions[resources_id]

    def _bind(self, llm: LLM, rollout: AttemptedRollout) -> LLM:
        if not llm.gateway:
            return llm
        if self._endpoint_override is not None:
            llm = msgspec.structs.replace(llm, endpoint=self._endpoint_override)
        endpoint = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        return msgspec.structs.replace(llm, endpoint=endpoint, api_key=rollout.api_key)
