"""`GEPA`: reflective prompt evolution (Agrawal et al., 2025) by the `gepa` package, on rollouts of
this house.

The package, in a thread of its own, chooses parents from the Pareto front of the held-out tasks and
accepts what does better on a minibatch. This module gives it rewards and edits; candidates,
rollouts and budget are those of `APO`."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

from agentlightning.algorithm.apo.apo import APO, BeamSearch
from agentlightning.algorithm.apo.candidates import Candidate, OutOfBudget, Round
from agentlightning.algorithm.apo.edits import Rejected, critique, edit
from agentlightning.errors import BackendError, ConfigError, TrainingError, check_settings
from agentlightning.types import Mode

T = TypeVar("T")
Task = tuple[Mode, int]
Texts = dict[str, str]


@dataclass(eq=False)
class Evolution(BeamSearch):
    """The package's adapter and its reflection, in one: called in its thread, the work is done in
    our event loop."""

    propose_new_texts = None  # the package asks for it: edits are made by `reflect_many`

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._gepa: Any = importlib.import_module("gepa")
            self._reflection: Any = importlib.import_module(
                "gepa.proposer.reflective_mutation.reflection_lm"
            )
            self._sampling: Any = importlib.import_module("gepa.strategies.proposal_sampling")
        except ImportError:
            raise ConfigError("GEPA needs its package: pip install 'gepa>=0.1.4,<0.2'") from None
        self._loop = asyncio.get_running_loop()
        # the package goes on after errors; the first of ours ends it
        self._ended: BaseException | None = None
        self._edits = 0

    async def run(self) -> None:
        await self.lineage.version(self.seed)
        result = await asyncio.to_thread(
            self._gepa.optimize,
            seed_candidate=dict(self.seed.texts),
            trainset=[("train", number) for number in range(len(self.measuring.tasks["train"]))],
            valset=[("val", number) for number in range(len(self.measuring.tasks["val"]))],
            adapter=self,
            reflection_strategy=self,
            reflection_minibatch_size=self.settings.reflection_minibatch_size,
            sampling_strategy=self._sampling.IndependentSampling(self.settings.proposals),
            max_metric_calls=self.settings.max_metric_calls,
            stop_callbacks=[self._has_ended],
            run_dir=str(self.context.directory / "gepa"),
            seed=self.context.seed,
            raise_on_exception=False,
        )
        if self._ended is not None and not isinstance(self._ended, OutOfBudget):
            raise self._ended
        self.best = self.lineage.of_texts(result.best_candidate) or self.seed
        measured = [
            one for one in self.lineage.candidates.values() if self.measuring.measured(one.name)
        ]
        scores = {one.name: self.measuring.score(one.name) for one in measured}
        calls = dict(self.budget.optimizer)
        await self.lineage.publish(
            Round(number=1, beam=[self.best.name], scores=scores, calls=calls, final=True)
        )
        values = {
            "val_reward": scores[self.best.name].mean,
            "candidates": float(len(self.lineage.candidates)),
        }
        await self.context.tracking.record(1, values | self.budget.spent)
        if self._ended is not None:
            raise self._ended

    # --- called by the package, in its thread ---

    def evaluate(self, batch: list[Task], candidate: Texts, capture_traces: bool = False) -> Any:
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[Texts, list[Task]]]) -> list[Any]:
        return self._wait(self._measure(items))

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: list[str]
    ) -> Any:
        return {
            name: [{"run": words} for words in eval_batch.trajectories]
            for name in components_to_update
        }

    def reflect(self, *job: Any) -> Any:
        return self.reflect_many([job])[0]

    def reflect_many(
        self, jobs: Sequence[tuple[Texts, Mapping[str, Sequence[Mapping[str, str]]], list[str]]]
    ) -> Any:
        made = self._wait(self._edit_all(jobs))
        return [(self._reflection.ReflectionProposal(new_texts=texts), self) for texts in made]

    def _has_ended(self, state: object) -> bool:
        return self._ended is not None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            if self._ended is not None:
                raise self._ended
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            work.close()
            self._ended = self._ended or error
            raise

    # --- in our event loop ---

    async def _measure(self, items: list[tuple[Texts, list[Task]]]) -> list[Any]:
        known = [self.lineage.of_texts(texts) or await self._add(texts) for texts, _ in items]
        await self.measuring.measure(
            [
                (one, mode, number)
                for one, (_, batch) in zip(known, items, strict=True)
                for mode, number in batch
            ]
        )
        batches: list[Any] = []
        for one, (_, batch) in zip(known, items, strict=True):
            measures = [(one.name, *task) for task in batch]
            words = [await self.measuring.in_words(measure) for measure in measures]
            rewards = [self.measuring.outcomes[measure].reward or 0.0 for measure in measures]
            batches.append(
                self._gepa.EvaluationBatch(outputs=words, scores=rewards, trajectories=words)
            )
        return batches

    async def _edit_all(self, jobs: Sequence[tuple[Texts, Any, list[str]]]) -> list[Texts]:
        made = await self.context.unless_stopped(
            asyncio.gather(*(self._edit(*job) for job in jobs))
        )
        if made and all(isinstance(one, BackendError) for one in made):
            raise TrainingError(
                f"the optimiser's model failed: {made[0]}. Fix it, and resume the run"
            )
        for one in made:
            if isinstance(one, Exception):
                self.context.progress.note(f"an edit came to nothing: {one}")
        return [one if isinstance(one, dict) else {} for one in made]

    async def _edit(
        self, texts: Texts, shown: Any, changed: list[str]
    ) -> Texts | Rejected | BackendError:
        parent = self.lineage.of_texts(texts) or self.seed
        templates, (name, *_), model = (
            self.lineage.templates(parent),
            changed,
            self.settings.reflection_model,
        )
        self._edits += 1
        try:
            words = [one["run"] for one in shown[name]]
            said = await critique(self.model, model, templates, name, words, self._edits)
            edited = await edit(self.model, model, templates[name], said)
        except (Rejected, BackendError) as error:
            return error
        new = {**texts, name: edited.template}
        if self.lineage.of_texts(new) is None:
            await self._add(new, parent=parent.name, changed=name, critique=said)
        return {name: edited.template}

    async def _add(self, texts: Texts, **made: Any) -> Candidate:
        return await self.add(name=f"g{len(self.lineage.candidates)}", round=1, texts=texts, **made)


@dataclass
class GEPA(APO):
    """Improves the prompt templates among the agent's resources as the `gepa` package does
    (`pip install gepa`).

    Until `max_metric_calls` measurements are made, `proposals` parents at a time are run on
    `reflection_minibatch_size` training tasks each, and `reflection_model` edits one of their
    templates. Of APO's settings those of the client, the templates and the budget hold here too.
    ConfigError where the package is not installed."""

    _: KW_ONLY
    reflection_model: str = "gpt-5-mini"
    reflection_minibatch_size: int = 3
    proposals: int = 4
    max_metric_calls: int = 500
    name: str = "gepa"

    search: ClassVar[type[BeamSearch]] = Evolution

    def __post_init__(self, async_openai_client: object) -> None:
        super().__post_init__(async_openai_client)
        self.gradient_model = self.apply_edit_model = self.reflection_model
        check_settings(
            self,
            least=dict.fromkeys(("reflection_minibatch_size", "proposals", "max_metric_calls"), 1),
        )
