"""A Tinker server learns and samples. Its refusals need no server; the rest is SkyRL's in
`.venv-tinker`, whose Python runs these tests: `make engines`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithm.grpo import GRPO
from agentlightning.errors import ConfigError
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.generation import GenerationRequest
from agentlightning.learner.losses import Loss
from agentlightning.learner.pairs import PairOpener
from agentlightning.learner.policy import open_policy
from agentlightning.learner.policy_config import AdamW, LoRA, PolicyConfig
from agentlightning.learner.tinker import TinkerLearner
from agentlightning.learner.tinker_sampler import TinkerSampler, ending_of, read_handle
from agentlightning.learner.torch import TorchLearner
from agentlightning.trainer import FitResult
from tests import agents
from tests.gateway.backends.engines import answered, chat_call
from tests.learner.engines import ROOT, losses_of_servers, server
from tests.learner.test_torch import batch
from tests.test_trainer import TASKS, policy, trainer

ENVIRONMENT = ROOT / ".venv-tinker"
NOWHERE = "http://127.0.0.1:9"
RANK = 8

on_a_server = pytest.mark.skipif(
    "AGL_ENGINES" not in os.environ or importlib.util.find_spec("skyrl") is None,
    reason="`make engines` runs these",
)


def test_a_call_that_samples_otherwise_is_not_trained() -> None:
    """The server tells log-probabilities of temperature 1, before top_p and top_k."""
    assert ending_of(GenerationRequest((1,))).untrainable is None
    for other in ({"temperature": 0.3}, {"top_p": 0.5}, {"top_k": 3}):
        assert "temperature 1" in str(ending_of(GenerationRequest((1,), **other)).untrainable)


class Client:
    """A sampling client whose server ends every answer with `told`."""

    def __init__(self, tokens: list[int], told: str) -> None:
        self.tokens, self.told, self.asked = tokens, told, 0

    async def sample_async(self, prompt: Any, **settings: Any) -> Any:
        self.asked += 1
        one = SimpleNamespace(
            tokens=self.tokens, logprobs=[-1.0] * len(self.tokens), stop_reason=self.told
        )
        return SimpleNamespace(sequences=[one])


async def sampling(client: Client, length: int = 7) -> TinkerSampler:
    async def created(base_model: str) -> Client:
        return client

    kinds = SimpleNamespace(SamplingParams=dict, ModelInput=SimpleNamespace(from_ints=list))
    sdk = SimpleNamespace(TinkerError=OSError, types=kinds)
    service = SimpleNamespace(create_sampling_client_async=created)
    chat = ChatTemplate.from_pretrained(policy().tokenizer)
    sampler = TinkerSampler(sdk, service, "model", chat, "server", length)
    await sampler.check(Sampling())
    return sampler


@pytest.mark.parametrize(
    ("tokens", "most", "told", "known"),
    [
        ([5, 6, 7], 3, "stop", "length"),  # verl's server says stop, and has been cut short
        ([5, 6, 9], 3, "stop", "stop"),  # the last token that fits is one that stops
        ([5, 6], 3, "stop", "stop"),  # a stop that is not among the answer's tokens
        ([5, 6, 7], 3, "length", "length"),
        ([5, 6, 7], None, "stop", "length"),  # the room of the context is full
    ],
)
@pytest.mark.anyio
async def test_an_answer_that_was_cut_short_is_no_whole_one(
    tokens: list[int], most: int | None, told: str, known: str
) -> None:
    sampler = await sampling(Client(tokens, told))
    answer = await sampler.complete(
        GenerationRequest([1, 2, 3, 4], max_tokens=most, stop_token_ids=frozenset({9}))
    )
    assert [one.finish_reason for one in answer] == [None] * (len(tokens) - 1) + [known]


@pytest.mark.anyio
async def test_nothing_is_sampled_for_who_left_while_weights_were_on_their_way() -> None:
    sampler = await sampling(client := Client([5, 9], "stop"))
    request = GenerationRequest([1, 2, 3, 4], stop_token_ids=frozenset({9}))
    async with sampler.exclusive():
        leaving, staying = (asyncio.create_task(sampler.complete(request)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        assert client.asked == 0
    assert len(await staying) == 2
    assert client.asked == 1


@pytest.mark.anyio
async def test_an_answer_that_a_stop_string_ends_trains() -> None:
    """The agent sees what comes before the string; the tokens up to its end are kept."""
    ids = policy().tokenizer.encode(" apple ocean quiet", add_special_tokens=False)
    sampler = await sampling(Client(ids, "stop"), length=100)
    answer = await answered(sampler.backend, chat_call(sampling=Sampling(stop=("ocean",))))
    (choice,) = answer.choices
    assert (choice.string("content").strip(), choice.stop_string, choice.untrainable) == (
        "apple",
        "ocean",
        None,
    )
    assert policy().tokenizer.decode(choice.token_ids).strip() == "apple ocean"
    assert len(choice.logprobs) == len(choice.token_ids)


def test_a_server_that_is_not_there_is_said(tmp_path: Path) -> None:
    model = tmp_path / "model"
    policy().save(model)
    said = (
        "whose SDK" if importlib.util.find_spec("tinker") is None else "no Tinker server answers at"
    )
    with pytest.raises(ConfigError, match=said):
        trainer(
            tmp_path,
            model=model,
            learner={"tinker": NOWHERE},
            lora=LoRA(RANK),
            algorithm=GRPO(steps=1),
        ).fit(agents.vowels, TASKS)


# --- on SkyRL's server ---


@contextmanager
def skyrl(directory: Path, model: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    batches = (
        '{"max_lora_adapters": 3, "max_lora_rank": 8, "sample_max_num_sequences": 64, '
        '"train_micro_batch_size": 16}'
    )
    flags = (
        f"--host 127.0.0.1 --port {port} --backend jax --checkpoints-base "
        f"{directory / 'checkpoints'}"
    )
    flags += f" --database-url sqlite:///{directory / 'skyrl.sqlite'} --base-model {model}"
    command = [
        "uv",
        "run",
        "--no-project",
        "-m",
        "skyrl.tinker.api",
        *flags.split(),
        "--backend-config",
        batches,
    ]
    path = f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}"
    own = {
        "VIRTUAL_ENV": str(ENVIRONMENT),
        "PATH": path,
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    with server(
        command, port, own, directory / "skyrl.log", health="/api/v1/healthz", cwd=directory
    ) as (url, _):
        yield url


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    policy().save(home / "model")
    return home / "model"


@pytest.fixture(scope="module")
def url(home: Path, model: Path) -> Iterator[str]:
    with skyrl(home, model) as url:
        yield url


def opened(
    stack: ExitStack, url: str, model: Path, rate: float = 1e-3, reduction: Any = "mean"
) -> TinkerLearner:
    learner, optimizer = {"tinker": url, "reduction": reduction}, AdamW(rate, max_grad_norm=1e9)
    config = PolicyConfig(learner=learner, optimizer=optimizer, lora=LoRA(RANK))
    opener = PairOpener(config, {"policy": model}, loss=Loss())
    _, made = stack.enter_context(opener.open(model, print))
    assert isinstance(made, TinkerLearner)
    return made


def ours(
    home: Path, model: Path, theirs: TinkerLearner, directory: Path, rate: float
) -> TorchLearner:
    """A learner of ours with the adapter that the server drew."""
    theirs.export(directory, "handle")
    _, _, run, name = read_handle(directory).path.split("/")
    with tarfile.open(home / "checkpoints" / run / "sampler_weights" / f"{name}.tar.gz") as archive:
        archive.extractall(directory / "adapter", filter="data")
    own = open_policy(model, seed=0, lora=LoRA(RANK))
    assert own.adapter is not None
    own.adapter.load(directory / "adapter")
    return TorchLearner(own, AdamW(rate, max_grad_norm=1e9))


def apart(one: Any, other: Any) -> float:
    pairs = zip(one.logprobs(batch()), other.logprobs(batch()), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


LOSSES = losses_of_servers()


@on_a_server
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_first_step_is_ours(
    tmp_path: Path, home: Path, model: Path, url: str, loss: Loss
) -> None:
    with ExitStack() as stack:
        theirs = opened(stack, url, model)
        own = ours(home, model, theirs, tmp_path / "first", 1e-3)
        assert apart(theirs, own) < 1e-4
        told, expected = theirs.step(batch(), loss), own.step(batch(), loss)
        print(
            f"{loss.name}: gradient norm {told['grad_norm']:.6f}, ours {expected['grad_norm']:.6f}"
        )
        for name in (
            "grad_norm",
            "loss",
            "clip_fraction",
            "ratio_max",
            "behaviour_kl",
            "learning_rate",
            "tokens",
        ):
            assert told[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        print(f"{loss.name}: log-probabilities after it are at most {apart(theirs, own):.1g} apart")
        assert apart(theirs, own) < 1e-2


@on_a_server
@pytest.mark.timeout(900)
def test_a_server_that_gives_no_sum_of_losses_is_refused(
    tmp_path: Path, model: Path, url: str
) -> None:
    with ExitStack() as stack:
        one = opened(stack, url, model, reduction=None)
        with pytest.raises(ConfigError, match="reduction: mean"):
            one.export(tmp_path / "handle", "handle")


def fit(directory: Path, model: Path, url: str, *, steps: int, resume: bool = False) -> FitResult:
    algorithm = GRPO(steps=steps, tasks_per_step=6, group_size=8, max_tokens=6, checkpoint_every=1)
    learner = {"tinker": url, "reduction": "mean"}
    return trainer(
        directory,
        model=model,
        learner=learner,
        lora=LoRA(RANK),
        algorithm=algorithm,
        n_runners=32,
        optimizer=AdamW(learning_rate=1e-2),
    ).fit(agents.vowels, TASKS, TASKS, resume=resume)


@on_a_server
@pytest.mark.timeout(900)
def test_a_run_learns_and_is_resumed(tmp_path: Path, home: Path, model: Path, url: str) -> None:
    first = fit(tmp_path, model, url, steps=2)
    result = fit(tmp_path, model, url, steps=6, resume=True)
    mismatch = max(one.values.get("inference_mismatch", 0.0) for one in result.metrics)
    before, after = result.evaluations[0].reward, result.evaluations[-1].reward
    print(
        f"held-out {before:.3f} → {after:.3f} in {result.seconds:.0f} s, largest mismatch "
        f"{mismatch:.1g}"
    )
    assert 0 < mismatch < 1e-3
    assert after > before + 0.1
    assert first.checkpoint is not None and result.checkpoint is not None
    assert read_handle(first.checkpoint).steps == 2 and read_handle(result.checkpoint).steps == 6
    run = read_handle(result.checkpoint).path.split("/")[2]
    kept = [file.name for file in (home / "checkpoints" / run / "sampler_weights").glob("*.gz")]
    assert len(kept) == 2  # publications that no call can ask for any more are deleted
