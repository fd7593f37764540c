"""`APO`: automatic prompt optimisation by a beam search with textual gradients
(`docs/evaluation.md`)."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from agentlightning.algorithm.prompt_search.editing import critique, edit
from agentlightning.algorithm.prompt_search.search import PromptSearch, Search, attempted
from agentlightning.prompts.lineage import Candidate
from agentlightning.types import Mode

FIRST: Final = 2  # tasks before the first decision
# times as many training tasks as one critique sees are run with a parent; branches draw from them
POOL: Final = 1.5


def rungs(tasks: int, beyond: int = 0) -> list[int]:
    """Numbers of tasks after which to decide: powers of two above `beyond`, then all.
    `20 → [2, 4, 8, 16, 20]`."""
    powers = (FIRST << power for power in range(tasks.bit_length()))
    return [*(count for count in powers if beyond < count < tasks), tasks]


@dataclass
class APO(PromptSearch):
    """Improves the prompt templates among the agent's resources by a beam search with textual
    gradients.

    In each of `beam_rounds` rounds, the `beam_width` prompts of the beam are run on training tasks.
    From `gradient_batch_size` of these rollouts, `gradient_model` writes a critique, which
    `apply_edit_model` follows in an edit, `branch_factor` times for each prompt. All candidates
    race on `val_batch_size` held-out tasks, the worse half leaving each time that the number of
    tasks doubles; the best are the next beam. Finally the beam races on all held-out tasks. With
    several templates, each edit changes one of them, in turn.

    Args: run_initial_validation: measure the initial prompts on all held-out tasks."""

    _: KW_ONLY
    gradient_model: str = "gpt-5-mini"
    apply_edit_model: str = "gpt-4.1-mini"
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    run_initial_validation: bool = True
    name: str = "apo"

    counts: ClassVar = (
        "gradient_batch_size",
        "val_batch_size",
        "beam_width",
        "branch_factor",
        "beam_rounds",
    )
    models: ClassVar = ("gradient_model", "apply_edit_model")

    @property
    def steps(self) -> int:
        """Rounds, for a display."""
        return self.beam_rounds

    async def search(self, search: Search) -> None:
        await BeamSearch(self, search).run()


class BeamSearch:
    """The rounds of critique, edit and race, from the seed to the best prompts."""

    def __init__(self, settings: APO, search: Search) -> None:
        self._settings = settings
        self._search = search
        self._measuring = search.measuring
        self._batch = min(settings.val_batch_size, search.held_out)
        self._shown = min(settings.gradient_batch_size, search.train)
        self._pool = min(math.ceil(POOL * self._shown), search.train)

    async def run(self) -> None:
        seed = self._search.seed
        held_out = range(self._search.held_out if self._settings.run_initial_validation else 0)
        on_held_out: list[tuple[Candidate, Mode, int]] = [(seed, "val", task) for task in held_out]
        await self._search.measure_seed([*self._parent_measures(seed), *on_held_out])
        await self._search.end_round(0, [seed], [seed], {})
        beam = [seed]
        for number in range(1, self._settings.beam_rounds + 1):
            beam = await self._round(number, beam)
        if held_out and seed not in beam:
            beam.append(seed)
        last = self._settings.beam_rounds
        ranking = await self._race(beam, last, self._batch, self._search.held_out, 1)
        await self._search.end_round(last + 1, ranking, beam, {}, final=True)

    async def _round(self, number: int, beam: list[Candidate]) -> list[Candidate]:
        """The next beam."""
        width = self._settings.beam_width
        branches = self._settings.branch_factor
        parents = [beam[index % len(beam)] for index in range(width)]
        await self._measuring.measure(
            [measure for parent in beam for measure in self._parent_measures(parent)]
        )
        self._search.context.progress.phase("critique and edit", width * branches)
        made: list[Candidate | Exception] = await self._search.context.unless_stopped(
            asyncio.gather(
                *(
                    attempted(self._branch(number, slot, parents[slot // branches]))
                    for slot in range(width * branches)
                )
            )
        )
        usable = self._search.usable(made, number)
        racing = list({candidate.name: candidate for candidate in [*beam, *usable]}.values())
        ranking = await self._race(racing, number, 0, self._batch, width)
        rejected = {
            f"r{number}-{slot}": str(result)
            for slot, result in enumerate(made)
            if isinstance(result, Exception)
        }
        await self._search.end_round(number, ranking[:width], racing, rejected)
        return ranking[:width]

    async def _branch(self, number: int, slot: int, parent: Candidate) -> Candidate:
        """The candidate made from `parent` by critique and edit."""
        names = [*parent.texts]
        changed = names[(number - 1 + slot) % len(names)]
        search = self._search
        sample = f"r{number}-{slot}"
        drawn = random.Random(f"{search.context.seed}-{sample}").sample(
            self._parent_measures(parent), self._shown
        )
        shown = [
            await self._measuring.in_words((candidate.name, mode, task))
            for candidate, mode, task in drawn
        ]
        critic = self._settings.gradient_model
        editor = self._settings.apply_edit_model
        advice = await critique(search.model, critic, sample, parent.texts, changed, shown, slot)
        texts = await edit(
            search.model, editor, sample, search.tunable, parent.texts, changed, critique=advice
        )
        return search.candidate(texts, number, parent, changed, critique=advice)

    async def _race(
        self, racing: list[Candidate], number: int, beyond: int, count: int, keep: int
    ) -> list[Candidate]:
        """The rest of `racing` after `count` held-out tasks, best first: at each rung the better
        half goes on, but at least `keep` (successive halving: Jamieson and Talwalkar, AISTATS
        2016). Each round starts with other tasks, so luck on one batch does not keep a candidate in
        the beam."""
        first = (number - 1) * self._batch
        held_out = self._search.held_out
        order = [(first + offset) % held_out for offset in range(count)]
        for rung in rungs(count, beyond):
            tasks = order[:rung]
            await self._measuring.measure(
                [(candidate, "val", task) for candidate in racing for task in tasks]
            )
            racing = sorted(racing, key=lambda one: -self._measuring.score(one.name, tasks).mean)
            racing = racing[: max(keep, math.ceil(len(racing) / 2))]
        return racing

    def _parent_measures(self, parent: Candidate) -> list[tuple[Candidate, Any, int]]:
        """Training tasks to run with a parent: those of its own round, so a parent in several
        rounds reuses them."""
        return [
            (parent, "train", (parent.round * self._pool + offset) % self._search.train)
            for offset in range(self._pool)
        ]
