"""Detects training that breaks down: exploding gradients, collapsing rewards, a sampler with other
weights."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.excluded import MANY, excluded_often
from agentlightning.data.rewards import BEFORE_ANY_CALL, UNCLEAR
from agentlightning.errors import TrainingError

FAR: Final = 100.0  # tolerances; above that, sampler and learner have different weights
# nats per token: catches tokens that the learner finds unlikely, whose ratios stay near 0
FAR_KL: Final = 0.1
EXPLOSION: Final = 20.0  # times the usual gradient; between batches it varies by small factors
USUAL: Final = 20  # norms whose median is the usual one
FEWEST: Final = 5  # norms before there is a usual one
NOTED_AFTER: Final = 3  # steps without any reward before a note
LOST: Final = {
    UNCLEAR: "make their calls with agl.openai_client, or name the call by its tool_call_id",
    BEFORE_ANY_CALL: "emit them after the answer that they are about",
}
"""What to do about intermediate rewards that belong to no call, by reason."""
ROUNDING: Final = 1e-2  # a tolerance below this is float32's


class GradientNorms:
    """The usual gradient norms. The loss is no indicator: a policy gradient's loss is about 0 at
    any scale."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._row = 0

    def add(self, norm: float) -> int:
        """Count the consecutive steps, including this one, that exceeded `EXPLOSION` times the
        median norm of the steps before. A step that trained nothing has norm 0. After `[1.0] * 5`,
        30.0 gives 1 and 40.0 gives 2."""
        if norm == 0:
            return 0
        if len(self._usual) >= FEWEST and norm > EXPLOSION * statistics.median(self._usual):
            self._row += 1
        else:
            self._row = 0
            self._usual.append(norm)
        return self._row


class Alarms:
    """Logs anomalies, and raises TrainingError if the algorithm's settings say so."""

    def __init__(
        self, algorithm: RLSettings, note: Callable[[str], None], gradients: Iterable[str]
    ) -> None:
        self._algorithm = algorithm
        self._note = note
        self._norms = {name: GradientNorms() for name in gradients}
        self._lost = dict(LOST)
        self._said: set[str] = set()  # reasons for which many calls were left out

    def remember(self, history: Iterable[Mapping[str, float]]) -> None:
        """The metrics of the steps before a resumption."""
        for metrics in history:
            self._said.update(excluded_often(metrics))
            for name, norms in self._norms.items():
                norms.add(metrics.get(name, 0.0))

    def check_explosion(self, step: int, metrics: Mapping[str, float], how_to_replay: str) -> None:
        for name, norms in self._norms.items():
            row = norms.add(norm := metrics.get(name, 0.0))
            allowed = self._algorithm.stop_on_explosion
            problem = (
                f"step {step}: {name} is {norm:.3g}, over {EXPLOSION:.0f} times what was usual"
            )
            if allowed and row >= allowed:
                raise TrainingError(f"{problem}, for {row} steps in a row. {how_to_replay}")
            if row == 1:
                self._note(problem)

    def check_lost_rewards(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note why intermediate rewards reached no call, once per reason."""
        for reason in list(self._lost):
            if count := metrics.get(f"rewards_lost/{reason}"):
                advice = self._lost.pop(reason)
                self._note(
                    f"step {step}: {count:.0f} intermediate rewards count for no call, {reason}: "
                    f"{advice}"
                )

    def check_collapse(self, step: int, flat_steps: int, best: Callable[[], Path | None]) -> None:
        """Check after so many steps without any reward, in a run that earned some; `best` finds the
        best saved weights."""
        allowed = self._algorithm.stop_on_collapse
        ends = 0 < allowed <= flat_steps
        if not ends and flat_steps != NOTED_AFTER:
            return
        place = best()
        problem = (
            f"step {step}: the policy has collapsed: no rollout of the last {flat_steps} steps "
            "earned anything, and earlier ones did. "
            f"{f'The best weights are in {place}' if place else 'No better weights were saved'}"
        )
        if ends:
            raise TrainingError(
                f"{problem}. Try a lower learning_rate; stop_on_collapse=0 continues instead"
            )
        self._note(problem)

    def check_excluded(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once of each reason that it leaves out more than a tenth of a step's calls."""
        for reason, sentence in excluded_often(metrics).items():
            if reason not in self._said:
                self._said.add(reason)
                self._note(f"step {step}: {sentence}")

    def check_forks(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once that a step's rollouts had no call to fork, or that many forks are lost."""
        forks = metrics.get("forks", 0.0)
        lost = metrics.get("forks_lost", 0.0)
        reason = "no forks"
        sentence = None
        if not forks and self._algorithm.rollouts_per_group > self._algorithm.group_size:
            sentence = "no rollout has a call that is to be forked (`forks`)"
        elif lost > MANY * forks:
            reason = "lost forks"
            sentence = (
                f"{lost:.0f} of {forks:.0f} forks ended before their call, or asked something else "
                "than their sources; prompts that differ from run to run cannot be forked here"
            )
        if sentence is not None and reason not in self._said:
            self._said.add(reason)
            self._note(f"step {step}: {sentence}")

    def check_mismatch(self, step: int, metrics: Mapping[str, float], tolerance: float) -> None:
        """On tokens sampled with the same weights, learner and sampler differ only by rounding."""
        mismatch = metrics.get("inference_mismatch", 0.0)
        kl = metrics.get("inference_kl", 0.0)
        problem = (
            f"step {step}: sampler and learner differ by {mismatch:.2g} in the probability of a "
            f"token (expected at most {tolerance:.2g}): what is trained is not what was sampled"
        )
        if mismatch > FAR * tolerance or kl > FAR_KL:
            raise TrainingError(
                f"{problem}, with a KL of {kl:.2g}. Does the sampler have the learner's weights?"
            )
        if mismatch > tolerance:
            cause = "Has the sampler another dtype, or has it kept some old weights?"
            self._note(f"{problem}. {cause if tolerance < ROUNDING else 'Try float32'}")
