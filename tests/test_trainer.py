"""The whole house: an agent over real HTTP, a real store, a real tiny transformer, trained for a
few steps."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentlightning as agl
from agentlightning import semconv
from agentlightning.algorithm.base import NoProgress, RunContext, Stopped
from agentlightning.cli.main import run
from agentlightning.data.rewards import UNCLEAR
from agentlightning.data.transitions import trace_rollout
from agentlightning.engine.service import EngineService
from agentlightning.errors import ConfigError, ForbiddenError, TrainingError
from agentlightning.gateway.gates import Gate
from agentlightning.learner.policy import Policy
from agentlightning.learner.policy_config import AdamW, LoRA
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.learner.torch import TorchLearner
from agentlightning.server.app import ServerSettings
from agentlightning.server.server_process import running_server
from agentlightning.store.base import CALLS
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.instrument import INSTRUMENT
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.trainer import Trainer
from agentlightning.types import AttemptedRollout, RolloutConfig
from tests import agents
from tests.runner.world import serving as hosted_model

WORDS = ["apple", "ocean", "quiet", "umber", "stone", "river", "cloud", "eagle"]
TASKS = [{"word": word, "index": index} for index, word in enumerate(WORDS)]


def policy(seed: int = 0) -> Policy:
    tokenizer = make_tokenizer([" ".join(WORDS)] * 3, 300)
    return Policy(make_model(tokenizer, seed=seed), tokenizer)


def algorithm(**changes: Any) -> agl.GRPO:
    return agl.GRPO(
        **(
            {"steps": 2, "tasks_per_step": 3, "group_size": 4, "max_tokens": 6, "temperature": 2.0}
            | changes
        )
    )


def trainer(tmp_path: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "model": policy(),
        "algorithm": algorithm(),
        "run_dir": tmp_path / "run",
    }
    return Trainer(
        **(
            settings
            | {"optimizer": AdamW(learning_rate=1e-3), "max_sequence_length": 128}
            | changes
        )
    )


@pytest.fixture
def held_in_steps(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Per gradient step the models whose calls are held, at whatever gateway, while it is made."""
    gates: set[Gate] = set()
    seen: list[set[str]] = []
    hold, step = Gate.hold, TorchLearner.step

    def listening_hold(self: Gate, *arguments: Any) -> None:
        gates.add(self)
        hold(self, *arguments)

    def listening_step(self: Any, batch: Any, *rest: Any) -> Any:
        seen.append({gate.name for gate in gates if gate.held})
        return step(self, batch, *rest)

    monkeypatch.setattr(Gate, "hold", listening_hold)
    monkeypatch.setattr(TorchLearner, "step", listening_step)
    return seen


def test_training_goes_through_the_whole_house(
    tmp_path: Path, held_in_steps: list[set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer(tmp_path, seed=7).fit(agents.vowels, TASKS, TASKS[:2])
    assert result.stopped_because == "all steps done"
    assert [evaluation.step for evaluation in result.evaluations] == [0, 2]
    assert [metrics.step for metrics in result.metrics] == [0, 1, 2]
    expected = {"rollouts": 12, "calls": 24, "unrewarded": 0, "policy_version": 1}
    assert expected.items() <= result.metrics[1].values.items()
    assert result.metrics[1].values["inference_mismatch"] < 1e-4
    assert held_in_steps == [{"policy"}, {"policy"}]
    shown = capsys.readouterr().err
    assert "step 1/2" in shown and "step 2/2" in shown and "dashboard: http://" in shown
    assert result.checkpoint is not None
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert not torch.equal(
        model.get_input_embeddings().weight, policy().model.get_input_embeddings().weight
    )

    run, rollouts, group, traced = asyncio.run(recorded(result.directory))
    assert run.status == "succeeded" and run.manifest["seed"] == 7
    assert (
        run.manifest["config"]["algorithm"]["group_size"]
        == group.size
        == len(group.rollout_ids)
        == 4
    )
    assert (
        run.manifest["data"]["train"]["tasks"] == len(TASKS) and run.manifest["packages"]["torch"]
    )
    assert {rollout.group_index for rollout in rollouts} == {0, 1, 2, 3}
    assert len(traced.transitions) == 2 and traced.reward is not None

    with pytest.raises(ConfigError, match="holds a run already"):
        trainer(tmp_path, seed=7).fit(agents.vowels, TASKS)
    for wrong, val_tasks, said in (
        ({"seed": 9}, TASKS[:2], "started with seed 7, not 9"),
        ({"seed": 7}, TASKS[:3], "val dataset is not the one"),
    ):
        with pytest.raises(ConfigError, match=said):
            trainer(tmp_path, **wrong).fit(agents.vowels, TASKS, val_tasks, resume=True)
    more = trainer(tmp_path, seed=7, algorithm=algorithm(steps=3))
    again = more.fit(agents.vowels, TASKS, TASKS[:2], resume=True)
    assert again.run_id == result.run_id
    assert [metrics.step for metrics in again.metrics] == [0, 1, 2, 3]
    assert again.metrics[3].values["policy_version"] == 3
    assert again.evaluations[0].reward == result.evaluations[0].reward


async def recorded(directory: Path) -> Any:
    """The run, its training rollouts, the first one's group, and what it trains on."""
    store = await SqlStore.open(directory / "store.sqlite")
    (run,) = await store.query_runs()
    rollouts = await store.query_rollouts(run_id=run.run_id, mode_in=["train"])
    group = await store.get_group(rollouts[0].group_id or "")
    spans = await store.query_spans(rollouts[0].rollout_id)
    await store.close()
    return run, rollouts, group, trace_rollout(rollouts[0], spans)


def test_every_token_trained_is_one_the_engine_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and logprobs at the engine's mouth, and again in the batch of each gradient step."""
    sampled, trained = set[Any](), list[Any]()
    generate, step = EngineService.generate, TorchLearner.step

    async def listening_generate(self: Any, request: Any) -> Any:
        async for tokens in generate(self, request):
            assert request.whole
            ids, logprobs = (
                tuple(t.token_id for t in tokens),
                tuple(float(np.float32(t.logprob)) for t in tokens),
            )
            sampled.add((tuple(request.prompt_token_ids), ids, logprobs))
            yield tokens

    def listening_step(self: Any, batch: Any, *rest: Any) -> Any:
        for sequence in batch:
            for number in np.unique(sequence.transitions):
                own = sequence.transitions == number
                positions, ids = sequence.positions[own], sequence.token_ids
                parts = ids[: positions[0]], ids[positions], sequence.logprobs[own]
                trained.append(tuple(tuple(part.tolist()) for part in parts))
        return step(self, batch, *rest)

    monkeypatch.setattr(EngineService, "generate", listening_generate)
    monkeypatch.setattr(TorchLearner, "step", listening_step)
    trainer(tmp_path, progress=False).fit(agents.vowels, TASKS)
    assert len(trained) >= 24
    assert set(trained) <= sampled
    assert capsys.readouterr().err == ""


@pytest.mark.anyio
async def test_calls_through_a_server_are_held_while_the_policy_learns(
    tmp_path: Path, held_in_steps: list[set[str]]
) -> None:
    async with running_server(ServerSettings(store=str(tmp_path / "store.sqlite"))) as server:
        await trainer(tmp_path, server=server.url).fit_async(agents.vowels, TASKS)
    assert held_in_steps == [{"policy"}, {"policy"}]


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (agents.raises, "RuntimeError: the tool server is gone"),
        (agents.not_a_number, "(?i)nan"),
        (agents.nonsense, "(?i)str"),
        (agents.hangs, "timeout"),
    ],
)
def test_an_agent_that_never_succeeds_ends_the_run_in_clear_words(
    tmp_path: Path, agent: Any, said: str
) -> None:
    impatient = algorithm(
        steps=1, rollout=RolloutConfig(timeout_seconds=0.3 if agent is agents.hangs else None)
    )
    with pytest.raises(TrainingError, match=said):
        trainer(tmp_path, algorithm=impatient).fit(agent, TASKS)


def test_rollouts_that_fail_are_left_out_and_counted(tmp_path: Path) -> None:
    tasks = [{**task, 1: "one"} for task in TASKS]  # numbers may be keys
    result = trainer(tmp_path, algorithm=algorithm(steps=1, tasks_per_step=8)).fit(
        agents.raises_on_odd, tasks
    )
    assert {"unrewarded": 16, "groups_too_few_rewarded": 4}.items() <= result.metrics[
        -1
    ].values.items()


def test_rewards_of_sub_agents_side_by_side_reach_their_own_calls_or_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"word": "ocean", "client": client} for client in ("agl", "openai", "urllib")]
    result = trainer(
        tmp_path, algorithm=algorithm(steps=1, returns="air_dense", baseline="dr_grpo")
    ).fit(agents.rewards_side_by_side, tasks)
    assert result.metrics[-1].values[f"rewards_lost/{UNCLEAR}"] == 12.0
    assert f"12 intermediate rewards count for no call, {UNCLEAR}" in capfd.readouterr().err

    async def received() -> set[tuple[str, tuple[tuple[str, float | None], ...]]]:
        found: set[Any] = set()
        async with AsyncExitStack() as stack:
            store = await SqlStore.open(tmp_path / "run" / "store.sqlite")
            stack.push_async_callback(store.close)
            for rollout in await store.query_rollouts():
                calls = trace_rollout(
                    rollout, await store.query_spans(rollout.rollout_id)
                ).transitions
                names = [
                    policy().tokenizer.decode(call.prompt_ids).split("ocean ")[1][0]
                    for call in calls
                ]
                given = sorted((name, call.reward) for name, call in zip(names, calls, strict=True))
                found.add((rollout.input["client"], tuple(given)))
        return found

    own = (("a", 1.0), ("b", 2.0), ("c", 3.0))
    none = (("a", None), ("b", None), ("c", None))
    assert asyncio.run(received()) == {("agl", own), ("openai", own), ("urllib", none)}

    file = tmp_path / "calls.parquet"
    assert (
        run(
            [
                "export",
                str(file),
                "--format",
                "parquet",
                "--store",
                str(tmp_path / "run" / "store.sqlite"),
            ]
        )
        == 0
    )
    assert "note: excluded is empty: every call trains" in capfd.readouterr().out
    rows = pandas.read_parquet(file)
    assert set(rows["step"]) == {1} and rows["trained"].all()
    of_rollouts = (
        rows.groupby(["group_id", "rollout_id"])["return"].mean().groupby("group_id").mean()
    )
    expected = rows["return"] - rows["group_id"].map(of_rollouts)
    np.testing.assert_allclose(
        rows["advantages"].map(lambda tokens: tokens[0]), expected, atol=1e-6
    )


@pytest.mark.parametrize(
    "measured",
    [
        lambda one: one.fit(agents.never_calls, TASKS),  # its first step
        lambda one: one.fit(agents.never_calls, TASKS, TASKS[:2]),
        lambda one: one.dev(agents.never_calls, TASKS[:2]),
    ],
)
def test_an_agent_that_never_calls_the_model_is_refused_before_its_rewards_count(
    tmp_path: Path, measured: Any
) -> None:
    with pytest.raises(
        TrainingError, match=r"\d+ rollouts succeeded but none called the model being served"
    ):
        measured(trainer(tmp_path))


def test_dev_runs_a_few_tasks_and_prints_each_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = trainer(tmp_path).dev(agents.vowels, TASKS[:2])
    assert [task.rollout.mode for task in tasks] == ["test", "test"]
    printed = capsys.readouterr().out
    assert 'input  {"word":"apple"' in printed and "call policy" in printed
    assert "tasks 2, attempts 1 each: 2 rewarded; mean reward 0." in printed


def test_an_agent_can_neither_reward_itself_nor_issue_keys_and_whoever_has_the_link_sees_the_dashboard(
    tmp_path: Path,
) -> None:
    links: list[str] = []
    answered: list[tuple[int, int]] = []

    class Noting(NoProgress):
        def note(self, message: str) -> None:
            links.extend(message.split("dashboard: ")[1:])

    async def greedy(task: Any, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        root = llm.endpoint.partition("/rollout/")[0]
        attempt = rollout.rollout_id, rollout.attempt.attempt_id
        span = agl.Span(  # what a reward is
            rollout_id=attempt[0],
            attempt_id=attempt[1],
            sequence_id=0,
            trace_id="1" * 32,
            span_id="1" * 16,
            name=semconv.REWARD,
            start_time=1.0,
            end_time=1.0,
            attributes={"agentlightning.reward.0.value": 1.0},
        )
        for key in (None, "made up", llm.api_key):
            store = LightningStoreClient(root, api_key=key)
            for call in (
                CALLS["store_spans"](spans=[span]),
                CALLS["issue_key"](name="mine", scopes=("admin",)),
                CALLS["issue_attempt_key"](
                    rollout_id=attempt[0], attempt_id=attempt[1], rewards=True
                ),
                CALLS["page_rollouts"](),
            ):
                with pytest.raises(ForbiddenError):
                    await store.perform(call)
            await store.close()
        assert await agents.ask(task, llm)  # its calls are its own
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            for link in (f"{root}/open/{llm.api_key}", links[0]):
                async with (
                    browser.get(link) as page,
                    browser.get(f"{root}/api/v1/dashboard/session") as session,
                ):
                    answered.append((page.status, session.status))
        return 0.5

    found = trainer(tmp_path, algorithm=agl.Baseline(), progress=Noting()).fit(
        greedy, val_dataset=TASKS[:1]
    )
    assert found.evaluations[0].reward == 0.5
    assert answered == [(403, 401), (200, 200)]


def test_what_a_run_instruments_is_no_setting_of_the_next(tmp_path: Path) -> None:
    def measured(names: str) -> Trainer:
        return Trainer(algorithm=agl.Baseline(), run_dir=tmp_path / names, instrument=names)

    with pytest.raises(ConfigError, match="nothing that is installed instruments 'x'"):
        measured("x").fit(agents.never_calls, TASKS[:1], TASKS[:1])
    measured("all").fit(agents.never_calls, TASKS[:1], TASKS[:1])
    assert INSTRUMENT not in os.environ


def test_the_baseline_measures_and_changes_nothing(tmp_path: Path) -> None:
    result = trainer(tmp_path, algorithm=agl.Baseline()).fit(agents.vowels, TASKS[:1], TASKS[:3])
    assert [len(evaluation.tasks) for evaluation in result.evaluations] == [3]
    assert result.checkpoint is None
    # what a notebook shows below the cell
    assert result.run_id in repr(result) and len(repr(result)) < 1000
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        trainer(tmp_path, run_dir=tmp_path / "b", algorithm=agl.Baseline()).fit(
            agents.vowels, TASKS
        )


@pytest.mark.slow
def test_training_ends_at_its_time_limit_with_what_was_learned_saved(tmp_path: Path) -> None:
    for limit in (3.0, 30.0, 120.0):  # a busy machine may not finish a step within the first
        run = trainer(
            tmp_path,
            run_dir=tmp_path / f"{limit}",
            algorithm=algorithm(steps=10_000),
            time_limit=limit,
        )
        result = run.fit(agents.vowels, TASKS, TASKS[:1])
        assert result.stopped_because == "time limit reached"
        if result.metrics[-1].step:
            break
    assert result.evaluations[-1].step == result.metrics[-1].step > 0
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"step-{result.metrics[-1].step:06d}"


def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a port, or a server"):
        Trainer(n_runners=0)
    for wrong in (
        {"time_limit": 0},
        {"port": 2**16},
        {"seed": 2**63},
        {"seed": "a"},
        {"threads": 0},
        {"dtype": "float16"},
        {"optimizer": {"learning_rate": 1e-3}},
        {"lora": {"rank": 4}},
        {"algorithm": "grpo"},
        {"algorithm": agl.GRPO},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
            Trainer(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used: torch "):
        trainer(tmp_path, run_dir=tmp_path / "a", device="gpu").fit(agents.vowels, TASKS)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        trainer(tmp_path).fit(agents.vowels, TASKS, resume=True)
    with pytest.raises(ConfigError, match="give the Trainer a model"):
        trainer(tmp_path, model=None).fit(agents.vowels, TASKS)
    with pytest.raises(ConfigError, match="made for at most"):
        trainer(tmp_path, run_dir=tmp_path / "b", max_sequence_length=10**6).fit(
            agents.vowels, TASKS
        )
    with pytest.raises(ConfigError, match="does not exist"):
        trainer(tmp_path, run_dir=tmp_path / "c", model=tmp_path / "nowhere").fit(
            agents.vowels, TASKS
        )
    assert not (tmp_path / "c").exists()  # what failed to start leaves nothing behind
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").touch()
    for name in ("runs/d", "kept", "kept/e"):
        with pytest.raises(ConfigError, match="does not exist"):
            trainer(tmp_path, run_dir=tmp_path / name, model="./nowhere").fit(agents.vowels, TASKS)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "kept" / "e").exists()
    assert (tmp_path / "kept" / "notes").exists()
    with pytest.raises(ConfigError, match="group_size"):
        agl.GRPO(group_size=1)
    with pytest.raises(ConfigError, match="evaluate_every needs held-out tasks"):
        trainer(tmp_path, algorithm=algorithm(evaluate_every=2)).fit(agents.vowels, TASKS)


@pytest.mark.anyio
async def test_an_endpoint_is_measured_as_it_was_given_but_not_trained(tmp_path: Path) -> None:
    seen: list[agl.LLM] = []

    async def asks(task: Any, llm: agl.LLM) -> float:
        seen.append(llm)
        return await agents.vowels(task, llm)

    async with hosted_model() as hosted:
        llm = agl.LLM(
            endpoint=hosted.url,
            model="gpt-4o",
            api_key="theirs",
            sampling_parameters={"temperature": 0},
        )
        settings: dict[str, Any] = {"model": None, "initial_resources": {"llm": llm}}
        with pytest.raises(
            ConfigError, match=r"grpo trains .* cannot be had; give the Trainer a model.*sampler="
        ):
            await trainer(tmp_path, **settings).fit_async(asks, TASKS, TASKS[:2])
        assert not hosted.calls and "run" not in os.listdir(tmp_path)
        measured = await trainer(tmp_path, **settings, algorithm=agl.Baseline()).fit_async(
            asks, TASKS, TASKS[:2]
        )
        assert measured.evaluations[0].reward == 0.4 and hosted.calls.total() == 4  # of "hello"
    assert [one.sampling_parameters for one in seen] == [{"temperature": 0}] * 2
    assert hosted.url not in seen[0].endpoint and seen[0].api_key != "theirs"  # the gateway's
    with pytest.raises(ConfigError, match="URL of an endpoint"):
        await trainer(
            tmp_path, run_dir=tmp_path / "b", model="https://api.openai.com/v1"
        ).fit_async(asks, TASKS)


@pytest.mark.anyio
@pytest.mark.parametrize("through_server", [False, True])
async def test_frozen_models_are_asked_as_the_agent_asks_and_get_no_key_of_ours(
    tmp_path: Path, through_server: bool
) -> None:
    """Behind the gateway they are recorded and not trained; an `LLM` of the user's is left as it
    was given."""
    elsewhere = agl.LLM(endpoint="http://elsewhere:8000/v1", model="large")

    async def judged(task: Any, resources: agl.NamedResources) -> float:
        judge = resources["judge"]
        assert isinstance(judge, agl.LLM) and resources["elsewhere"] == elsewhere
        reward = await agents.vowels(task, resources["llm"])
        await agl.openai_client(judge).chat.completions.create(
            model=judge.model, messages=[{"role": "user", "content": "good?"}], temperature=0
        )
        return reward

    async with AsyncExitStack() as stack:
        hosted = await stack.enter_async_context(hosted_model())
        settings: dict[str, Any] = {
            "initial_resources": {"elsewhere": elsewhere},
            "algorithm": algorithm(steps=1),
        }
        if through_server:
            place = await stack.enter_async_context(
                running_server(ServerSettings(store=str(tmp_path / "s.sqlite")))
            )
            settings["server"] = place.url
        judge = {"endpoint": hosted.url, "model": "gpt-5-mini", "api_key": "theirs", "frozen": True}
        result = await trainer(tmp_path, models={"judge": judge}, **settings).fit_async(
            judged, TASKS
        )
    values = result.metrics[0].values
    assert (values["calls"], values["excluded/frozen model"]) == (24, 12)
    assert hosted.calls == {("/v1/chat/completions", "Bearer theirs"): 12}
    assert {(body["model"], body["temperature"]) for body in hosted.bodies} == {("gpt-5-mini", 0)}


@agl.rollout
async def writer_and_critic(task: Any, resources: agl.NamedResources) -> float:
    """Two models at one endpoint: the critic answers what the writer said."""
    said = await agents.ask(task, resources["writer"])
    return -len(await agents.ask({"word": said[:4]}, resources["critic"])) / 10


@pytest.mark.slow
def test_two_policies_learn_at_once_each_from_its_own_calls(tmp_path: Path) -> None:
    models = {"writer": policy(0), "critic": policy(1)}
    before = {name: one.model.get_input_embeddings().weight.clone() for name, one in models.items()}
    both = algorithm(steps=2, checkpoint_every=1)
    result = trainer(tmp_path, model=models, algorithm=both).fit(
        writer_and_critic, TASKS, TASKS[:2]
    )
    last = result.metrics[-1].values
    assert last["calls"] == 24
    assert last["writer/tokens"] + last["critic/tokens"] == last["sampled_tokens"]
    assert last["policy_version"] == 2
    assert result.checkpoint is not None
    for name in models:
        trained = (
            AutoModelForCausalLM.from_pretrained(result.checkpoint / name)
            .get_input_embeddings()
            .weight
        )
        assert not torch.equal(trained, before[name])
    again = trainer(
        tmp_path, model={"writer": policy(0), "critic": policy(1)}, algorithm=algorithm(steps=3)
    )
    assert again.fit(writer_and_critic, TASKS, TASKS[:2], resume=True).metrics[-1].step == 3


def test_an_adapter_is_trained_and_resumed(tmp_path: Path) -> None:
    """With a falling learning rate, layers computed again and a proximal policy."""

    def adapted(steps: int) -> Trainer:
        return trainer(
            tmp_path,
            algorithm=algorithm(steps=steps, old="proximal", reference=True, checkpoint_every=1),
            optimizer=AdamW(learning_rate=1e-2, schedule="linear", gradient_checkpointing=True),
            lora=LoRA(rank=4),
        )

    first = adapted(2).fit(agents.vowels, TASKS)
    assert [metrics.values["learning_rate"] for metrics in first.metrics] == pytest.approx(
        [1e-2, 0.5e-2]
    )
    assert first.metrics[1].values["reference_kl"] > 0
    assert max(metrics.values["inference_mismatch"] for metrics in first.metrics) < 1e-4
    assert (
        first.checkpoint is not None and (first.checkpoint / "adapter_model.safetensors").is_file()
    )
    resumed = adapted(3).fit(agents.vowels, TASKS, resume=True)
    assert resumed.metrics[-1].step == 3
    assert resumed.metrics[-1].values["inference_mismatch"] < 1e-4


@pytest.mark.parametrize(
    "settings", [{"lora": None}, {"lora": LoRA(rank=4)}], ids=["all weights", "an adapter"]
)
def test_a_resumed_run_keeps_to_the_weights_it_started_from(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """And not to those of a policy object that was trained in the meantime, or another one."""
    settings |= {"model": policy(), "algorithm": algorithm(steps=1, reference=True)}
    trainer(tmp_path, **settings).fit(agents.vowels, TASKS)
    with torch.no_grad():
        next(settings["model"].model.parameters()).add_(0.01)
    settings["algorithm"] = algorithm(steps=2, reference=True)
    with pytest.raises(ConfigError, match="load it again"):
        trainer(tmp_path, **settings).fit(agents.vowels, TASKS, resume=True)
    result = trainer(tmp_path, **settings | {"model": policy()}).fit(
        agents.vowels, TASKS, resume=True
    )
    assert result.metrics[-1].values["reference_kl"] > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_job_that_must_end_begins_nothing_more_even_where_it_would_not_wait(
    tmp_path: Path, late: bool
) -> None:
    """As a step whose groups are there already."""
    began: list[bool] = []

    class Hasty(agl.GRPO):
        async def run(self, context: RunContext) -> None:
            async def at_once() -> None:
                began.append(True)

            await context.unless_stopped(at_once())
            if late:
                context.deadline = asyncio.get_running_loop().time() - 1
            else:
                context.stop.set()
            with pytest.raises(
                Stopped, match="time limit reached" if late else "stopped by the user"
            ):
                await context.unless_stopped(at_once())

    trainer(tmp_path, algorithm=Hasty()).fit(agents.vowels, TASKS)
    assert began == [True]


@pytest.mark.slow
@pytest.mark.anyio
async def test_fit_blocks_in_a_running_event_loop_with_agents_in_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "isolation": "process",
        "n_runners": 1,
        "progress": True,
        "hooks": None,
    }
    result = trainer(tmp_path, algorithm=algorithm(steps=1, tasks_per_step=1), **settings).fit(
        agents.vowels, TASKS
    )
    assert result.stopped_because == "all steps done" and "step 1/1" in capsys.readouterr().err
    store = await SqlStore.open(tmp_path / "mine.sqlite")
    with pytest.raises(ConfigError, match=r"await trainer\.fit_async"):
        trainer(tmp_path, store=store, run_dir=tmp_path / "another").fit(agents.vowels, TASKS)
    await store.close()


@pytest.mark.anyio
async def test_a_reward_that_a_grader_gives_after_the_end_counts_in_the_evaluation(
    tmp_path: Path,
) -> None:
    """The first rollout has ended without a reward when the second one is still running."""
    store = await SqlStore.open(tmp_path / "mine.sqlite")

    async def agent(task: str) -> float | None:
        if task == "first":
            return None
        (first,) = (await store.finished_after(timeout=60.0)).rollouts
        attempt = await store.get_latest_attempt(first.rollout_id)
        assert attempt is not None and first.reward is None
        grader = AttemptTracer(attempt.rollout_id, attempt.attempt_id)
        grader.record(semconv.ANNOTATION, reward_attributes(0.5))
        await store.store_spans(grader.drain())
        return 1.0

    measuring = Trainer(algorithm=agl.Baseline(), run_dir=tmp_path / "run", store=store)
    result = await measuring.fit_async(agent, val_dataset=["first", "second"])
    assert [task.reward for task in result.evaluations[0].tasks] == [0.5, 1.0]
    await store.close()
