"""`APO`: automatic prompt optimisation by a beam search with textual gradients.

Rounds of critique, edit and race, from the seed to the best prompts; reads like the algorithm
(`docs/prompt-optimisation.md`). Knows what each part gives, and nothing of how.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Final

from agentlightning.algorithm.apo.budget import OutOfBudget
from agentlightning.algorithm.apo.editing import Rejected, critique, edit
from agentlightning.algorithm.apo.lineage import Candidate, Round
from agentlightning.algorithm.apo.optimizer import PromptOptimizer, Search
from agentlightning.algorithm.apo.racing import Standing, going_on, halved, rungs
from agentlightning.algorithm.evaluation import why_unrewarded
from agentlightning.data.transitions import trace_rollout
from agentlightning.errors import BackendError, ConfigError, TrainingError
from agentlightning.types import Mode


@dataclass(kw_only=True)
class APO(PromptOptimizer):
    """Improves the prompt templates among the agent's resources by a beam search with textual gradients.

    In each of `beam_rounds` rounds the prompts of the beam, `beam_width` of them, are run on training tasks. From
    `gradient_batch_size` of these rollouts `gradient_model` makes a critique, which `apply_edit_model` follows in an
    edit, `branch_factor` times for each. All are raced on `val_batch_size` held-out tasks; the best are the next beam.
    At last the beam is raced on all held-out tasks. With several templates each edit changes one of them, in turn.

    `run_initial_validation` measures the prompts that the search begins with on all held-out tasks. `confidence` is how
    sure it must be that a candidate is worse than the leader before it is dropped for that. For the other settings see
    `PromptOptimizer`."""

    gradient_model: str = "gpt-5-mini"
    apply_edit_model: str = "gpt-4.1-mini"
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    run_initial_validation: bool = True
    confidence: float = 0.8
    name: str = "apo"

    def __class_getitem__(cls, task: object) -> type[APO]:
        return cls  # `APO[Task](…)`, as agents of Agent Lightning 0.3 write it

    def __post_init__(self, async_openai_client: object) -> None:
        super().__post_init__(async_openai_client)
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"confidence is {self.confidence}; give 0.5 to below 1")

    @property
    def counts(self) -> tuple[str, ...]:
        return ("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds", "val_samples")

    @property
    def models(self) -> tuple[str, ...]:
        return self.gradient_model, self.apply_edit_model

    @property
    def steps(self) -> int:
        """Rounds, for a display."""
        return self.beam_rounds

    @property
    def search(self) -> type[BeamSearch]:
        return BeamSearch


POOL: Final = 1.5  # times as many training tasks as one critique sees are run with a parent; branches draw from them


class BeamSearch(Search):
    """`best` is the leader of the last round that is over."""

    settings: APO

    def __post_init__(self) -> None:
        super().__post_init__()
        settings, measuring = self.settings, self.measuring
        self._held_out = len(measuring.tasks["val"])
        self._batch = min(settings.val_batch_size, self._held_out)
        train = len(measuring.tasks["train"])
        self._shown = min(settings.gradient_batch_size, train)
        self._pool = min(math.ceil(POOL * self._shown), train)

    async def run(self) -> None:
        await self.lineage.version(self.seed)
        rounds = self.lineage.rounds
        if rounds:
            self.best = self.lineage.candidates[rounds[-1].beam[0]]
            if rounds[-1].final:
                return
        else:
            self._tell_estimate("before the start")
            await self._measure_seed()
        for number in range(rounds[-1].number + 1, self.settings.beam_rounds + 1):
            await self._round(number)
        await self._final()

    # --- the rounds ---

    async def _measure_seed(self) -> None:
        """Round 0: the seed on all held-out tasks, and the rollouts of the first critiques with it."""
        await self.measuring.measure(
            [
                *self._gradient_measures(self.seed),
                *((self.seed, "val", task) for task in range(self._held_out) if self.settings.run_initial_validation),
            ]
        )
        if all(outcome.failed for outcome in self.measuring.outcomes.values()):
            raise await self._unrewarded()
        self._tell_estimate("after the seed")
        await self._end_round(0, [self.seed], [self.seed], {})

    async def _round(self, number: int) -> None:
        beam = [self.lineage.candidates[name] for name in self.lineage.rounds[-1].beam]
        width, branches = self.settings.beam_width, self.settings.branch_factor
        parents = [beam[index % len(beam)] for index in range(width)]
        await self.measuring.measure([measure for parent in parents for measure in self._gradient_measures(parent)])
        for parent in beam:
            await self.lineage.version(parent)  # branches that are stored at the same time find it there
        self.context.progress.phase("critique and edit", width * branches)
        made = await self.context.unless_stopped(
            asyncio.gather(*(self._branch(number, slot, parents[slot // branches]) for slot in range(width * branches)))
        )
        if exhausted := next((one for one in made if isinstance(one, OutOfBudget)), None):
            raise exhausted
        candidates = [one for one in made if isinstance(one, Candidate)]
        failures = {f"r{number}-{slot}": one for slot, one in enumerate(made) if isinstance(one, Exception)}
        if not candidates and all(isinstance(one, BackendError) for one in failures.values()):
            raise TrainingError(
                f"the optimiser's model answered none of {len(failures)} times in round {number}: "
                f"{next(iter(failures.values()))}. What was measured is kept: mend it, and resume the run"
            )
        ranking = await self._race([*beam, *candidates], number, 0, self._batch, width)
        rejected = {name: str(one) for name, one in failures.items()}
        await self._end_round(number, ranking[:width], [*beam, *candidates], rejected)

    async def _final(self) -> None:
        """The beam, and the seed if it was measured whole, race on over all held-out tasks."""
        last = self.lineage.rounds[-1]
        racing = [self.lineage.candidates[name] for name in last.beam]
        if len(self.measuring.measured(self.seed.name)) == self._held_out and self.seed not in racing:
            racing.append(self.seed)
        ranking = await self._race(racing, last.number, self._batch, self._held_out, 1)
        await self._end_round(last.number + 1, ranking, racing, {}, final=True)

    async def _race(self, racing: list[Candidate], number: int, beyond: int, count: int, keep: int) -> list[Candidate]:
        """Who is left of `racing` after `count` held-out tasks, best first (`racing.py`). Each round begins with other
        tasks, so that luck on one batch does not keep a candidate in the beam."""
        first = (number - 1) * self._batch
        order = [(first + offset) % self._held_out for offset in range(count)]
        for rung in rungs(count, beyond):
            tasks = order if len(racing) == 1 else order[:rung]
            await self.measuring.measure([(one, "val", task) for one in racing for task in tasks])
            standings = {
                one.name: Standing(self.measuring.rewards(one.name, tasks), self._expected(one)) for one in racing
            }
            racing = [self.lineage.candidates[name] for name in going_on(standings, keep, self.settings.confidence)]
        return racing

    def _expected(self, candidate: Candidate) -> float:
        """The mean reward of what the candidate was made from."""
        name = candidate.parent or candidate.name
        return statistics.fmean(self.measuring.rewards(name, self.measuring.measured(name)))

    async def _end_round(
        self, number: int, beam: list[Candidate], racing: list[Candidate], rejected: dict[str, str], final: bool = False
    ) -> None:
        scores = {one.name: self.measuring.score(one.name) for one in racing if self.measuring.measured(one.name)}
        result = Round(
            number=number,
            beam=[one.name for one in beam],
            scores=scores,
            rejected=rejected,
            calls=dict(self.budget.optimizer),
            final=final,
        )
        await self.lineage.publish(result)
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
            count = sum(one == reason for one in rejected.values())
            self.context.progress.note(f"round {number}: {count} of the edits came to nothing: {reason}")

    # --- one branch ---

    async def _branch(
        self, number: int, slot: int, parent: Candidate
    ) -> Candidate | OutOfBudget | Rejected | BackendError:
        """The candidate that critique and edit make of `parent`, stored; or why there is none."""
        name = f"r{number}-{slot}"
        if (known := self.lineage.candidates.get(name)) is not None:
            return known
        templates = self.lineage.templates(parent)
        changed = self.lineage.tuned[(number - 1 + slot) % len(self.lineage.tuned)]
        try:
            shown = await self._shown_rollouts(name, parent)
            said = await critique(self.model, self.settings.gradient_model, templates, changed, shown, slot)
            edited = await edit(self.model, self.settings.apply_edit_model, templates[changed], said)
        except (OutOfBudget, Rejected, BackendError) as error:
            return error
        texts = {**parent.texts, changed: edited.template}
        if self.lineage.of_texts(texts) is not None:
            return Rejected("the edit is the same as another")
        return await self.add(name, number, texts, parent, changed, said)

    def _gradient_measures(self, parent: Candidate) -> list[tuple[Candidate, Mode, int]]:
        """Training tasks to run with a parent: those of its own round, so that a parent of several rounds has them."""
        train = len(self.measuring.tasks["train"])
        return [(parent, "train", (parent.round * self._pool + offset) % train) for offset in range(self._pool)]

    async def _shown_rollouts(self, name: str, parent: Candidate) -> list[str]:
        drawn = random.Random(f"{self.context.seed}-{name}").sample(self._gradient_measures(parent), self._shown)
        return [await self.measuring.in_words((one.name, mode, task)) for one, mode, task in drawn]

    # --- words ---

    def _tell_estimate(self, when: str) -> None:
        settings = self.settings
        branches = settings.beam_rounds * settings.beam_width * settings.branch_factor
        calls = Counter({settings.gradient_model: branches}) + Counter({settings.apply_edit_model: branches})
        rollouts = max(0, self._most_rollouts() - self.budget.rollouts)
        self.context.progress.note(f"{when}: {self.budget.estimate(rollouts, calls, self.lineage.models())}")

    def _most_rollouts(self) -> int:
        """How many the whole search takes if no candidate is ever clearly worse than another."""
        settings = self.settings
        width, branches = settings.beam_width, settings.beam_width * settings.branch_factor
        total = self._held_out * settings.run_initial_validation
        for number in range(settings.beam_rounds):
            old = width if number else 1
            total += self._pool * old + _race_rollouts(branches + old, 0, self._batch, width)
        return total + _race_rollouts(width, self._batch, self._held_out, 1)

    async def _unrewarded(self) -> TrainingError:
        rollouts = [outcome.rollout for outcome in self.measuring.outcomes.values()]
        traced = [trace_rollout(one, await self.measuring.spans(one)) for one in rollouts]
        return await why_unrewarded(self.context.store, traced)


def _race_rollouts(racing: int, beyond: int, tasks: int, keep: int) -> int:
    total = 0
    for rung in rungs(tasks, beyond):
        total += racing * (rung - beyond)
        racing, beyond = halved(racing, keep), rung
    return total
