"""The variables by which SDKs of any language find an attempt's model, traces and rewards."""

from __future__ import annotations

import pytest

from agentlightning.runner.environment import agent_environment
from agentlightning.types import LLM

IDS = "R", "A"


def test_every_url_names_the_attempt() -> None:
    llm = LLM(endpoint="http://host:1/rollout/R/attempt/A/v1", model="policy", api_key="agl-key")
    variables = agent_environment(llm, *IDS, "http://host:1", "agl-key")
    assert variables["OPENAI_BASE_URL"] == variables["OPENAI_API_BASE"] == "http://host:1/rollout/R/attempt/A/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://host:1/rollout/R/attempt/A"  # its SDK adds /v1
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://host:1/rollout/R/attempt/A"
    assert variables["GOOGLE_GEMINI_BASE_URL"] == variables["ANTHROPIC_BASE_URL"]  # /v1beta
    assert variables["GEMINI_API_KEY"] == variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "agl-key"
    assert variables["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=Bearer%20agl-key"
    assert variables["AGL_MODEL"] == "policy"


@pytest.mark.parametrize(("key", "sent"), [("theirs", "theirs"), (None, "none")])
def test_a_model_elsewhere_keeps_its_url_and_gets_no_key_of_ours(key: str | None, sent: str) -> None:
    llm = LLM(endpoint="https://hosted/v1", model="large", api_key=key)
    variables = agent_environment(llm, *IDS, "http://host:1", "agl-key")
    assert (variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]) == ("https://hosted/v1", sent)
    assert "agl-key" in variables["OTEL_EXPORTER_OTLP_HEADERS"]


def test_what_is_not_there_has_no_variable() -> None:
    assert agent_environment(None, *IDS, None, "agl-key") == {"AGL_ROLLOUT_ID": "R", "AGL_ATTEMPT_ID": "A"}


def test_rewards_are_given_only_by_whom_they_are_entrusted_to() -> None:
    assert "AGL_REWARD_URL" not in agent_environment(None, *IDS, "http://host:1", "agl-key")
    trusted = agent_environment(None, *IDS, "http://host:1/", "agl-key", reward_key="agl-reward")
    assert trusted["AGL_REWARD_URL"] == "http://host:1/rewards/agl-reward"
