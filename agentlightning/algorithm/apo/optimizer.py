"""What every prompt optimiser is: settings, a search over candidates, and the best prompts it leaves.

Knows how the parts of a search are put together. Does not know how one searches.
"""

from __future__ import annotations

import abc
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from agentlightning.algorithm.apo.budget import Budget, OutOfBudget, Price
from agentlightning.algorithm.apo.editing import placeholders
from agentlightning.algorithm.apo.lineage import Candidate, Lineage
from agentlightning.algorithm.apo.measuring import Measuring
from agentlightning.algorithm.apo.model import API, OptimizerModel
from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.evaluation import Evaluation
from agentlightning.errors import ConfigError, check_settings
from agentlightning.types import PromptTemplate


@dataclass(eq=False)
class Search(abc.ABC):
    """One search, by what it works with. `best` is the best candidate that is known for sure."""

    settings: Any  # of the optimiser that it is a search of
    context: RunContext
    lineage: Lineage
    measuring: Measuring
    model: OptimizerModel
    budget: Budget

    def __post_init__(self) -> None:
        self.seed = self.best = self.lineage.seed()

    @abc.abstractmethod
    async def run(self) -> None:
        """Go on from what the store holds, to the end. OutOfBudget and Stopped leave `best` as it was then."""

    async def add(
        self,
        name: str,
        number: int,
        texts: dict[str, str],
        parent: Candidate | None = None,
        changed: str | None = None,
        said: str | None = None,
    ) -> Candidate:
        """A new candidate of round `number`; known before it is stored, as others may come to the same."""
        candidate = Candidate(
            name=name,
            round=number,
            texts=texts,
            parent=None if parent is None else parent.name,
            changed=changed,
            critique=said,
            calls=dict(self.budget.optimizer),
        )
        self.lineage.candidates[name] = candidate
        await self.lineage.version(candidate)
        return candidate


@dataclass
class PromptOptimizer(abc.ABC):
    """Improves the prompt templates among the agent's resources.

    Args:
        async_openai_client: what to ask the optimiser's models through: an `AsyncOpenAI`, an `AsyncAnthropic` or an
            `LLM`. Without it, `endpoint` (default OpenAI's or Anthropic's own) is asked as `api` has it, with the key
            in OPENAI_API_KEY or ANTHROPIC_API_KEY.
        diversity_temperature: what the optimiser's models sample at; Anthropic's take none.
        rollout_batch_timeout: seconds after which rollouts that are still running are cancelled and count 0.
        templates: names of the templates to tune; none for all.
        val_samples: rollouts of a candidate on each held-out task.
        max_rollouts, max_tokens, max_usd: where the search ends; tokens and dollars count agents and optimiser.
        prices: by model, dollars for a million tokens read and written.
        model_timeout: seconds for an answer of the optimiser's models."""

    async_openai_client: InitVar[object] = None
    _: KW_ONLY
    endpoint: str | None = None
    api: API = "openai"
    diversity_temperature: float = 1.0
    rollout_batch_timeout: float = 3600.0
    templates: tuple[str, ...] = ()
    val_samples: int = 1
    max_rollouts: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None
    prices: dict[str, Price] = field(default_factory=dict[str, Price])
    model_timeout: float = 120.0

    def __post_init__(self, async_openai_client: object) -> None:
        self.stopped_because = ""
        self.evaluations: list[Evaluation] = []
        self._client = async_openai_client
        self._best: dict[str, PromptTemplate] = {}
        check_settings(self, least=dict.fromkeys(self.counts, 1))

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of settings that are at least 1."""
        return ("val_samples",)

    @property
    @abc.abstractmethod
    def models(self) -> tuple[str, ...]:
        """Names of the optimiser's models."""

    @property
    @abc.abstractmethod
    def search(self) -> type[Search]:
        """How it searches."""

    def get_best_prompt(self, name: str | None = None) -> PromptTemplate:
        """The best prompt found, of the template `name` or of the first. ConfigError before there is one."""
        if not self._best:
            raise ConfigError("there is no best prompt yet; Trainer(algorithm=…).fit(…) looks for one")
        return self._best[name or next(iter(self._best))]

    async def run(self, context: RunContext) -> None:
        """Search. However it ends, what was best by then is left. ConfigError and TrainingError as the models say."""
        if not context.train_tasks or not context.val_tasks:
            raise ConfigError(
                "training tasks are needed to see what is wrong, and held-out tasks (val_dataset) to compare prompts"
            )
        search = await self._open(context)
        for name, template in search.lineage.templates(search.seed).items():
            try:
                placeholders(template)  # one that is not well formed is refused before anything is spent
            except ConfigError as error:
                raise ConfigError(f"the prompt template {name!r} cannot be used: {error}") from None
        self.evaluations = []
        try:
            await search.run()
            self.stopped_because = "the search is over"
        except (Stopped, OutOfBudget) as end:
            self.stopped_because = str(end)
        finally:
            self._best = search.lineage.templates(search.best)
        for candidate in (search.seed, search.best):
            if search.measuring.measured(candidate.name):
                self.evaluations.append(await search.measuring.evaluation(candidate.name, candidate.round))
        context.progress.note(f"the best prompt is {search.best.name}, in {context.directory / 'prompts'}")

    async def _open(self, context: RunContext) -> Search:
        store, resources_id = context.store, context.resources_id
        base = await (store.get_resources_by_id(resources_id) if resources_id else store.get_latest_resources())
        if base is None:
            raise ConfigError("there are no resources; give the Trainer initial_resources with a PromptTemplate")
        budget = Budget(self.max_rollouts, self.max_tokens, self.max_usd, self.prices, frozenset(context.policies))
        lineage = Lineage(context, base, self.templates)
        if self.max_usd is not None:
            budget.require_prices(*self.models, *lineage.models())
        model = OptimizerModel(
            self._client, self.endpoint, self.api, self.diversity_temperature, self.model_timeout, budget
        )
        await lineage.open()
        budget.optimizer.update(lineage.calls())
        measuring = Measuring(context, lineage, budget, timeout=self.rollout_batch_timeout, samples=self.val_samples)
        await measuring.open()
        return self.search(self, context, lineage, measuring, model, budget)
