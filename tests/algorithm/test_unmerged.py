"""Prompts that do not go on from what was sampled, counted in the metrics of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_model, make_tokenizer

TASKS = [{"word": word} for word in ("apple", "ocean")]


@agl.rollout
async def two_agents(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
    """A writer that is asked twice, and a critic, whose first answer is sent back shortened."""
    client = agl.openai_client(llm)
    said = ""
    for name in ("writer", "critic"):
        history: list[Any] = [{"role": "system", "content": f"You are the {name}."}]
        for text in (task["word"], "quiet"):
            history.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(model=llm.model, messages=history)
            said += answer.choices[0].message.content or ""
            history.append({"role": "assistant", "content": said if name == "writer" else "apple"})
    return float(sum(letter in "aeiou" for letter in said))


def test_a_step_counts_rollouts_whose_calls_break_by_kind_and_agent(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["apple ocean quiet writer critic"] * 3, 300)
    model = Policy(make_model(tokenizer, seed=0), tokenizer)
    algorithm = agl.GRPO(steps=1, tasks_per_step=2, group_size=3, max_tokens=6, temperature=2.0)
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "max_sequence_length": 128}
    (first,) = agl.Trainer(model=model, algorithm=algorithm, **settings).fit(two_agents, TASKS).metrics
    values = first.values
    assert values["calls"] == 24
    assert values["unmerged/rollouts"] == 1.0
    assert values["unmerged/edited history"] == values["unmerged/critic/edited history"] == 6
    assert not any(name.startswith("unmerged/writer/edited") for name in values)
    saved, computed = values["tokens_saved"], values["tokens_computed"]
    assert values["tree_savings"] == saved / (saved + computed)
