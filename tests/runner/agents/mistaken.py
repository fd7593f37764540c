"""Agents with the commonest mistakes."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

import agentlightning as agl


def field(task: dict[str, Any], llm: agl.LLM) -> float:
    return float(task["qestion"])


def address(task: dict[str, Any], llm: agl.LLM) -> float:
    client = OpenAI(base_url="http://127.0.0.1:1/v1", api_key="k", max_retries=0)
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    return 1.0
