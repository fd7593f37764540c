"""A class agent, in the style of Agent Lightning 0.3: one method for training, another for
validation, `main_llm`."""

from typing import Any, Dict, Optional, cast

from agentlightning.emitter import emit_annotation, find_final_reward
from agentlightning.litagent import LitAgent

import agentlightning as agl

agl.setup_logging(apply_to=[__name__])


class LitSQLAgent(agl.LitAgent[Dict[str, Any]]):
    def __init__(
        self, trained_agents: Optional[str] = None, val_temperature: Optional[float] = None
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        self.val_temperature = val_temperature

    def rollout(
        self, task: Dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast(agl.LLM, resources["main_llm"])
        attempted = cast(agl.AttemptedRollout, rollout)
        handler = self.tracer.get_langchain_handler()
        callbacks = [handler] if handler is not None else []
        if rollout.mode == "train":
            temperature = llm.sampling_parameters.get("temperature", 0.5)
        else:
            temperature = self.val_temperature
        url = llm.get_base_url(attempted.rollout_id, attempted.attempt.attempt_id)
        emit_annotation({"url": url, "temperature": temperature, "callbacks": len(callbacks)})
        return 1.0 if task["query"].startswith("SELECT") else 0.0


class TwoMinded(LitAgent[str]):
    async def training_rollout_async(
        self, task: str, resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float:
        return 1.0

    async def validation_rollout_async(
        self, task: str, resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float:
        return 0.5


class Notes(agl.Hook):
    async def on_trace_end(
        self, *, agent: Any, runner: Any, tracer: Any, rollout: agl.Rollout
    ) -> None:
        spans = tracer.get_last_trace()
        emit_annotation({"spans": len(spans), "reward": find_final_reward(spans) or 0.0})
