"""`APO`: automatic prompt optimisation by a beam search with textual gradients
(`docs/evaluation.md`).

Rounds of critique, edit and race, from the seed to the best prompts.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from agentlightning.algorithm.apo.candidates import (
    Budget,
    Candidate,
    Lineage,
    OutOfBudget,
    Price,
    Round,
)
from agentlightning.algorithm.apo.edits import (
    OptimizerModel,
    Rejected,
    critique,
    edit,
    placeholders,
)
from agentlightning.algorithm.apo.outcomes import Measuring
from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.evaluation import Evaluation, why_unrewarded
from agentlightning.errors import BackendError, ConfigError, TrainingError, check_settings
from agentlightning.types import Mode, PromptTemplate

FIRST: Final = 2  # tasks before the first decision
ORIGIN_WEIGHT: Final = 8  # how many tasks the mean of a candidate's origin is worth


class Standing(NamedTuple):
    """A candidate's rewards, task by task, and the mean reward of its parent: few tasks say little,
    and an edit is rarely far from its origin."""

    rewards: Sequence[float]
    expected: float

    @property
    def value(self) -> float:
        return (sum(self.rewards) + ORIGIN_WEIGHT * self.expected) / (
            len(self.rewards) + ORIGIN_WEIGHT
        )


def rungs(tasks: int, beyond: int = 0) -> list[int]:
    """Numbers of tasks after which to decide: powers of two above `beyond`, then all.
    `20 → [2, 4, 8, 16, 20]`."""
    powers = (FIRST << power for power in range(tasks.bit_length()))
    return [*(count for count in powers if beyond < count < tasks), tasks]


def survivors(standings: Mapping[str, Standing], keep: int, confidence: float) -> list[str]:
    """The remaining candidates, best first; all have run the same tasks, so task difficulty favours
    none of them.

    - Of m candidates the ⌈m/2⌉ best, but at least `keep` (successive halving: Jamieson and
      Talwalkar, AISTATS 2016).
    - Among these, all that are not clearly worse than the leader (a race: Maron and Moore, NIPS
      1993; Birattari et al., GECCO 2002). With d the differences between its rewards and the
      leader's on the n tasks, a candidate is clearly worse if mean(d) + z·s/√n < 0, z the quantile
      of the normal distribution at `confidence`, and s² = (Σ (d − mean(d))² + R²) / n, R the range
      of all rewards: this adds one difference of the maximum size, so that two or four tasks that
      happen to agree prove nothing."""
    ranking = sorted(standings, key=lambda name: -standings[name].value)
    best = ranking[: max(keep, math.ceil(len(ranking) / 2))]
    leader = standings[best[0]].rewards
    every = [reward for standing in standings.values() for reward in standing.rewards]
    spread = max(every) - min(every)
    quantile = statistics.NormalDist().inv_cdf(confidence)

    def is_worse(rewards: Sequence[float]) -> bool:
        differences = [
            reward - of_leader for reward, of_leader in zip(rewards, leader, strict=True)
        ]
        mean = statistics.fmean(differences)
        count = len(differences)
        variance = (sum((difference - mean) ** 2 for difference in differences) + spread**2) / count
        return mean + quantile * math.sqrt(variance / count) < 0

    return [name for name in best if not is_worse(standings[name].rewards)]


# times as many training tasks as one critique sees are run with a parent; branches draw from them
POOL: Final = 1.5


@dataclass(eq=False)
class BeamSearch:
    """One search and the parts it uses. `best` is the leader of the last finished round."""

    settings: Any  # APO, or a subclass
    context: RunContext
    lineage: Lineage
    measuring: Measuring
    model: OptimizerModel
    budget: Budget

    def __post_init__(self) -> None:
        self.seed = self.best = self.lineage.seed()
        train, self._held_out = (len(self.measuring.tasks[mode]) for mode in ("train", "val"))
        self._batch = min(self.settings.val_batch_size, self._held_out)
        self._shown = min(self.settings.gradient_batch_size, train)
        self._pool = min(math.ceil(POOL * self._shown), train)

    async def run(self) -> None:
        """Continue from what the store has, to the end. OutOfBudget and Stopped leave `best`
        unchanged."""
        await self.lineage.version(self.seed)
        rounds = self.lineage.rounds
        if rounds:
            self.best = self.lineage.candidates[rounds[-1].beam[0]]
            if rounds[-1].final:
                return
        else:
            await self._measure_seed()
        for number in range(rounds[-1].number + 1, self.settings.beam_rounds + 1):
            await self._round(number)
        await self._final()

    async def _measure_seed(self) -> None:
        """Round 0: the seed on all held-out tasks, and its rollouts for the first critiques."""
        held_out = range(self._held_out if self.settings.run_initial_validation else 0)
        of_seed: list[tuple[Candidate, Mode, int]] = [(self.seed, "val", task) for task in held_out]
        await self.measuring.measure([*self._gradient_measures(self.seed), *of_seed])
        if all(outcome.reward is None for outcome in self.measuring.outcomes.values()):
            rollouts = [outcome.rollout for outcome in self.measuring.outcomes.values()]
            raise await why_unrewarded(self.context.store, rollouts)
        await self._end_round(0, [self.seed], [self.seed], {})

    async def _round(self, number: int) -> None:
        beam = [self.lineage.candidates[name] for name in self.lineage.rounds[-1].beam]
        width = self.settings.beam_width
        branches = self.settings.branch_factor
        parents = [beam[index % len(beam)] for index in range(width)]
        await self.measuring.measure(
            [measure for parent in parents for measure in self._gradient_measures(parent)]
        )
        for parent in beam:
            await self.lineage.version(parent)  # branches stored concurrently find it there
        self.context.progress.phase("critique and edit", width * branches)
        made = await self.context.unless_stopped(
            asyncio.gather(
                *(
                    self._branch(number, slot, parents[slot // branches])
                    for slot in range(width * branches)
                )
            )
        )
        if exhausted := next((result for result in made if isinstance(result, OutOfBudget)), None):
            raise exhausted
        candidates = [result for result in made if isinstance(result, Candidate)]
        failures = {
            f"r{number}-{slot}": result
            for slot, result in enumerate(made)
            if isinstance(result, Exception)
        }
        if not candidates and all(
            isinstance(failure, BackendError) for failure in failures.values()
        ):
            raise TrainingError(
                f"the optimiser's model failed all {len(failures)} times in round {number}: "
                f"{next(iter(failures.values()))}. What was measured is kept: fix it, and resume "
                "the run"
            )
        ranking = await self._race([*beam, *candidates], number, 0, self._batch, width)
        rejected = {name: str(failure) for name, failure in failures.items()}
        await self._end_round(number, ranking[:width], [*beam, *candidates], rejected)

    async def _branch(
        self, number: int, slot: int, parent: Candidate
    ) -> Candidate | OutOfBudget | Rejected | BackendError:
        """The candidate made from `parent` by critique and edit, stored; or why there is none."""
        name = f"r{number}-{slot}"
        if (known := self.lineage.candidates.get(name)) is not None:
            return known
        templates = self.lineage.templates(parent)
        changed = [*templates][(number - 1 + slot) % len(templates)]
        try:
            shown = await self._shown_rollouts(name, parent)
            advice = await critique(
                self.model, self.settings.gradient_model, templates, changed, shown, slot
            )
            edited = await edit(
                self.model, self.settings.apply_edit_model, templates[changed], advice
            )
        except (OutOfBudget, Rejected, BackendError) as error:
            return error
        texts = {**parent.texts, changed: edited.template}
        if self.lineage.of_texts(texts) is not None:
            return Rejected("the edit is the same as another")
        made = {"parent": parent.name, "changed": changed, "critique": advice}
        return await self.add(name=name, round=number, texts=texts, **made)

    async def add(self, **fields: Any) -> Candidate:
        """Store a new candidate."""
        candidate = Candidate(**fields, calls=dict(self.budget.optimizer))
        await self.lineage.version(candidate)
        return candidate

    async def _final(self) -> None:
        """A final race over all held-out tasks, among the beam and, if it was measured on all of
        them, the seed."""
        last = self.lineage.rounds[-1]
        racing = [self.lineage.candidates[name] for name in last.beam]
        if (
            len(self.measuring.measured(self.seed.name)) == self._held_out
            and self.seed not in racing
        ):
            racing.append(self.seed)
        ranking = await self._race(racing, last.number, self._batch, self._held_out, 1)
        await self._end_round(last.number + 1, ranking, racing, {}, final=True)

    async def _race(
        self, racing: list[Candidate], number: int, beyond: int, count: int, keep: int
    ) -> list[Candidate]:
        """The rest of `racing` after `count` held-out tasks, best first. Each round starts with
        other tasks, so luck on one batch does not keep a candidate in the beam."""
        first = (number - 1) * self._batch
        order = [(first + offset) % self._held_out for offset in range(count)]
        for rung in rungs(count, beyond):
            tasks = order if len(racing) == 1 else order[:rung]
            await self.measuring.measure(
                [(candidate, "val", task) for candidate in racing for task in tasks]
            )
            standings = {
                candidate.name: Standing(
                    self.measuring.rewards(candidate.name, tasks), self._expected(candidate)
                )
                for candidate in racing
            }
            racing = [
                self.lineage.candidates[name]
                for name in survivors(standings, keep, self.settings.confidence)
            ]
        return racing

    def _expected(self, candidate: Candidate) -> float:
        """The mean reward of the candidate's parent."""
        name = candidate.parent or candidate.name
        return statistics.fmean(self.measuring.rewards(name, self.measuring.measured(name)))

    async def _end_round(
        self,
        number: int,
        beam: list[Candidate],
        racing: list[Candidate],
        rejected: dict[str, str],
        final: bool = False,
    ) -> None:
        names = [candidate.name for candidate in beam]
        calls = dict(self.budget.optimizer)
        scores = {
            candidate.name: self.measuring.score(candidate.name)
            for candidate in racing
            if self.measuring.measured(candidate.name)
        }
        await self.lineage.publish(
            Round(
                number=number,
                beam=names,
                scores=scores,
                rejected=rejected,
                calls=calls,
                final=final,
            )
        )
        self.best = beam[0]
        values = {
            "candidates": float(len(racing)),
            "rejected": float(len(rejected)),
            "stopped_early": float(sum(score.tasks < self._batch for score in scores.values())),
            **self.budget.spent,
        }
        if self.best.name in scores:
            values["val_reward"] = scores[self.best.name].mean
        await self.context.tracking.record(number, values)
        if number and not final:
            self.context.progress.step(number, values)
        for reason in dict.fromkeys(rejected.values()):
            count = sum(why == reason for why in rejected.values())
            self.context.progress.note(
                f"round {number}: {count} of the edits gave no candidate: {reason}"
            )

    def _gradient_measures(self, parent: Candidate) -> list[tuple[Candidate, Mode, int]]:
        """Training tasks to run with a parent: those of its own round, so a parent in several
        rounds reuses them."""
        train = len(self.measuring.tasks["train"])
        return [
            (parent, "train", (parent.round * self._pool + offset) % train)
            for offset in range(self._pool)
        ]

    async def _shown_rollouts(self, name: str, parent: Candidate) -> list[str]:
        drawn = random.Random(f"{self.context.seed}-{name}").sample(
            self._gradient_measures(parent), self._shown
        )
        return [
            await self.measuring.in_words((candidate.name, mode, task))
            for candidate, mode, task in drawn
        ]


@dataclass
class APO:
    """Improves the prompt templates among the agent's resources by a beam search with textual
    gradients.

    In each of `beam_rounds` rounds, the `beam_width` prompts of the beam are run on training tasks.
    From `gradient_batch_size` of these rollouts, `gradient_model` writes a critique, which
    `apply_edit_model` follows in an edit, `branch_factor` times for each prompt. All candidates
    race on `val_batch_size` held-out tasks; the best are the next beam. Finally the beam races on
    all held-out tasks. With several templates, each edit changes one of them, in turn.

    Args: async_openai_client: client for the two models: an `AsyncOpenAI` or an `LLM`; default: a
        client of `endpoint`
            (default: OpenAI's), with the key in OPENAI_API_KEY.
        diversity_temperature: their sampling temperature.
        rollout_batch_timeout: seconds after which running rollouts are cancelled and count 0.
        run_initial_validation: measure the initial prompts on all held-out tasks.
        confidence: how certain it must be that a candidate is worse than the leader before it is
        dropped early.
        templates: names of the templates to tune; default: all.
        max_rollouts, max_tokens, max_usd: limits of the search; tokens and dollars include agents
        and optimiser.
        prices: by model, dollars for a million tokens read and written.
        model_timeout: seconds for an answer of the two models."""

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
    confidence: float = 0.8
    endpoint: str | None = None
    templates: tuple[str, ...] = ()
    max_rollouts: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None
    prices: dict[str, Price] = field(default_factory=dict[str, Price])
    model_timeout: float = 120.0
    name: str = "apo"

    search: ClassVar[type[BeamSearch]] = BeamSearch

    def __class_getitem__(cls, task: object) -> type[APO]:
        return cls  # `APO[Task](…)`, as agents of Agent Lightning 0.3 write it

    def __post_init__(self, async_openai_client: object) -> None:
        counts = (
            "gradient_batch_size",
            "val_batch_size",
            "beam_width",
            "branch_factor",
            "beam_rounds",
        )
        check_settings(self, least={**dict.fromkeys(counts, 1), "confidence": 0.5})
        if self.confidence >= 1:
            raise ConfigError(f"confidence is {self.confidence}; give 0.5 to below 1")
        self.stopped_because = ""
        self.evaluations: list[Evaluation] = []
        self._client = async_openai_client
        self._best: dict[str, PromptTemplate] = {}

    @property
    def steps(self) -> int:
        """Rounds, for a display."""
        return self.beam_rounds

    def get_best_prompt(self, name: str | None = None) -> PromptTemplate:
        """The best version of the template `name`, or of the first. ConfigError before a search."""
        if not self._best:
            raise ConfigError(
                "there is no best prompt yet; Trainer(algorithm=…).fit(…) looks for one"
            )
        return self._best[name or next(iter(self._best))]

    async def run(self, context: RunContext) -> None:
        """Search. However it ends, the best prompts so far are kept. ConfigError and TrainingError
        for problems with the models."""
        if not context.train_tasks or not context.val_tasks:
            raise ConfigError(
                "APO needs training tasks to find faults, and held-out tasks (val_dataset) to "
                "compare prompts"
            )
        search = await self._open(context)
        for name, template in search.lineage.templates(search.seed).items():
            try:
                placeholders(template)  # refuse a malformed template before anything is spent
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
                self.evaluations.append(
                    await search.measuring.evaluation(candidate.name, candidate.round)
                )
        context.progress.note(
            f"the best prompt is {search.best.name}, in {context.directory / 'prompts'}"
        )

    async def _open(self, context: RunContext) -> BeamSearch:
        base = await context.resources()
        budget = Budget(
            self.max_rollouts,
            self.max_tokens,
            self.max_usd,
            self.prices,
            frozenset(context.policies),
        )
        lineage = Lineage(context, base, self.templates)
        if self.max_usd is not None:
            budget.require_prices(self.gradient_model, self.apply_edit_model, *lineage.models())
        model = OptimizerModel(
            self._client, self.endpoint, self.diversity_temperature, self.model_timeout, budget
        )
        await lineage.open()
        budget.spend_calls(lineage.calls())
        measuring = Measuring(context, lineage, budget, self.rollout_batch_timeout)
        await measuring.open()
        return self.search(self, context, lineage, measuring, model, budget)
