"""`APO`: the settings of automatic prompt optimisation, and what is left of it when it is over."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field

from agentlightning.algorithm.apo.budget import Budget, OutOfBudget, Price
from agentlightning.algorithm.apo.lineage import Lineage
from agentlightning.algorithm.apo.measuring import Measuring
from agentlightning.algorithm.apo.model import API, OptimizerModel
from agentlightning.algorithm.apo.search import Search
from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.evaluation import Evaluation
from agentlightning.errors import ConfigError
from agentlightning.types import PromptTemplate


@dataclass
class APO:
    """Improves the prompt templates among the agent's resources by a beam search with textual gradients.

    In each of `beam_rounds` rounds the prompts of the beam, `beam_width` of them, are run on training tasks. From
    `gradient_batch_size` of these rollouts `gradient_model` makes a critique, which `apply_edit_model` follows in an
    edit, `branch_factor` times for each. All are raced on `val_batch_size` held-out tasks; the best are the next beam.
    At last the beam is raced on all held-out tasks. With several templates each edit changes one of them, in turn.

    Args:
        async_openai_client: what to ask the optimiser's models through: an `AsyncOpenAI`, an `AsyncAnthropic` or an
            `LLM`. Without it, `endpoint` (default OpenAI's or Anthropic's own) is asked as `api` has it, with the key
            in OPENAI_API_KEY or ANTHROPIC_API_KEY.
        diversity_temperature: what the optimiser's models sample at; Anthropic's take none.
        rollout_batch_timeout: seconds after which rollouts that are still running are cancelled and count 0.
        run_initial_validation: measure the prompts that the search begins with on all held-out tasks.
        templates: names of the templates to tune; none for all.
        val_samples: rollouts of a candidate on each held-out task.
        confidence: how sure it must be that a candidate is worse than the leader before it is dropped for that.
        max_rollouts, max_tokens, max_usd: where the search ends; tokens and dollars count agents and optimiser.
        prices: by model, dollars for a million tokens read and written.
        model_timeout: seconds for an answer of the optimiser's models."""

    async_openai_client: InitVar[object] = None
    _: KW_ONLY
    gradient_model: str = "gpt-5-mini"
    apply_edit_model: str = "gpt-4.1-mini"
    diversity_temperature: float = 1.0
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    rollout_batch_timeout: float = 3600.0
    run_initial_validation: bool = True
    endpoint: str | None = None
    api: API = "openai"
    templates: tuple[str, ...] = ()
    val_samples: int = 1
    confidence: float = 0.8
    max_rollouts: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None
    prices: dict[str, Price] = field(default_factory=dict[str, Price])
    model_timeout: float = 120.0
    name: str = "apo"
    stopped_because: str = field(default="", init=False)
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation], init=False, repr=False)

    def __post_init__(self, async_openai_client: object) -> None:
        self._client = async_openai_client
        self._best: dict[str, PromptTemplate] = {}
        for name in (
            "gradient_batch_size",
            "val_batch_size",
            "beam_width",
            "branch_factor",
            "beam_rounds",
            "val_samples",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"confidence is {self.confidence}; give 0.5 to below 1")

    @property
    def steps(self) -> int:
        """Rounds, for a display."""
        return self.beam_rounds

    def get_best_prompt(self, name: str | None = None) -> PromptTemplate:
        """The best prompt found, of the template `name` or of the first. ConfigError before there is one."""
        if not self._best:
            raise ConfigError("there is no best prompt yet; Trainer(algorithm=…).fit(…) looks for one")
        return self._best[name or next(iter(self._best))]

    async def run(self, context: RunContext) -> None:
        """Search. However it ends, what was best by then is left. ConfigError and TrainingError as the models say."""
        if not context.train_tasks or not context.val_tasks:
            raise ConfigError(
                "APO needs training tasks to find what is wrong and held-out tasks (val_dataset) to compare prompts"
            )
        search = await self._open(context)
        self.evaluations = []
        try:
            await search.run()
            self.stopped_because = "all rounds done"
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
            budget.require_prices(self.gradient_model, self.apply_edit_model, *lineage.models())
        measuring = Measuring(context, lineage, budget, timeout=self.rollout_batch_timeout, samples=self.val_samples)
        await lineage.open()
        budget.optimizer.update(lineage.calls())
        await measuring.open()
        model = OptimizerModel(
            self._client, self.endpoint, self.api, self.diversity_temperature, self.model_timeout, budget
        )
        return Search(self, context, lineage, measuring, model, budget)
