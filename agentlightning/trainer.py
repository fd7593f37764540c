"""The trainer connects store, engine, gateway, HTTP server, runner and algorithm in one process.

With a `server`, store and gateway run there and runners elsewhere; this process has engine, learner
and algorithm."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    nullcontext,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from agentlightning.algorithm import (
    Algorithm,
    Baseline,
    NoProgress,
    Progress,
    Reinforcement,
    RunContext,
)
from agentlightning.algorithm.base import TrainedPolicy
from agentlightning.algorithm.check import check_algorithm
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
from agentlightning.algorithm.tracking import make_tracker
from agentlightning.config import (
    FIELDS,
    CommandConfig,
    TrainerConfig,
    make_algorithm,
    with_settings_of,
)
from agentlightning.datasets.hub import fetched_model
from agentlightning.display import LiveProgress, hide_library_progress, show_tasks, terminal
from agentlightning.environments import tasks_of
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    UnavailableError,
)
from agentlightning.garbage import rare_garbage_collection
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.factory import read_frozen
from agentlightning.learner.policy_config import AdamW, PolicyConfig, settings_of
from agentlightning.prompts.components import FILE, write_candidate
from agentlightning.proxies import spare_this_machine
from agentlightning.run_server import connect, model_entries, open_store
from agentlightning.runner.agent import AnyAgent, LitAgent, agent_name, as_agent
from agentlightning.runner.isolation import Isolation, boot_of, resolve_isolation, usual_concurrency
from agentlightning.runner.runner import Runner
from agentlightning.runner.shared import absolute_path
from agentlightning.runner.signals import interrupted_at_once, stopping_at_interrupt
from agentlightning.server.serve import is_loop_running, run_on_fastest_loop
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import absolute
from agentlightning.tracing.emit import shown
from agentlightning.tracing.instrument import INSTRUMENT, instrument_agents
from agentlightning.types import LLM, Metrics

if TYPE_CHECKING:
    from agentlightning.learner.pairs import Pair, PairOpener


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

    A loaded `Policy` as `model` is trained in place: the next fit continues from it. A mapping
    trains several models by name, each from its own calls. Without a model, an endpoint of
    `initial_resources` is evaluated. `optimizer` is an `agl.AdamW`, `lora` an `agl.LoRA`,
    `algorithm` an instance, by default `agl.GRPO()`; `store` may be an open store. Models are added
    to `initial_resources` by name, the first trained one also as `llm`. ConfigError for settings
    that are wrong or do not go together.

    Settings, of which None is the default:
    """

    @with_settings_of(TrainerConfig)
    def __init__(self, config: TrainerConfig) -> None:
        if config.n_runners is None:
            config = msgspec.structs.replace(config, n_runners=config.n_workers)
        config.check()
        if config.store is not None and not isinstance(config.store, LightningStore):
            config = msgspec.structs.replace(config, store=absolute(config.store))
        self.config = config
        algorithm = make_algorithm(config.algorithm)
        if config.adapter is not None:
            from agentlightning.v03.adapters import with_adapter

            algorithm = with_adapter(algorithm, config.adapter)
        check_algorithm(algorithm)
        self.algorithm: Algorithm = algorithm
        self.models = {
            name: absolute_path(fetched_model(model)) for name, model in config.trained.items()
        }
        self.frozen = read_frozen(config.models, self.models)
        self._concurrency = config.n_runners or 0
        self._root = Path(config.run_dir or "runs").expanduser().absolute()
        trackers = config.trackers
        self.trackers = tuple(
            map(make_tracker, [trackers] if isinstance(trackers, str) else trackers)
        )
        progress = config.progress
        self.progress: Progress | Literal[False] | None = None if progress is True else progress

    def fit(
        self,
        agent: AnyAgent | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        resume: bool | None = None,
    ) -> FitResult:
        """Train the agent on `train_dataset`, with evaluations on `val_dataset`, and block until
        done. Default: those of the settings.

        A dataset is a list, a path (JSONL, JSON, CSV, Parquet), a DataFrame or a Hugging Face
        dataset; environments and recorded rollouts need none. Ctrl-C saves and returns.
        `resume=True` continues the run in `run_dir`, or the newest. ConfigError for wrong settings
        or tasks, TrainingError if training cannot continue."""
        return run_on_fastest_loop(
            self.fit_async(self._imported(agent), train_dataset, val_dataset, resume=resume)
        )

    async def fit_async(
        self,
        agent: AnyAgent | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        resume: bool | None = None,
    ) -> FitResult:
        """`fit` for code that goes on in its event loop meanwhile."""
        config = self.config
        if self._rl is not None and not self.models:
            given = config.endpoint
            why = f", and those behind {given.endpoint} cannot be had" if given else ""
            raise ConfigError(
                f"{self.algorithm.name} trains weights{why}; give the Trainer a model (a "
                "directory or a Hugging Face id), with sampler={'vllm': URL} where a vLLM "
                "server is to answer, or measure the agent unchanged with Baseline()"
            )
        if config.deterministic and self._overlaps:
            raise ConfigError(
                "deterministic=True needs max_staleness=0: otherwise timing decides what trains "
                "on what"
            )
        loaded = self._agent(agent)
        train_tasks, val_tasks = tasks_of(
            loaded,
            config.train_dataset if train_dataset is None else train_dataset,
            config.val_dataset if val_dataset is None else val_dataset,
        )
        if self._rl is not None and self._rl.evaluate_every and not val_tasks:
            raise ConfigError("evaluate_every needs held-out tasks: give val_dataset, or omit it")
        resume = config.resume if resume is None else resume
        return await self._run(loaded, train_tasks, val_tasks, resume)

    def dev(self, agent: AnyAgent | None = None, train_dataset: Any = None) -> list[EvaluatedTask]:
        """Run the agent once on each task without training, print the traces and the mean reward,
        and return the traces."""
        return run_on_fastest_loop(self.dev_async(self._imported(agent), train_dataset))

    async def dev_async(
        self, agent: AnyAgent | None = None, train_dataset: Any = None
    ) -> list[EvaluatedTask]:
        """`dev` for code that goes on in its event loop meanwhile."""
        trial = copy.copy(self)
        trial.algorithm = Baseline(mode="test")
        loaded = self._agent(agent)
        dataset = self.config.train_dataset if train_dataset is None else train_dataset
        result = await trial._run(loaded, [], tasks_of(loaded, dataset, None)[0], resume=False)
        tasks = [task for evaluation in result.evaluations for task in evaluation.tasks]
        console = terminal(highlight=False, force_jupyter=False)
        show_tasks(console, tasks)
        summary = summarise([measured(task.traced) for task in tasks], Measures())
        console.print(
            f"{summary}; mean reward {summary.estimates['reward'].value:.3f}", markup=False
        )
        return tasks

    def _agent(self, agent: AnyAgent | None) -> LitAgent[Any]:
        """The agent, or else that of the settings. ConfigError if there is none."""
        config = self.config
        if config.instrument is not None:
            here = config.environment is None and not isinstance(config.agent, CommandConfig)
            instrument_agents(config.instrument, here=here)
        given = config.load_agent() if agent is None else agent
        if given is None:
            raise ConfigError("give an agent: fit(agent, tasks)")
        return as_agent(given)

    def _imported(self, agent: AnyAgent | None) -> LitAgent[Any]:
        """The agent, imported so that Ctrl-C interrupts whatever runs. ConfigError if an open store
        belongs to a running event loop, which would wait for itself."""
        if isinstance(self.config.store, LightningStore) and is_loop_running():
            raise ConfigError(
                "the store was opened in the running event loop; use `await trainer.fit_async(…)` "
                "or dev_async"
            )
        loaded = self._agent(agent)
        if self.config.n_runners != 0:
            resolve_isolation(loaded, self.config.isolation)
        return loaded

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
        config = self.config
        algorithm = self.algorithm
        spare_this_machine()  # where agents find the gateway
        if config.n_runners != 0:
            served = bool(self.models) or config.endpoint is not None
            self._place: Isolation = resolve_isolation(agent, config.isolation, served=served)
            boot_of(agent, self._place)  # before anything is made for it
            self._concurrency = config.n_runners or usual_concurrency(self._place)
        if self.models or config.sampler is not None:
            self._opener(Path()).check()
        async with AsyncExitStack() as stack:
            stack.callback(os.environ.pop, INSTRUMENT, None)
            stack.enter_context(rare_garbage_collection())
            # Before and after the job, when an agent's late interrupt_main must not end the run.
            stack.enter_context(interrupted_at_once())
            directory = stack.enter_context(
                run_directory(
                    self._root,
                    algorithm.name,
                    named=config.run_dir is not None,
                    resume=resume,
                    seed=config.seed,
                )
            )
            progress = stack.enter_context(self._display())
            try:
                context = await self._open(
                    stack, agent, directory, train_tasks, val_tasks, progress
                )
            except BaseException:
                directory.forget()
                raise
            stack.push_async_callback(context.tracking.close)
            if config.time_limit is not None:
                context.deadline = asyncio.get_running_loop().time() + config.time_limit
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
        config = self.config
        store = await open_store(stack, config, directory.path)
        opened: dict[str, Pair] = {}
        if self.models:
            opener = self._opener(directory.path)
            opened = {
                name: stack.enter_context(opener.open(source, progress.phase))
                for name, source in self.models.items()
            }
        backends = {name: sampler.backend for name, (sampler, _) in opened.items()}
        entries = model_entries(config, self.algorithm, backends, self.frozen)
        for sampler, _ in opened.values():
            await sampler.check(entries[0].train or Sampling())
        run_id = directory.mark.run_id
        url, dashboard, calls_held = await connect(stack, config, store, entries, run_id)
        stack.enter_context(directory.served_at(url))
        progress.note(f"dashboard: {dashboard}#/runs/{run_id} (when it has ended: agl ui)")
        resources = config.resources
        if entries:
            asked = config.endpoint.sampling_parameters if config.endpoint else {}
            llms = {
                entry.name: LLM(endpoint=f"{url}/v1", model=entry.name, gateway=True)
                for entry in entries
            }
            llm = msgspec.structs.replace(llms[entries[0].name], sampling_parameters=asked)
            resources = {**resources, **(llms if len(llms) > 1 else {}), "llm": llm}
        if config.candidate is not None:
            write_candidate(config.candidate, directory.path / FILE)
        stored = await store.add_resources(resources, metadata={"run_id": run_id})
        if config.run_file is not None:
            directory.keep(config.run_file)
        manifest = make_manifest(self._manifest(), config.seed, train_tasks, val_tasks)
        if directory.resumed:
            await check_data(store, run_id, manifest)
        run = await store.start_run(self.algorithm.name, manifest, run_id=run_id)
        run = await store.update_run(
            run.run_id, merge={"agent": agent_name(agent), "reason": None, "stop": None}
        )
        return RunContext(
            run=run,
            store=store,
            directory=directory.path,
            train_tasks=train_tasks,
            val_tasks=val_tasks,
            seed=config.seed,
            deterministic=config.deterministic,
            # Others add theirs to a shared store; in the run's own, the latest has this very
            # process's address.
            resources_id=None if config.server is None else stored.resources_id,
            policies={
                name: TrainedPolicy(learner, sampler) for name, (sampler, learner) in opened.items()
            },
            calls_held=calls_held,
            progress=progress,
            trackers=self.trackers,
            resume=directory.resumed,
            owns_runner=config.server is None,
            run_time=stored.create_time,
        )

    def _display(self) -> AbstractContextManager[Progress]:
        if self.progress is not None:
            return nullcontext[Progress](self.progress or NoProgress())
        if self.models:
            hide_library_progress()
        return LiveProgress(
            steps=getattr(self.algorithm, "steps", None), time_limit=self.config.time_limit
        )

    def _opener(self, directory: Path) -> PairOpener:
        from agentlightning.learner.pairs import PairOpener

        return PairOpener(
            msgspec.structs.replace(self.config, optimizer=self._optimizer()),
            self.models,
            loss=None if self._rl is None else self._rl.make_loss(),
            reference=getattr(self.algorithm, "reference", False),
            critic=getattr(self.algorithm, "trained_critic", None),
            concurrency=max(1, self._concurrency or 64),
            overlaps=self._overlaps,
            directory=directory,
        )

    def _optimizer(self) -> AdamW:
        """The optimiser, whose schedule ends with the training."""
        rl = self._rl
        return (
            AdamW()
            if rl is None
            else self.config.optimizer.until(rl.steps * rl.minibatches * rl.epochs)
        )

    async def _run_beside_runner(self, agent: LitAgent[Any], context: RunContext) -> None:
        """Run the algorithm and this process's runner; the first to fail ends both."""
        job = asyncio.ensure_future(self.algorithm.run(context))
        samplers = [policy.sampler for policy in context.policies.values()]
        tasks = {
            job,
            *(asyncio.ensure_future(sampler.watch(context.calls_held)) for sampler in samplers),
        }
        if self._concurrency:
            settings: dict[str, Any] = {"hooks": self.config.hooks, "isolation": self._place}
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

    def _manifest(self) -> dict[str, Any]:
        """The resolved settings, for the run's manifest."""
        algorithm = self.algorithm
        fields = dataclasses.asdict(algorithm) if dataclasses.is_dataclass(algorithm) else {}
        config = self.config
        sampler = config.sampler or "embedded"
        sampler = sampler if isinstance(sampler, Mapping) else {sampler: "start"}
        places = ("embedded", "vllm", "sglang", "model")
        names = [name for name in PolicyConfig.__struct_fields__ if name != "seed"]
        return {name: getattr(config, name) for name in names} | {
            "models": {
                name: str(model) if isinstance(model, str | Path) else type(model).__name__
                for name, model in self.models.items()
            },
            "frozen": {name: model.model or name for name, model in self.frozen.items()},
            "algorithm": {**fields, "name": algorithm.name},
            "credit_by_settings": getattr(algorithm, "credit_by_settings", False),
            "optimizer": self._optimizer(),
            "learner": config.learner or "torch",
            "sampler": {key: sampler[key] for key in places if key in sampler},
            "n_runners": self._concurrency,
            "time_limit": config.time_limit,
        }


_NAMES = (*FIELDS, *TrainerConfig.__struct_fields__[len(FIELDS) :])
Trainer.__doc__ = f"{Trainer.__doc__}" + "".join(
    f"    {name}: {settings_of(TrainerConfig)[name].description}\n    " for name in _NAMES
)
