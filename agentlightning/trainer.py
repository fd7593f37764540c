"""The trainer connects store, engine, gateway, HTTP server, runner and algorithm in one process.

With a `server`, store and gateway run there and runners elsewhere; this process has engine, learner
and algorithm."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from agentlightning.algorithm import (
    GRPO,
    Algorithm,
    Baseline,
    NoProgress,
    Progress,
    Reinforcement,
    RunContext,
)
from agentlightning.algorithm.base import TrainedPolicy
from agentlightning.algorithm.conclusion import conclusion
from agentlightning.algorithm.directory import (
    RunDirectory,
    check_data,
    make_manifest,
    run_directory,
)
from agentlightning.algorithm.evaluation import EvaluatedTask, Evaluation
from agentlightning.algorithm.measures import Measures, measured, summarise
from agentlightning.algorithm.rl.job import Checkpoints
from agentlightning.algorithm.tracking import Tracker, make_tracker
from agentlightning.datasets.hub import fetched_model
from agentlightning.datasets.tasks import load_dataset
from agentlightning.display import LiveProgress, hide_library_progress, show_tasks, terminal
from agentlightning.environments import tasks_of
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    UnavailableError,
    check_settings,
    plain_arguments,
)
from agentlightning.garbage import garbage_sought_seldom
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.backends.factory import frozen_entry, read_frozen
from agentlightning.gateway.models import ANY, ModelEntry, ModelTable
from agentlightning.learner.base import AdamW, DType, LoRA
from agentlightning.learner.places import read_learner
from agentlightning.proxies import spare_this_machine
from agentlightning.runner.agent import AnyAgent, LitAgent, agent_name, as_agent
from agentlightning.runner.execution import Hook
from agentlightning.runner.isolation import Isolation, boot_of, place_of, usual_concurrency
from agentlightning.runner.runner import Runner
from agentlightning.runner.shared import placed
from agentlightning.runner.signals import interrupted_at_once, stopping_at_interrupt
from agentlightning.server.app import create_app
from agentlightning.server.local_keys import local_key, offered_key
from agentlightning.server.serve import HttpServer, is_loop_running, run_on_fastest_loop
from agentlightning.server.service import lent, models_held
from agentlightning.store.base import LightningStore
from agentlightning.store.client import PATIENCE_SECONDS, LightningStoreClient
from agentlightning.store.sql import SqlStore, absolute
from agentlightning.tracing.emit import shown
from agentlightning.types import LLM, FrozenModel, Metrics, NamedResources

if TYPE_CHECKING:
    from agentlightning.learner.pairs import Pair, PairSettings
    from agentlightning.learner.policy import Policy


@dataclass(frozen=True)
class FitResult:
    """The result of `Trainer.fit`. `checkpoint` is the directory of the last weights,
    `best_checkpoint` that of the weights with the highest held-out reward;
    `AutoModelForCausalLM.from_pretrained` loads both. `conclusion` says what to try next if the
    held-out reward did not rise. Its repr, which notebooks print, leaves out every rollout."""

    run_id: str
    directory: Path
    checkpoint: Path | None
    stopped_because: str
    evaluations: tuple[Evaluation, ...] = field(repr=False)
    metrics: tuple[Metrics, ...] = field(repr=False)
    seconds: float
    best_checkpoint: Path | None = None
    conclusion: str | None = None


class Trainer:
    """Trains or evaluates an agent.

    Args: model: the model to train: a directory, a Hugging Face id (`hf:ORG/NAME@REVISION` for one
        revision), a loaded
            `Policy`, or `file.py:function` that makes one from the seed. A mapping trains several
            by name, each from its own calls. A `Policy` is trained in place: the next fit continues
            from it. None evaluates an endpoint of `initial_resources`.
        models: frozen models by name, `{"judge": {"endpoint": "https://…/v1", "frozen": True}}`
        (see `FrozenModel`).
        model_name: the name that agents call `model` by. Trainers that share a server need
        different names.
        algorithm: default `GRPO()`; `Baseline()` only evaluates.
        sampler: what samples from the model: `embedded`, the engine in this process, or servers
            that load its weights, `{"vllm": "http://host:8000/v1"}` or
            `{"sglang": "http://host:30000/v1"}` (see `SamplerPlace`).
        learner: what trains the model: `torch` in this process; `{"fsdp": N}` in N processes of
            this machine; or a server that also samples: `tinker` (the hosted service),
            `{"tinker": URL}` (see `TinkerLearning`) or `{"verl": URL}`.
        optimizer: learning rate, schedule, micro-batches.
        lora: train an adapter with these settings instead of the weights.
        dtype: of the weights: float32, or bfloat16 with float32 copies in the optimiser.
        n_runners: how many rollouts run at once in this process (`n_workers` is the same). Default:
            64, or with processes one per core. With 0, `agl runner` processes run them, from this
            process's `port` or the `server`.
        isolation: `"process"` runs agents in processes of their own (see `Runner`); `"auto"` does
            so for agents that take neither `llm` nor `resources`.
        run_dir: the directory of this run; default: a new one below `runs/`.
        store: path of the SQLite file (default: in `run_dir`), or an open store.
        server: URL of an `agl server` that has store and gateway.
        api_key: that server's key. Without a `server`: the admin key of this process's server;
        default: a random one.
        port: port of this process's server; 0 is any free port.
        seed: seeds everything random.
        time_limit: seconds after which training stops, with its last evaluation.
        initial_resources: more resources for the agent. Models are added by name, the first trained
        one also as `llm`.
        hooks: called before and after every rollout (see `Hook`).
        trackers: `"tensorboard"`, `"wandb"`, `"mlflow"`, `{"name": "wandb", "project": "x"}`, or
        your own `Tracker`.
        progress: shows progress. Default, and True: a display on stderr; False shows nothing.
        adapter: the `adapter` of functions decorated with `agl.algo`, as in Agent Lightning 0.3.
        max_sequence_length: tokens of prompt and answer together; default: the model's limit, at
        most 4096.
        device: where the model is loaded; default `cuda` if there is a GPU, else `cpu`.
        threads: threads of torch; default 1 for models below 10M parameters, which more threads
        slow down.
        deterministic: the same seed gives bitwise the same weights, also after a kill and `resume`,
            if the agent is deterministic too. Slower: sequences are sampled one by one.
        run_file: text that is written to `run_dir` as `run.yaml`, so that `agl train` can repeat
            the run.

    ConfigError for settings that are wrong or do not go together."""

    @plain_arguments
    def __init__(
        self,
        *,
        model: str | Path | Policy | Mapping[str, str | Path | Policy] | None = None,
        models: Mapping[str, FrozenModel | Mapping[str, Any]] | None = None,
        model_name: str = "policy",
        algorithm: Algorithm | None = None,
        sampler: str | Mapping[str, Any] | None = None,
        learner: str | Mapping[str, Any] | None = None,
        optimizer: AdamW | None = None,
        lora: LoRA | None = None,
        dtype: DType | None = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
        isolation: Isolation = "auto",
        run_dir: str | Path | None = None,
        store: str | Path | LightningStore | None = None,
        server: str | None = None,
        api_key: str | None = None,
        port: int = 0,
        seed: int = 0,
        time_limit: float | None = None,
        initial_resources: Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] | None = None,
        adapter: Any = None,
        trackers: str | Sequence[str | Mapping[str, Any] | Tracker] | None = None,
        progress: Progress | bool | None = None,
        max_sequence_length: int | None = None,
        device: str | None = None,
        threads: int | None = None,
        deterministic: bool = False,
        run_file: Mapping[str, Any] | None = None,
    ) -> None:
        trained = (
            model if isinstance(model, Mapping) else {} if model is None else {model_name: model}
        )
        self.models = {name: placed(fetched_model(model)) for name, model in trained.items()}
        self.frozen = read_frozen(models or {}, self.models)
        n_runners = n_workers if n_runners is None else n_runners
        if adapter is not None:
            from agentlightning.v03.adapters import with_adapter

            algorithm = with_adapter(algorithm, adapter)
        self.algorithm: Algorithm = GRPO() if algorithm is None else algorithm
        self.sampler = sampler
        self.learner = learner
        read_learner(learner)
        self.optimizer = optimizer or AdamW()
        self.lora = lora
        self.dtype = dtype
        self.n_runners = n_runners
        self._concurrency = n_runners or 0
        self.isolation: Isolation = isolation
        self._named = run_dir is not None
        self.seed = seed
        self.time_limit = time_limit
        self.store = store if isinstance(store, LightningStore | None) else absolute(store)
        self._root = Path(run_dir or "runs").expanduser().absolute()
        self.server = server
        self.api_key = api_key
        self.port = port
        named = {
            "llm" if name == "main_llm" else name: model
            for name, model in (initial_resources or {}).items()
        }
        self.initial_resources: NamedResources = named
        self.hooks = tuple(hooks or ())
        self.trackers = tuple(
            map(make_tracker, [trackers] if isinstance(trackers, str) else trackers or ())
        )
        self.progress: Progress | Literal[False] | None = None if progress is True else progress
        self.max_sequence_length = max_sequence_length
        self.deterministic = deterministic
        self.device = device
        self.threads = threads
        self.run_file = run_file
        self._check_settings()

    def fit(
        self,
        agent: AnyAgent,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        resume: bool = False,
    ) -> FitResult:
        """Train the agent on `train_dataset`, with evaluations on `val_dataset`, and block until
        done.

        A dataset is a list, a path (JSONL, JSON, CSV, Parquet), a DataFrame or a Hugging Face
        dataset; environments and recorded rollouts need none. Ctrl-C saves and returns.
        `resume=True` continues the run in `run_dir`, or the newest. ConfigError for wrong settings
        or tasks, TrainingError if training cannot continue."""
        return run_on_fastest_loop(
            self.fit_async(self._imported(agent), train_dataset, val_dataset, resume=resume)
        )

    async def fit_async(
        self,
        agent: AnyAgent,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        resume: bool = False,
    ) -> FitResult:
        """`fit` for code that goes on in its event loop meanwhile."""
        if self._rl is not None and not self.models:
            endpoint = self.initial_resources.get("llm")
            why = (
                f", and those behind {endpoint.endpoint} cannot be had"
                if isinstance(endpoint, LLM)
                else ""
            )
            raise ConfigError(
                f"{self.algorithm.name} trains weights{why}; give the Trainer a model (a "
                "directory or a Hugging Face id), with sampler={'vllm': URL} where a vLLM "
                "server is to answer, or measure the agent unchanged with Baseline()"
            )
        if self.deterministic and self._overlaps:
            raise ConfigError(
                "deterministic=True needs max_staleness=0: otherwise timing decides what trains "
                "on what"
            )
        train_tasks, val_tasks = tasks_of(agent, train_dataset, val_dataset)
        if self._rl is not None and self._rl.evaluate_every and not val_tasks:
            raise ConfigError("evaluate_every needs held-out tasks: give val_dataset, or omit it")
        return await self._run(as_agent(agent), train_tasks, val_tasks, resume)

    def dev(self, agent: AnyAgent, train_dataset: Any) -> list[EvaluatedTask]:
        """Run the agent once on each task without training, print the traces and the mean reward,
        and return the traces."""
        return run_on_fastest_loop(self.dev_async(self._imported(agent), train_dataset))

    async def dev_async(self, agent: AnyAgent, train_dataset: Any) -> list[EvaluatedTask]:
        """`dev` for code that goes on in its event loop meanwhile."""
        trial = copy.copy(self)
        trial.algorithm = Baseline(mode="test")
        result = await trial._run(as_agent(agent), [], load_dataset(train_dataset), resume=False)
        tasks = [task for evaluation in result.evaluations for task in evaluation.tasks]
        console = terminal(highlight=False, force_jupyter=False)
        show_tasks(console, tasks)
        summary = summarise([measured(task.traced, task.spans) for task in tasks], Measures())
        console.print(
            f"{summary}; mean reward {summary.estimates['reward'].value:.3f}", markup=False
        )
        return tasks

    def _imported(self, agent: AnyAgent) -> LitAgent[Any]:
        """The agent, imported so that Ctrl-C interrupts whatever runs. ConfigError if an open store
        belongs to a running event loop, which would wait for itself."""
        if isinstance(self.store, LightningStore) and is_loop_running():
            raise ConfigError(
                "the store was opened in the running event loop; use `await trainer.fit_async(…)` "
                "or dev_async"
            )
        agent = as_agent(agent)
        if self.n_runners != 0:
            place_of(agent, self.isolation)
        return agent

    def _check_settings(self) -> None:
        least = {"n_runners": 0, "port": 0, "threads": 1, "seed": -(2**63)}
        check_settings(
            self, least=least, above={"time_limit": 0}, choices={"dtype": get_args(DType)}
        )
        for name, end in (("port", 2**16), ("seed", 2**63)):
            if getattr(self, name) >= end:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be less than {end}")
        if self.n_runners == 0 and self.server is None and self.port == 0:
            raise ConfigError(
                "n_runners=0 leaves rollouts to `agl runner` processes: give a port, or a server"
            )
        if self.server is not None and self.store is not None:
            raise ConfigError(
                "server and store exclude each other: with a server, the store is the server's"
            )
        if self.models and isinstance(given := self.initial_resources.get("llm"), LLM):
            raise ConfigError(
                f"agents get the trained model as `llm`: remove {given.endpoint} from "
                "initial_resources. A server of vLLM samples with sampler={'vllm': URL}, and "
                "other models that agents call go into `models`"
            )
        for name, kind in (("optimizer", AdamW), ("lora", LoRA)):
            if not isinstance(given := getattr(self, name), kind | None):
                raise ConfigError(f"{name} is {given!r}; give an agl.{kind.__name__}(…)")
        if isinstance(self.algorithm, type) or not hasattr(self.algorithm, "run"):
            raise ConfigError(
                f"algorithm is {self.algorithm!r}; give an instance, such as agl.GRPO(steps=100)"
            )

    @property
    def _rl(self) -> Reinforcement | None:
        return self.algorithm if isinstance(self.algorithm, Reinforcement) else None

    @property
    def _overlaps(self) -> bool:
        """Whether rollouts go on while the weights change."""
        return bool(getattr(self.algorithm, "max_staleness", 0))

    async def _run(
        self, agent: LitAgent[Any], train_tasks: list[Any], val_tasks: list[Any], resume: bool
    ) -> FitResult:
        started = time.monotonic()
        algorithm = self.algorithm
        spare_this_machine()  # where agents find the gateway
        if self.n_runners != 0:
            served = bool(self.models) or isinstance(self.initial_resources.get("llm"), LLM)
            self._place: Isolation = place_of(agent, self.isolation, served=served)
            boot_of(agent, self._place)  # before anything is made for it
            self._concurrency = self.n_runners or usual_concurrency(self._place)
        if self.models or self.sampler is not None:
            self._pair_settings(Path()).check()
        async with AsyncExitStack() as stack:
            stack.enter_context(garbage_sought_seldom())
            held = run_directory(
                self._root, algorithm.name, named=self._named, resume=resume, seed=self.seed
            )
            directory = stack.enter_context(held)
            progress = stack.enter_context(self._display())
            try:
                context = await self._open(
                    stack, agent, directory, train_tasks, val_tasks, progress
                )
            except BaseException:
                directory.forget()
                raise
            stack.push_async_callback(context.tracking.close)
            if self.time_limit is not None:
                context.deadline = asyncio.get_running_loop().time() + self.time_limit
            stack.enter_context(stopping_at_interrupt(context.stop))
            await self._run_beside_runner(agent, context)
            checkpoints = Checkpoints(directory.path / "checkpoints")
            evaluations = tuple(getattr(algorithm, "evaluations", ()))
            metrics = tuple(await context.store.query_metrics(context.run.run_id))
            said = conclusion(evaluations, metrics)
            await context.store.update_run(context.run.run_id, merge={"conclusion": said})
            return FitResult(
                run_id=context.run.run_id,
                directory=directory.path,
                checkpoint=checkpoints.latest(),
                best_checkpoint=checkpoints.best(),
                stopped_because=getattr(algorithm, "stopped_because", "done"),
                evaluations=evaluations,
                metrics=metrics,
                seconds=time.monotonic() - started,
                conclusion=said,
            )

    async def _open(
        self,
        stack: AsyncExitStack,
        agent: LitAgent[Any],
        directory: RunDirectory,
        train_tasks: list[Any],
        val_tasks: list[Any],
        progress: Progress,
    ) -> RunContext:
        """Start everything the job needs; `stack` stops it in reverse order."""
        store = await self._open_store(stack, directory.path)
        with interrupted_at_once():
            opened: dict[str, Pair] = {}
            if self.models:
                settings = self._pair_settings(directory.path)
                opened = {
                    name: stack.enter_context(settings.open(source, progress.phase))
                    for name, source in self.models.items()
                }
        entries = self._model_entries(
            {name: sampler.backend for name, (sampler, _) in opened.items()}
        )
        for sampler, _ in opened.values():
            await sampler.check(entries[0].train or Sampling())
        url, dashboard, calls_held = await self._connect(
            stack, store, entries, directory.mark.run_id
        )
        stack.enter_context(directory.served_at(url))
        progress.note(
            f"dashboard: {dashboard}#/runs/{directory.mark.run_id} (when it has ended: agl ui)"
        )
        resources = self.initial_resources
        given = self.initial_resources.get("llm")
        if entries:
            asked = given.sampling_parameters if isinstance(given, LLM) else {}
            llms = {
                entry.name: LLM(endpoint=f"{url}/v1", model=entry.name, gateway=True)
                for entry in entries
            }
            llm = msgspec.structs.replace(llms[entries[0].name], sampling_parameters=asked)
            resources = {**resources, **(llms if len(llms) > 1 else {}), "llm": llm}
        stored = await store.add_resources(resources, metadata={"run_id": directory.mark.run_id})
        if self.run_file is not None:
            directory.keep(self.run_file)
        manifest = make_manifest(self._config(), self.seed, train_tasks, val_tasks)
        if directory.resumed:
            await check_data(store, directory.mark.run_id, manifest)
        run = await store.start_run(self.algorithm.name, manifest, run_id=directory.mark.run_id)
        run = await store.update_run(
            run.run_id, merge={"agent": agent_name(agent), "reason": None, "stop": None}
        )
        return RunContext(
            run=run,
            store=store,
            directory=directory.path,
            train_tasks=train_tasks,
            val_tasks=val_tasks,
            seed=self.seed,
            deterministic=self.deterministic,
            # Others add theirs to a shared store; in the run's own, the latest has this very
            # process's address.
            resources_id=None if self.server is None else stored.resources_id,
            policies={
                name: TrainedPolicy(learner, sampler) for name, (sampler, learner) in opened.items()
            },
            calls_held=calls_held,
            progress=progress,
            trackers=self.trackers,
            resume=directory.resumed,
            owns_runner=self.server is None,
            run_time=stored.create_time,
        )

    async def _connect(
        self, stack: AsyncExitStack, store: LightningStore, entries: list[ModelEntry], run_id: str
    ) -> tuple[str, str, Callable[[], AbstractAsyncContextManager[None]]]:
        """Put the models behind a gateway, this process's or the server's. Returns its URL, the
        dashboard's, and a function that holds the calls of trained models."""
        held = [entry.name for entry in entries if entry.trainable]
        if self.server is not None:
            url = self.server.rstrip("/")
            if not entries:
                return url, url, nullcontext
            await stack.enter_async_context(
                lent(self.server, entries, port=self.port, api_key=self.api_key, owner=run_id)
            )
            return url, url, partial(models_held, url, held, api_key=self.api_key)
        gateway = Gateway(ModelTable(entries), store) if entries else None
        if gateway is not None:
            stack.push_async_callback(gateway.close)
        key = (
            self.api_key
            or local_key(f"http://127.0.0.1:{self.port}", make=True)
            or secrets.token_urlsafe(32)
        )
        http = await stack.enter_async_context(
            HttpServer(create_app(store, gateway=gateway, admin_key=key), port=self.port)
        )
        stack.enter_context(
            nullcontext() if self.port or self.api_key else offered_key(http.url, key)
        )
        return (
            http.url,
            f"{http.url}/open/{key}",
            partial(gateway.held, *held) if gateway else nullcontext,
        )

    def _display(self) -> AbstractContextManager[Progress]:
        if self.progress is not None:
            return nullcontext[Progress](self.progress or NoProgress())
        if self.models:
            hide_library_progress()
        return LiveProgress(
            steps=getattr(self.algorithm, "steps", None), time_limit=self.time_limit
        )

    async def _open_store(self, stack: AsyncExitStack, directory: Path) -> LightningStore:
        if isinstance(self.store, LightningStore):
            return self.store  # opened by the caller, closed by the caller
        if self.server is not None:
            store: LightningStore = LightningStoreClient(self.server, api_key=self.api_key)
        else:
            store = await SqlStore.open(
                self.store or directory / "store.sqlite", patience=PATIENCE_SECONDS
            )
        stack.push_async_callback(store.close)
        return store

    def _pair_settings(self, directory: Path) -> PairSettings:
        from agentlightning.learner.pairs import PairSettings

        as_given = (
            "models",
            "learner",
            "sampler",
            "lora",
            "dtype",
            "device",
            "threads",
            "max_sequence_length",
        )
        return PairSettings(
            optimizer=self._optimizer(),
            loss=None if self._rl is None else self._rl.make_loss(),
            reference=getattr(self.algorithm, "reference", False),
            critic=getattr(self.algorithm, "trained_critic", None),
            concurrency=max(1, self._concurrency or 64),
            overlaps=self._overlaps,
            deterministic=self.deterministic,
            seed=self.seed,
            directory=directory,
            **{name: getattr(self, name) for name in as_given},
        )

    def _optimizer(self) -> AdamW:
        """The optimiser, whose schedule ends with the training."""
        rl = self._rl
        return (
            AdamW() if rl is None else self.optimizer.until(rl.steps * rl.minibatches * rl.epochs)
        )

    def _model_entries(self, backends: Mapping[str, Backend]) -> list[ModelEntry]:
        """The models behind the gateway: the trained policies or the given endpoint, then the
        frozen ones."""
        train = val = Sampling()
        if (rl := self._rl) is not None:
            train = Sampling(temperature=rl.temperature, max_tokens=rl.max_tokens)
            val = Sampling(temperature=rl.val_temperature, max_tokens=rl.max_tokens)
        entries = [
            ModelEntry(name, backend, train=train, val=val) for name, backend in backends.items()
        ]
        llm = self.initial_resources.get("llm")
        if isinstance(llm, LLM) and not backends:
            upstream = FrozenModel(endpoint=llm.endpoint, frozen=True, api_key=llm.api_key)
            entries.append(frozen_entry(llm.model, upstream, ANY))
        return entries + [frozen_entry(name, model) for name, model in self.frozen.items()]

    async def _run_beside_runner(self, agent: LitAgent[Any], context: RunContext) -> None:
        """Run the algorithm and this process's runner; the first to fail ends both."""
        job = asyncio.ensure_future(self.algorithm.run(context))
        samplers = [policy.sampler for policy in context.policies.values()]
        tasks = {
            job,
            *(asyncio.ensure_future(sampler.watch(context.calls_held)) for sampler in samplers),
        }
        if self._concurrency:
            settings: dict[str, Any] = {"hooks": self.hooks, "isolation": self._place}
            runner = Runner(context.store, agent, concurrency=self._concurrency, **settings)
            tasks.add(asyncio.ensure_future(runner.run()))
        status = "failed"
        reason = "interrupted"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if job not in done and self._rl is not None:  # what it has trained is saved
                context.stop.set()
                await asyncio.wait({job})
            for task in done:
                task.result()
            status = "cancelled" if context.stop.is_set() else "succeeded"
            reason = getattr(self.algorithm, "stopped_because", "done")
        except Exception as error:
            reason = shown(error)
            if not isinstance(error, AgentLightningError):
                reason = f"{type(error).__name__}: {reason}"
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(UnavailableError):  # the error that ended the run says more
                await context.store.update_run(context.run.run_id, status, merge={"reason": reason})

    def _config(self) -> dict[str, Any]:
        """The resolved settings, for the run's manifest."""
        algorithm = self.algorithm
        settings = dataclasses.asdict(algorithm) if dataclasses.is_dataclass(algorithm) else {}
        sampler = (
            self.sampler
            if isinstance(self.sampler, Mapping)
            else {self.sampler or "embedded": "start"}
        )
        models = self.models.items()
        as_given = (
            "dtype",
            "max_sequence_length",
            "device",
            "threads",
            "deterministic",
            "time_limit",
        )
        return {
            "models": {
                name: str(model) if isinstance(model, str | Path) else type(model).__name__
                for name, model in models
            },
            "frozen": {name: model.model or name for name, model in self.frozen.items()},
            "algorithm": {**settings, "name": algorithm.name},
            "credit_by_settings": getattr(algorithm, "credit_by_settings", False),
            "optimizer": dataclasses.asdict(self._optimizer()),
            "lora": None if self.lora is None else dataclasses.asdict(self.lora),
            "learner": self.learner or "torch",
            "sampler": {
                key: value
                for key, value in sampler.items()
                if key in ("embedded", "vllm", "sglang", "model")
            },
            "n_runners": self._concurrency,
            **{name: getattr(self, name) for name in as_given},
        }
