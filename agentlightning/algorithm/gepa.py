"""`GEPA`: reflective prompt evolution (Agrawal et al., 2025) by the `gepa` package
(`docs/evaluation.md`).

The package, in a thread of its own, chooses parents from the Pareto front of the held-out tasks and
accepts what does better on a minibatch. Rollouts, edits and budget are those of every prompt
search."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from agentlightning.algorithm.prompt_search.editing import edit
from agentlightning.algorithm.prompt_search.search import PromptSearch, Search, attempted
from agentlightning.errors import ConfigError
from agentlightning.prompts.lineage import Candidate
from agentlightning.types import Mode

logger = logging.getLogger(__name__)

T = TypeVar("T")
Task: TypeAlias = tuple[Mode, int]
Texts: TypeAlias = dict[str, str]

IDLE_ROUNDS: Final = 10  # without a rollout that the search had not asked for; then it is over


@dataclass
class GEPA(PromptSearch):
    """Improves the prompts of an agent by reflective evolution with a Pareto front.

    In each round `proposals` parents, each among the best on some held-out task, run on
    `reflection_minibatch_size` training tasks; `reflection_model` reads these rollouts and writes
    another text. What does better on the same tasks is measured on all held-out tasks. With several
    texts, each edit changes one, in turn. The search ends when the budget is spent, or when ten
    rounds brought nothing new.

    Args: perfect_reward: rollouts that all have it are not learned from."""

    _: KW_ONLY
    reflection_model: str = "gpt-5-mini"
    reflection_minibatch_size: int = 3
    proposals: int = 2
    perfect_reward: float = 1.0
    name: str = "gepa"

    counts: ClassVar = ("reflection_minibatch_size", "proposals")
    models: ClassVar = ("reflection_model",)

    def __post_init__(self, async_openai_client: object) -> None:
        super().__post_init__(async_openai_client)
        if importlib.util.find_spec("gepa") is None:
            raise ConfigError("GEPA needs its package: pip install 'agent-lightning-next[gepa]'")

    async def search(self, search: Search) -> None:
        await search.measure_seed([(search.seed, "val", task) for task in range(search.held_out)])
        await search.end_round(0, [search.seed], [search.seed], {})
        await Evolution(self, search).run()


class Evolution:
    """The adapter of the package and its reflection: called in its thread, the work is done in our
    event loop."""

    propose_new_texts = None  # the package asks for it: edits are made by `reflect_many`

    def __init__(self, settings: GEPA, search: Search) -> None:
        self._settings = settings
        self._search = search
        self._loop = asyncio.get_running_loop()
        self._package: Any = importlib.import_module("gepa")
        self._reflection: Any = importlib.import_module(
            "gepa.proposer.reflective_mutation.reflection_lm"
        )
        self._error: BaseException | None = None
        self._rounds = 0
        self._idle = 0
        self._asked = 0

    async def run(self) -> None:
        sampling: Any = importlib.import_module("gepa.strategies.proposal_sampling")
        try:
            await asyncio.to_thread(
                self._package.optimize,
                seed_candidate=dict(self._search.seed.texts),
                trainset=[("train", number) for number in range(self._search.train)],
                valset=[("val", number) for number in range(self._search.held_out)],
                adapter=self,
                reflection_strategy=self,
                reflection_minibatch_size=self._settings.reflection_minibatch_size,
                sampling_strategy=sampling.IndependentSampling(self._settings.proposals),
                perfect_score=self._settings.perfect_reward,
                stop_callbacks=[self._is_over],
                logger=self,
                seed=self._search.context.seed,
            )
        finally:
            await self._end_round(final=True)

    # --- called by the package, in its thread ---

    def log(self, message: str) -> None:
        logger.debug("gepa: %s", message)

    def evaluate(self, batch: list[Task], candidate: Texts, capture_traces: bool = False) -> Any:
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[Texts, list[Task]]]) -> list[Any]:
        return self._wait(self._measure(items))

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: list[str]
    ) -> Any:
        runs = [{"run": words} for words in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, runs)

    def reflect(self, *job: Any) -> Any:
        return self.reflect_many([job])[0]

    def reflect_many(self, jobs: Sequence[tuple[Texts, Any, list[str]]]) -> list[Any]:
        edited = self._wait(self._edit(jobs))
        return [(self._reflection.ReflectionProposal(new_texts=texts), self) for texts in edited]

    def _is_over(self, state: object) -> bool:
        asked = len(self._search.measuring.asked)
        self._idle = 0 if asked > self._asked else self._idle + 1
        self._asked = asked
        if self._rounds and not self._idle:
            self._wait(self._end_round())
        self._rounds += 1
        return self._idle >= IDLE_ROUNDS

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. The package goes on after an edit that failed: the first error of
        ours is raised again each time, until it has ended the search."""
        try:
            if self._error is not None:
                raise self._error
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            work.close()
            self._error = error
            raise

    # --- in our event loop ---

    def _candidate(self, texts: Texts) -> Candidate:
        return self._search.candidates.of(texts, self._rounds)

    async def _measure(self, items: list[tuple[Texts, list[Task]]]) -> list[Any]:
        measuring = self._search.measuring
        asked = [(self._candidate(texts), batch) for texts, batch in items]
        await measuring.measure([(one, *task) for one, batch in asked for task in batch])
        batches: list[Any] = []
        for one, batch in asked:
            words = [await measuring.in_words((one.name, *task)) for task in batch]
            rewards = [measuring.reward(one.name, *task) for task in batch]
            batches.append(
                self._package.EvaluationBatch(outputs=words, scores=rewards, trajectories=words)
            )
        return batches

    async def _edit(self, jobs: Sequence[tuple[Texts, Any, list[str]]]) -> list[Texts]:
        """The new texts of each job; none where the edit came to nothing."""
        search = self._search
        search.context.progress.phase("edit", len(jobs))
        made: list[Candidate | Exception] = await search.context.unless_stopped(
            asyncio.gather(
                *(
                    attempted(self._edited(f"r{self._rounds}-{slot}", *job))
                    for slot, job in enumerate(jobs)
                )
            )
        )
        search.usable(made, self._rounds)
        return [one.texts if isinstance(one, Candidate) else {} for one in made]

    async def _edited(self, sample: str, texts: Texts, shown: Any, changed: list[str]) -> Candidate:
        search = self._search
        (name,) = changed
        runs = [one["run"] for one in shown[name]]
        model = self._settings.reflection_model
        new = await edit(search.model, model, sample, search.tunable, texts, name, shown=runs)
        return search.candidate(new, self._rounds, self._candidate(texts), name)

    async def _end_round(self, *, final: bool = False) -> None:
        """The best is the best on all held-out tasks."""
        measuring = self._search.measuring
        racing = [
            one
            for one in self._search.candidates.by_name.values()
            if len(measuring.measured(one.name)) == self._search.held_out
        ]
        racing.sort(key=lambda one: -measuring.score(one.name).mean)
        await self._search.end_round(self._rounds, racing, racing, {}, final=final)
