"""Environments of public hubs: tasks, the agent that plays them and its rewards in one.

    environment = agl.environments.verifiers("reverse-text")
    agl.Trainer(model="Qwen/Qwen3-0.6B").fit(environment)

Each hub's package is an extra, imported when tasks are read or played.
"""

from __future__ import annotations

from agentlightning.environments.harbor_datasets import HarborTasks as harbor
from agentlightning.environments.inspect_tasks import InspectTask as inspect
from agentlightning.environments.openenv_servers import OpenEnvServer as openenv
from agentlightning.environments.verifiers_tasksets import VerifiersTaskset as verifiers

HUBS = {"verifiers": verifiers, "inspect": inspect, "openenv": openenv, "harbor": harbor}
