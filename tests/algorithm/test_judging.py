"""Training without a reward function: a judge ranks the rollouts of each group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import agentlightning as agl
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.rewards import RelativeJudge
from tests import agents
from tests.gateway.world import serving
from tests.rewards.test_relative import Longest
from tests.test_trainer import TASKS, algorithm, trainer

pytestmark = pytest.mark.anyio


@agl.rollout
async def unrewarded(task: dict, llm: agl.LLM) -> None:
    """Says something, which nobody here can judge."""
    await agents.ask(task, llm)


class Judging(Longest):
    """Prefers the longer attempt, with a key."""

    keys: list[str | None]

    async def answer(self, request: Request) -> JSONResponse:
        self.keys = [*getattr(self, "keys", []), request.headers.get("authorization")]
        return await super().answer(request)


def train(tmp_path: Path, url: str, steps: int = 2, **changes: Any) -> Any:
    judge = RelativeJudge(agl.LLM(endpoint=url, model="m"), "The longer, the better.", timeout=5.0)
    chosen = algorithm(steps=steps, judge=judge, checkpoint_every=1)
    return trainer(tmp_path, algorithm=chosen, progress=False, **changes)


async def test_a_judge_gives_the_rewards_of_a_training_and_no_group_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-judge")
    server = Judging()
    app = Starlette(routes=[Route("/{path:path}", server.answer, methods=["POST"])])
    async with serving(app) as url:
        for steps in (2, 3):
            result = await train(tmp_path, url, steps, resume=steps > 2).fit_async(
                unrewarded, TASKS
            )
    assert len(server.asked) <= 2 * 3 * 3  # twice for each of three groups in three steps
    assert set(server.keys) == {"Bearer of-the-judge"}
    for metrics in result.metrics:
        assert 0 < metrics.values["reward"] < 1
        assert metrics.values["unrewarded"] == 0
        assert metrics.values["judge_agreement"] == 1
        assert metrics.values["sequences"] > 0
    assert "of-the-judge" not in (result.directory / "metrics.jsonl").read_text()


async def test_a_group_that_the_judge_does_not_rank_gets_no_reward(tmp_path: Path) -> None:
    server = Longest()
    server.said = "They are all fine."
    app = Starlette(routes=[Route("/{path:path}", server.answer, methods=["POST"])])
    async with serving(app) as url:
        with pytest.raises(TrainingError, match="none of 12 rollouts was rewarded"):
            await train(tmp_path, url).fit_async(unrewarded, TASKS)


async def test_a_judge_that_cannot_be_asked_ends_the_training(tmp_path: Path) -> None:
    app = Starlette()
    async with serving(app) as url:
        with pytest.raises(TrainingError, match=r"judge cannot be asked: .* answered 404"):
            await train(tmp_path, url).fit_async(unrewarded, TASKS)


async def test_a_judge_needs_groups_and_cannot_measure_held_out_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set group_size to 2 or more"):
        algorithm(
            group_size=1,
            baseline="none",
            judge=RelativeJudge(agl.LLM(endpoint="x", model="m"), "Go."),
        )
    with pytest.raises(ConfigError, match="held-out tasks need a reward that the agent gives"):
        await train(tmp_path, "http://127.0.0.1:9").fit_async(unrewarded, TASKS, TASKS[:2])
