"""Agents under the module name that Agent Lightning 0.3 gave them."""

from agentlightning.runner.agent import LitAgent, llm_rollout, prompt_rollout, rollout

__all__ = ["LitAgent", "llm_rollout", "prompt_rollout", "rollout"]
