"""Weights learn with the prompts that a search has found, and are served with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.run_file import load_config
from agentlightning.cli.server_commands import trained_with
from agentlightning.errors import ConfigError
from agentlightning.store.sql import SqlStore
from tests.test_trainer import TASKS, algorithm, trainer

CANDIDATE = {
    "resource_type": "prompts",
    "components": {
        "guide.system": {"place": "system", "sent": "You guide.", "text": "You guide in verse."}
    },
}


@agl.rollout
async def guide(task: dict, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    messages: list[Any] = [
        {"role": "system", "content": "You guide."},
        {"role": "user", "content": task["word"]},
    ]
    answer = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(len(answer.choices[0].message.content or "") % 5)


@pytest.mark.anyio
@pytest.mark.slow
async def test_weights_learn_with_the_prompts_of_a_search(tmp_path: Path) -> None:
    found = tmp_path / "search" / "prompts.json"
    found.parent.mkdir()
    found.write_text(json.dumps(CANDIDATE))
    given = {"prompts": str(found.parent)}
    learning = trainer(tmp_path, algorithm=algorithm(steps=1), initial_resources=given)
    result = await learning.fit_async(guide, TASKS)
    store = await SqlStore.open(tmp_path / "run" / "store.sqlite")
    spans = [
        span
        for one in await store.query_rollouts()
        for span in await store.query_spans(one.rollout_id)
    ]
    await store.close()
    calls = [span for span in spans if "gen_ai.input.messages" in span.attributes]
    assert len(calls) == 12
    for call in calls:
        assert "You guide in verse." in str(call.attributes["gen_ai.input.messages"])
        assert call.tokens is not None and len(call.tokens.prompt_token_ids) > 0
    assert result.checkpoint is not None
    assert json.loads((tmp_path / "run" / "prompts.json").read_text()) == CANDIDATE
    assert trained_with(result.checkpoint) is not None
    assert trained_with(tmp_path) is None


def test_a_run_file_names_the_run_whose_prompts_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "gepa-1"
    folder.mkdir(parents=True)
    (folder / "prompts.json").write_text(json.dumps(CANDIDATE))
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "agent: a.py:f\ntrain_dataset: t.csv\ninitial_resources: {prompts: runs/gepa-1}\n"
    )
    candidate = load_config(run_file).candidate
    assert candidate is not None and "guide.system" in candidate.components
    run_file.write_text(
        "agent: a.py:f\ntrain_dataset: t.csv\ninitial_resources: {prompts: runs/gone}\n"
    )
    with pytest.raises(ConfigError, match="there is no candidate at"):
        load_config(run_file).candidate  # noqa: B018
