"""`PromptSearch`, the settings that prompt searches share, and `Search`, one of them under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.budget import Budget, OutOfBudget, Price, Spending
from agentlightning.algorithm.evaluation import Evaluation, why_unrewarded
from agentlightning.algorithm.prompt_search.candidates import Candidates
from agentlightning.algorithm.prompt_search.copying import runs_of_words, texts_in
from agentlightning.algorithm.prompt_search.editing import EditingModel, Rejected
from agentlightning.algorithm.prompt_search.measuring import Measuring
from agentlightning.algorithm.prompt_search.tunable import Components, Templates, Tunable
from agentlightning.errors import BackendError, ConfigError, TrainingError, check_settings
from agentlightning.prompts.components import PROMPTS
from agentlightning.prompts.extraction import COMPARED, Component, components_of
from agentlightning.prompts.lineage import Candidate, Round
from agentlightning.types import NamedResources, PromptCandidate, PromptTemplate

CALLS_FILE: Final = "editing_calls.jsonl"


@dataclass(eq=False)
class Search:
    """One search and its parts. `best` leads the last round that ended."""

    context: RunContext
    candidates: Candidates
    measuring: Measuring
    model: EditingModel
    spending: Spending

    def __post_init__(self) -> None:
        self.seed = self.best = self.candidates.seed
        tasks = self.measuring.tasks
        self.train = len(tasks["train"])
        self.held_out = len(tasks["val"])
        texts = (text for given in tasks.values() for task in given for text in texts_in(task))
        self._of_tasks = runs_of_words(texts)

    @property
    def kept_in(self) -> Path:
        """The file or folder of the best texts."""
        return self.context.directory / self.tunable.place

    def tune(self, tunable: Tunable) -> None:
        """Look for better texts than these."""
        self.tunable = tunable
        self.candidates.tune(tunable)
        self.seed = self.best = self.candidates.seed

    async def find_components(
        self, keep: Sequence[str], first: PromptCandidate | None
    ) -> list[Component]:
        """The texts that the program sends, from rollouts with the candidate that it begins with,
        if any."""
        seed = self.candidates.seed
        self.candidates.by_name[seed.name] = seed
        held_out = [(seed, "val", number) for number in range(self.held_out)]
        train = [(seed, "train", number) for number in range(min(COMPARED, self.train))]
        await self.measure_seed([*held_out, *train])
        rollouts = [self.measuring.outcomes[measure] for measure in sorted(self.measuring.asked)]
        recorded = [(rollout, await self.measuring.spans(rollout)) for rollout in rollouts]
        del self.candidates.by_name[seed.name]
        version = await self.candidates.version(seed)
        known = {} if first is None else {version.resources_id: first}
        return components_of(recorded, candidates=known, keep=keep)

    async def measure_seed(self, wanted: Iterable[tuple[Candidate, Any, int]]) -> None:
        """Measure the texts that the search begins with. TrainingError if nothing is rewarded."""
        await self.measuring.measure(wanted)
        rollouts = [self.measuring.outcomes[measure] for measure in self.measuring.asked]
        if all(rollout.reward is None for rollout in rollouts):
            raise await why_unrewarded(self.context.store, rollouts)

    def candidate(
        self, texts: Mapping[str, str], round: int, parent: Candidate, changed: str, **made: Any
    ) -> Candidate:
        """The candidate with these texts, of which `changed` is not the parent's."""
        own = runs_of_words([texts[changed]]) - runs_of_words([parent.texts[changed]])
        copied = min(own & self._of_tasks, default=None)
        if copied is not None:
            self.context.progress.note(
                f"round {round}: an edit of {changed} repeats words of a task: {copied!r}"
            )
        made |= {"parent": parent.name, "changed": changed, "copied": copied}
        return self.candidates.of(texts, round, **made)

    def usable(self, made: Sequence[Candidate | Exception], number: int) -> list[Candidate]:
        """The candidates among what the edits of a round came to. OutOfBudget as it is;
        TrainingError if the model failed each time."""
        for result in made:
            if isinstance(result, OutOfBudget):
                raise result
        if made and all(isinstance(result, BackendError) for result in made):
            raise TrainingError(
                f"the editing model failed all {len(made)} times in round {number}: {made[0]}. "
                "What was measured is kept: fix it, and resume the run"
            )
        reasons = [str(result) for result in made if isinstance(result, Exception)]
        for reason in dict.fromkeys(reasons):
            self.context.progress.note(
                f"round {number}: {reasons.count(reason)} of the edits gave no candidate: {reason}"
            )
        return [result for result in made if isinstance(result, Candidate)]

    async def end_round(
        self,
        number: int,
        ranking: Sequence[Candidate],
        racing: Sequence[Candidate],
        rejected: Mapping[str, str],
        *,
        final: bool = False,
    ) -> None:
        """Store and show the result of a round: the candidates that go on, best first, and the
        scores of all that were compared."""
        self.best = ranking[0]
        scores = {
            candidate.name: self.measuring.score(candidate.name)
            for candidate in racing
            if self.measuring.measured(candidate.name)
        }
        names = [candidate.name for candidate in ranking]
        result = Round(number=number, beam=names, scores=scores, rejected={**rejected}, final=final)
        if not await self.candidates.publish(result):
            return
        values = {
            "candidates": float(len(racing)),
            "rejected": float(len(rejected)),
            **self.spending.metrics,
        }
        if self.best.name in scores:
            values["val_reward"] = scores[self.best.name].mean
        await self.context.tracking.record(number, values)
        if number and not final:
            self.context.progress.step(number, values)


@dataclass
class PromptSearch:
    """Settings of all prompt searches.

    Args: async_openai_client: client for the editing models: an `AsyncOpenAI` or an `LLM`; default:
        a client of `endpoint` (default: OpenAI's), with the key in OPENAI_API_KEY.
        templates: names of the prompt templates to tune, or of the texts that an unchanged program
            sends (`agl prompts`); default: all.
        keep: patterns of such texts that stay as they are, such as `tools.*`.
        budget: where the search stops.
        prices: by model, dollars for a million tokens read and written.
        report_share: share of the held-out tasks by which nothing is chosen: the rewards before and
            after are those of these tasks.
        rollout_batch_timeout: seconds after which running rollouts are cancelled and count 0.
        diversity_temperature: sampling temperature of the editing models.
        model_timeout: seconds for one of their answers."""

    async_openai_client: InitVar[object] = None
    _: KW_ONLY
    endpoint: str | None = None
    templates: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    budget: Budget = field(default_factory=Budget)
    prices: dict[str, Price] = field(default_factory=dict[str, Price])
    report_share: float = 0.5
    rollout_batch_timeout: float = 3600.0
    diversity_temperature: float = 1.0
    model_timeout: float = 120.0

    counts: ClassVar[tuple[str, ...]] = ()
    """Fields that are at least 1."""
    models: ClassVar[tuple[str, ...]] = ()
    """Fields that name editing models."""

    def __class_getitem__(cls, task: object) -> type[PromptSearch]:
        return cls  # `APO[Task](…)`, as agents of Agent Lightning 0.3 write it

    def __post_init__(self, async_openai_client: object) -> None:
        budget: Any = self.budget
        if not isinstance(budget, Budget):
            raise ConfigError(f"budget is {budget!r}; give agl.Budget(rollouts=…)")
        check_settings(self, least={**dict.fromkeys(self.counts, 1), "report_share": 0})
        if self.report_share >= 1:
            raise ConfigError(f"report_share is {self.report_share}; give 0 to below 1")
        self.stopped_because = ""
        self.evaluations: list[Evaluation] = []
        self._client = async_openai_client
        self._best: Mapping[str, PromptTemplate] = {}

    async def search(self, search: Search) -> None:
        """Look for better texts, to the end of the search. OutOfBudget and Stopped end it early."""
        raise NotImplementedError

    def get_best_prompt(self, name: str | None = None) -> PromptTemplate:
        """The best version of the template `name`, or of the first; for a text of an unchanged
        program, with `{hole1}` for what varies. ConfigError before a search."""
        if not self._best:
            raise ConfigError(
                "there is no best prompt yet; Trainer(algorithm=…).fit(…) looks for one"
            )
        return self._best[name or next(iter(self._best))]

    async def run(self, context: RunContext) -> None:
        """Search. However it ends, the best texts so far are kept. ConfigError and TrainingError
        for problems with the models."""
        if not (context.train_tasks and context.val_tasks):
            raise ConfigError(
                "a prompt search needs training tasks to find faults, and held-out tasks "
                "(val_dataset) to compare prompts"
            )
        search = await self._open(context)
        self.evaluations = []
        base = (await context.resources()).resources
        try:
            search.tune(await self._tunable(search, base))
            context.progress.note(f"texts that may change: {', '.join(search.seed.texts)}")
            await search.candidates.version(search.seed)
            await self.search(search)
            self.stopped_because = "the search is over"
        except (Stopped, OutOfBudget) as end:
            self.stopped_because = str(end)
        finally:
            self._best = {
                name: search.tunable.template(name, text)
                for name, text in search.best.texts.items()
            }
        self.evaluations = await search.measuring.report([search.seed, search.best])
        found = "the first prompts are the best"
        if search.best is not search.seed:
            found = f"the best prompts, candidate {search.best.name}, are in {search.kept_in}"
        context.progress.note(
            f"{len(search.candidates.by_name)} candidates were compared on {search.held_out} "
            f"held-out tasks, the first and the best on {len(search.measuring.tasks['test'])} "
            f"others; {found}"
        )

    @property
    def editing_models(self) -> list[str]:
        return [getattr(self, name) for name in self.models]

    def spending(self, free: frozenset[str]) -> Spending:
        """The spending of a search in which these models cost nothing."""
        return Spending(self.budget, self.prices, free)

    async def _tunable(self, search: Search, resources: NamedResources) -> Tunable:
        if any(isinstance(resource, PromptTemplate) for resource in resources.values()):
            return Templates(resources, self.templates)
        given = resources.get(PROMPTS)
        first = given if isinstance(given, PromptCandidate) else None
        return Components(await search.find_components(self.keep, first), self.templates, first)

    async def _open(self, context: RunContext) -> Search:
        base = await context.resources()
        spending = self.spending(frozenset(context.policies))
        candidates = Candidates(context, base)
        spending.require_prices(*self.editing_models, *candidates.models)
        model = EditingModel(
            self._client,
            self.endpoint,
            self.diversity_temperature,
            self.model_timeout,
            spending,
            context.directory / CALLS_FILE,
        )
        await candidates.open()
        measuring = Measuring(
            context, candidates, spending, self.rollout_batch_timeout, self.report_share
        )
        await measuring.open()
        return Search(context, candidates, measuring, model, spending)


async def attempted(work: Any) -> Any:
    """The result of an edit, or why there is none."""
    try:
        return await work
    except (OutOfBudget, Rejected, BackendError) as error:
        return error
