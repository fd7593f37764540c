"""Training some of the agents of a program, and what a step measures of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import agentlightning as agl
from agentlightning.errors import TrainingError
from agentlightning.learner.policy import load_policy
from tests.algorithm.test_tracking import Notes
from tests.test_trainer import TASKS, algorithm, policy, trainer


async def asked(llm: agl.LLM, name: str, *history: Any) -> str:
    role: Any = {"role": "system", "content": f"You are the {name}."}
    answer = await agl.openai_client(llm).chat.completions.create(
        model=llm.model, messages=[role, *history]
    )
    return answer.choices[0].message.content or ""


def vowels(text: str) -> float:
    return float(sum(letter in "aeiou" for letter in text))


async def two_agents(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
    """A writer, in the second step of training replaced by a poet, and a rewriter whose answer is
    sent back edited."""
    first = {"role": "user", "content": task["word"]}
    text = await asked(llm, "poet" if str(rollout.group_id).endswith("-v1") else "writer", first)
    text += await asked(llm, "rewriter", first)
    more = [{"role": "assistant", "content": "apple"}, {"role": "user", "content": "quiet"}]
    return vowels(text + await asked(llm, "rewriter", first, *more))


def test_only_the_chosen_agent_is_trained_and_a_step_without_it_says_so(tmp_path: Path) -> None:
    progress = Notes()
    writer = algorithm(tasks_per_step=2, group_size=3, agents="Writer|critic")
    first, second = (
        trainer(tmp_path, algorithm=writer, progress=progress).fit(two_agents, TASKS).metrics
    )
    assert (first.values["calls"], first.values["excluded/other agent"]) == (6, 12)
    assert (second.values["calls"], second.values["excluded/other agent"]) == (0, 18)
    (note,) = [note for note in progress.notes if "step 2 trains nothing" in note]
    assert "'Writer|critic'" in note and "poet, rewriter" in note


def test_names_that_no_agent_has_end_the_run_at_once_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match="agents='editor' names; the agents here are rewriter, writer"
    ):
        trainer(tmp_path, algorithm=algorithm(agents="editor")).fit(two_agents, TASKS)


def test_a_step_counts_rollouts_whose_calls_break_by_kind_and_agent(tmp_path: Path) -> None:
    once = algorithm(steps=1, tasks_per_step=2, group_size=3)
    values = trainer(tmp_path, algorithm=once).fit(two_agents, TASKS).metrics[-1].values
    assert (values["calls"], values["unmerged/rollouts"]) == (18, 1.0)
    assert values["unmerged/edited history"] == values["unmerged/rewriter/edited history"] == 6
    assert not any(name.startswith("unmerged/writer/edited") for name in values)
    saved, computed = values["tokens_saved"], values["tokens_computed"]
    assert values["tree_savings"] == saved / (saved + computed)


async def writer_and_checker(task: Any, resources: agl.NamedResources) -> float:
    """Each with a model of its own."""
    text = ""
    for name in ("writer", "checker"):
        llm = resources[name]
        assert isinstance(llm, agl.LLM)
        text += await asked(llm, name, {"role": "user", "content": task["word"]})
    return vowels(text)


def test_the_model_of_an_agent_that_is_not_chosen_keeps_its_weights(tmp_path: Path) -> None:
    models = {name: policy() for name in ("writer", "checker")}
    result = trainer(tmp_path, model=models, algorithm=algorithm(agents="writer")).fit(
        writer_and_checker, TASKS
    )
    assert result.checkpoint is not None
    before = policy().model.state_dict()
    after = {name: load_policy(result.checkpoint / name).model.state_dict() for name in models}
    changed = {
        name: not all(torch.equal(after[name][key], before[key]) for key in before)
        for name in models
    }
    assert changed == {"writer": True, "checker": False}
