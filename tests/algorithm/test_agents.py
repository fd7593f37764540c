"""Training some of the agents of a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import agentlightning as agl
from agentlightning.algorithm.base import NoProgress
from agentlightning.errors import TrainingError
from agentlightning.learner.policy import Policy, load_policy
from agentlightning.learner.tiny import make_model, make_tokenizer

TASKS = [{"word": word} for word in ("apple", "ocean", "quiet")]


@agl.rollout
async def two_agents(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
    """A writer, in the second step of training replaced by a poet, and a rewriter."""
    client = agl.openai_client(llm)
    said = ""
    for name in ("poet" if str(rollout.group_id).endswith("-v1") else "writer", "rewriter"):
        role, user = {"role": "system", "content": f"You are the {name}."}, {"role": "user", "content": task["word"]}
        answer = await client.chat.completions.create(model=llm.model, messages=[role, user])  # type: ignore[list-item]
        said += answer.choices[0].message.content or ""
    return float(sum(letter in "aeiou" for letter in said))


class Notes(NoProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def fit(directory: Path, chosen: str, steps: int, progress: NoProgress | None = None) -> Any:
    tokenizer = make_tokenizer(["apple ocean quiet"] * 3, 300)
    algorithm = agl.GRPO(steps=steps, tasks_per_step=2, group_size=3, max_tokens=6, temperature=2.0, agents=chosen)
    model = Policy(make_model(tokenizer, seed=0), tokenizer)
    settings: dict[str, Any] = {"run_dir": directory / "run", "max_sequence_length": 128, "progress": progress}
    return agl.Trainer(model=model, algorithm=algorithm, **settings).fit(two_agents, TASKS)


def test_only_the_chosen_agent_is_trained_and_a_step_without_it_says_so(tmp_path: Path) -> None:
    progress = Notes()
    first, second = fit(tmp_path, "Writer|critic", steps=2, progress=progress).metrics
    assert (first.values["calls"], first.values["excluded/other agent"]) == (6, 6)
    assert (second.values["calls"], second.values["excluded/other agent"]) == (0, 12)
    assert [note for note in progress.notes if "step 2" in note] == [
        "step 2 trains nothing: none of the calls is by an agent that agents='Writer|critic' names; the agents here "
        "are poet, rewriter"
    ]


def test_names_that_no_agent_has_end_the_run_at_once_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="agents='editor' names; the agents here are rewriter, writer"):
        fit(tmp_path, "editor", steps=2)


@agl.rollout
async def writer_and_checker(task: Any, resources: agl.NamedResources) -> float:
    """Each with a model of its own."""
    said = ""
    for name in ("writer", "checker"):
        llm = resources[name]
        assert isinstance(llm, agl.LLM)
        role, user = {"role": "system", "content": f"You are the {name}."}, {"role": "user", "content": task["word"]}
        client = agl.openai_client(llm)
        answer = await client.chat.completions.create(model=llm.model, messages=[role, user])  # type: ignore[list-item]
        said += answer.choices[0].message.content or ""
    return float(sum(letter in "aeiou" for letter in said))


def test_the_model_of_an_agent_that_is_not_chosen_stays_as_it_was(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["apple ocean quiet"] * 3, 300)
    models = {name: Policy(make_model(tokenizer, seed=0), tokenizer) for name in ("writer", "checker")}
    algorithm = agl.GRPO(steps=2, tasks_per_step=2, group_size=4, max_tokens=6, temperature=2.0, agents="writer")
    result = agl.Trainer(
        model=models, algorithm=algorithm, run_dir=tmp_path / "run", max_sequence_length=128, seed=1
    ).fit(writer_and_checker, TASKS)
    before = make_model(tokenizer, seed=0).state_dict()
    assert result.checkpoint is not None
    after = {name: load_policy(result.checkpoint / name).model.state_dict() for name in models}
    assert all(torch.equal(after["checker"][key], value) for key, value in before.items())
    assert not all(torch.equal(after["writer"][key], value) for key, value in before.items())
