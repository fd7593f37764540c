"""Environments of the world's hubs: tasks, the agent that plays them and its rewards, in one.

    environment = agl.environments.verifiers("reverse-text")
    agl.Trainer(model="Qwen/Qwen3-0.6B").fit(environment)

Each hub's package is an extra, imported when tasks are read or played.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.environments.base import Environment as Environment
from agentlightning.environments.harbor_datasets import HarborTasks as harbor
from agentlightning.environments.inspect_tasks import InspectTask as inspect
from agentlightning.environments.openenv_servers import OpenEnvServer as openenv
from agentlightning.environments.verifiers_tasksets import VerifiersTaskset as verifiers
from agentlightning.errors import ConfigError, nearest

__all__ = ["Environment", "harbor", "inspect", "open_environment", "openenv", "verifiers"]

HUBS: Final[Mapping[str, type[Environment]]] = {
    "verifiers": verifiers,
    "inspect": inspect,
    "openenv": openenv,
    "harbor": harbor,
}


def open_environment(name: str, settings: Mapping[str, Any]) -> Environment:
    """The environment `HUB:NAME`. ConfigError where there is no such hub, or it has no such setting."""
    hub, _, own = name.partition(":")
    if hub not in HUBS or not own:
        raise ConfigError(f"{name!r} names no environment; write HUB:NAME. Hubs: {nearest(hub, HUBS)}")
    known = [one.name for one in dataclasses.fields(HUBS[hub])]
    if unknown := [key for key in settings if key not in known]:
        raise ConfigError(f"environment: unknown key {unknown[0]!r}; {nearest(unknown[0], known)}")
    return HUBS[hub](own, **settings)
