"""The settings of reinforcement learning, and what an algorithm computes: advantages and a loss.

It knows groups of credited rollouts. It does not know how they are run (the loop) or how a gradient
is computed (the learner)."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec
import numpy as np

from agentlightning.algorithm.budget import UNLIMITED, Budget, Price
from agentlightning.algorithm.evaluation import SUPERVISED
from agentlightning.data.aggregation import AGGREGATIONS
from agentlightning.data.call_filter import CallFilter
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.functions import call, read_function
from agentlightning.data.rewards import PLAIN, RELATIVE, RewardSpec
from agentlightning.data.sequences import CreditedTransition, Level
from agentlightning.data.transitions import FloatArray, TracedRollout
from agentlightning.errors import ConfigError, check_settings
from agentlightning.learner.base import Critic
from agentlightning.learner.corrections import Corrections
from agentlightning.learner.losses import LOSSES, KLEstimator, Loss, Old
from agentlightning.rewards import RelativeJudge
from agentlightning.types import RolloutConfig

_LEAST: Final[dict[str, float]] = {
    **dict.fromkeys(("steps", "tasks_per_step", "group_size", "minibatches", "epochs"), 1.0),
    **dict.fromkeys(("checkpoint_every", "max_tokens", "rise_window"), 1.0),
    **dict.fromkeys(("evaluate_every", "max_staleness"), 0.0),
    **dict.fromkeys(("stop_on_explosion", "stop_on_collapse", "val_temperature"), 0.0),
    "temperature": 1e-3,
}

TOO_FEW_REWARDED: Final = "too few rewarded"
WITHOUT_VARIANCE: Final = "without variance"


@dataclass(kw_only=True)
class RLSettings:
    """The settings that all algorithms of reinforcement learning share, and their two answers:
    advantages and a loss.

    Shared settings: steps: training steps. tasks_per_step: tasks sampled in a step. group_size:
        rollouts of each task. minibatches: optimiser steps per batch. epochs: passes over each
        batch. level: how calls are packed, `transition`, `trajectory` or `tree`; the gradient is
        the same. reward: what R is made of (`agl.RewardSpec`). loss: a name of `learner/losses.py`,
        a function or `file.py:function`, or `{name: one of these, option: value}`. clip_low,
        clip_high: clip range of the importance ratio; default: the loss's own. dual_clip: bound of
        the loss of negative advantages. aggregation: how much each token counts: a name of
        `data/aggregation.py`, or a function as for `loss`. constant_length: divisor in tokens, for
        the aggregation `constant`. token_weights: a function of a rollout's calls: for each call,
        the weights of its tokens, prompt included
            (`CreditedTransition`).
        reference: keep the starting weights, for a KL term.
        kl_coefficient: weight of the KL term; default 0.04 with `reference`.
        kl_estimator: `k1`, `k2` or `k3`.
        entropy_coefficient: weight of an entropy bonus.
        old: what the importance ratio compares with: `behaviour`, the recorded logprobs, or
            `proximal`, the weights at the start of the step.
        correction: tokens that weigh less, or are left out, because another engine or other weights
            sampled them: a name of `learner/corrections.py`, or a function as for `loss`.
        temperature: of training rollouts, whatever the agent asks for; at most 2.
        val_temperature: of evaluations.
        max_tokens: limit of one answer, in tokens.
        unrewarded: what a rollout without a reward counts for: `exclude` it from its group, or this
        number.
        agents: names of the agents to train, such as `"writer|rewriter"`; default: all.
        keep: reasons for which calls are flagged, to train such calls anyway (`CallFilter`).
        train_truncated: train answers that were cut off at `max_tokens`.
        max_prompt_length, max_response_length: leave out calls with more tokens.
        max_staleness: 0: a step trains on rollouts of exactly the weights it changes. K: rollouts,
            steps and evaluations run at once; older rollouts than K publications are dropped.
        dynamic_sampling: replace groups that teach nothing before the step (DAPO,
        arXiv:2503.14476).
        difficulty: (low, high); tasks whose group mean lies outside are left out of the next epoch.
        curriculum: a function of (tasks, epoch), or `file.py:function`, that returns the epoch's
        order as indices.
        rise_at: a curriculum over tasks that have a `level`: those of the lowest level are trained
        on, drawn at random; those of the next one after the step in which the mean reward of the
        last `rise_window` tasks has reached this.
        target_reward: stop when the mean training reward of three steps reaches it.
        stop_on_explosion: stop with an error after so many steps whose gradient is far above the
        usual; 0: never.
        stop_on_collapse: stop with an error after so many steps without any reward; 0: never.
        evaluate_every: steps between evaluations; 0: only before and after; default: a fifth of
        `steps`, at least 5.
        checkpoint_every: steps between checkpoints.
        rollout: timeouts and retries (`agl.RolloutConfig`); default: 300 s, three attempts if
            unresponsive.
        judge: a model that ranks the rollouts of each group by a rubric (`rewards.RelativeJudge`);
            their ranks are their rewards.
        budget: where training stops (`agl.Budget`), with what the last evaluation needs kept.
        prices: by model, dollars for a million tokens read and written.

    ConfigError for settings that are wrong or do not go together. TrainingError for a loss or
    gradient that is not finite."""

    steps: int = 100
    tasks_per_step: int = 16
    group_size: int = 8
    minibatches: int = 1
    epochs: int = 1
    level: Level = "trajectory"
    reward: RewardSpec = PLAIN
    loss: Any = "ppo_clip"  # str or function: what reads run files knows no such union
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: Any = "rollout-mean"
    constant_length: int | None = None
    token_weights: Any = None
    reference: bool = False
    kl_coefficient: float | None = None
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    old: Old = "behaviour"
    correction: Any = None
    temperature: float = 1.0
    val_temperature: float = 1.0
    max_tokens: int | None = None
    unrewarded: Literal["exclude"] | float = "exclude"
    agents: str | None = None
    keep: tuple[str, ...] = ()
    train_truncated: bool = True
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    max_staleness: int = 0
    dynamic_sampling: bool = False
    difficulty: tuple[float, float] | None = None
    curriculum: Any = None
    rise_at: float | None = None
    rise_window: int = 32
    target_reward: float | None = None
    stop_on_explosion: int = 0
    stop_on_collapse: int = 10
    evaluate_every: int | None = None
    checkpoint_every: int = 10
    rollout: RolloutConfig = SUPERVISED
    judge: RelativeJudge | None = None
    budget: Budget = UNLIMITED
    prices: dict[str, Price] = field(default_factory=dict[str, Price])
    name: str = "rl"

    imitates: ClassVar[bool] = False
    """Whether the loss is valid whatever weights sampled the tokens."""

    def __init_subclass__(cls) -> None:
        """Let `help` of an algorithm show the settings that it inherits too."""
        inherited = re.search(
            r"    (Shared s|S)ettings:\n.*", (cls.__base__ or cls).__doc__ or "", re.DOTALL
        )
        if cls.__dict__.get("__doc__") and inherited is not None:
            cls.__doc__ = f"{cls.__doc__}\n\n{inherited[0]}"

    def __post_init__(self) -> None:
        self.measured: dict[str, float] = {}
        """Metrics that `advantages` measured on its last groups, for the step's metrics."""
        check_settings(self, least=_LEAST, choices={"level": get_args(Level)})
        if max(self.temperature, self.val_temperature) > 2:
            raise ConfigError(
                f"temperature is {self.temperature}, val_temperature {self.val_temperature}; 2 is "
                "the most"
            )
        if self.difficulty is not None and not self.difficulty[0] <= self.difficulty[1]:
            raise ConfigError(
                f"difficulty is {self.difficulty}; give the lowest and the highest mean reward to "
                "train on"
            )
        self.curriculum_function = _read("curriculum", self.curriculum)
        if self.picks_tasks and (self.difficulty is not None or self.curriculum is not None):
            raise ConfigError(
                f"{type(self).__name__}.next_task, or rise_at, picks each task, and difficulty and "
                "curriculum order epochs: leave them out"
            )
        self._risen = 0
        self._recent: list[float] = []  # rewards since it rose last
        if self.unrewarded != "exclude" and (
            isinstance(self.unrewarded, str) or not math.isfinite(self.unrewarded)
        ):
            raise ConfigError(
                f"unrewarded is {self.unrewarded}; give 'exclude', or a finite reward"
            )
        if self.kl_coefficient and not self.reference:
            raise ConfigError(
                "kl_coefficient pulls towards a reference policy; set reference=True to keep one"
            )
        for name in RELATIVE:
            if getattr(self.reward, name) and self.group_size < 2:
                raise ConfigError(
                    f"{name} compares the rollouts of a task; set group_size to 2 or more"
                )
        if self.judge is not None and self.group_size < 2:
            raise ConfigError(
                "a judge compares the rollouts of a task; set group_size to 2 or more"
            )
        self.call_filter()
        self.loss_function = _read("loss", self.loss, LOSSES)
        self.weigh_tokens = _read("token_weights", self.token_weights)
        self.aggregation_function = _read("aggregation", self.aggregation, AGGREGATIONS)
        self.corrections = Corrections.read(self.correction, self.old)
        if self.correction and self.imitates:
            raise ConfigError(
                f"{self.name} imitates whatever weights sampled: leave correction out"
            )
        if self.make_loss().name == "policy_gradient" and not self.imitates:
            if self.old == "behaviour" and self.max_staleness:
                raise ConfigError(
                    "loss 'policy_gradient' is right for the weights that sampled, and with "
                    f"max_staleness {self.max_staleness} older ones may have; give "
                    "old='proximal', or loss='importance_sampling'"
                )
            if self.minibatches * self.epochs > 1:
                raise ConfigError(
                    "loss 'policy_gradient' is right for the weights that sampled, and "
                    f"{self.minibatches} minibatches in {self.epochs} epochs move them; give 1 of "
                    "each, or loss='importance_sampling'"
                )

    def call_filter(self, *models: str) -> CallFilter:
        """The filter of the calls of these models that train (default: of all models). ConfigError
        for settings out of range."""
        settings = {
            name: getattr(self, name)
            for name in CallFilter.__dataclass_fields__
            if name != "models"
        }
        return CallFilter(models=models or None, **settings)

    @property
    def evaluation_interval(self) -> int:
        """Steps between two held-out evaluations, 0 for none between the first and the last;
        default: a fifth of the training, at least 5."""
        return (
            max(5, math.ceil(self.steps / 5))
            if self.evaluate_every is None
            else self.evaluate_every
        )

    @property
    def refills(self) -> bool:
        """Whether a useless group is replaced by another."""
        return self.dynamic_sampling or self.max_staleness > 0

    def why_useless(self, group: RewardedGroup) -> str | None:
        """Why no step can learn from this group, whatever the other groups; None if one may."""
        if len(group.rewards) < self.fewest_rewarded:
            return TOO_FEW_REWARDED
        if self.trains_on(group) or self.trains_on(group, _unlike(group)):
            return None
        return WITHOUT_VARIANCE

    def trains_on(self, *groups: RewardedGroup) -> bool:
        """Whether anything is learned from the first of these groups."""
        return any(item.trains for rollout in self.credited(groups)[0] for item in rollout)

    def credited(
        self, groups: Sequence[RewardedGroup], values: Sequence[FloatArray] | None = None
    ) -> list[list[list[CreditedTransition]]]:
        """The result of `advantages`, which gets a critic's `values` if there are any. ConfigError
        unless it has a list for each rollout of each group, with transitions that have a finite
        float per sampled token."""
        if not groups:
            return []
        asked = [len(group.transitions) for group in groups]
        named = f"{type(self).__name__}.advantages"
        answer = call(named, self.advantages, groups=groups, values=values)
        try:
            shape = [len(group) for group in answer]
            items: list[Any] = [item for group in answer for rollout in group for item in rollout]
        except TypeError:
            shape = []
            items = []
        wrong = next((part for item in items for part in _invalid(item)), None)
        if shape != asked or wrong is not None:
            if wrong is not None:
                given = f"{wrong!r:.200}"
            else:
                given = f"lists for {shape}" if shape else f"{answer!r:.200}"
            raise ConfigError(
                f"{named} must return a list for each rollout of each "
                f"group, of groups of {asked} rollouts, and in it a CreditedTransition for each "
                "call that trains, with NumPy arrays of a finite float for each sampled token, "
                f"but returned {given}"
            )
        return answer

    @property
    def rollouts_per_group(self) -> int:
        """The most rollouts of a task that a step trains on."""
        return self.group_size

    def forks_of(self, rollout: TracedRollout) -> list[int]:
        """The result of `calls_to_fork`, without calls that were not answered. ConfigError unless
        it has indices."""
        named = f"{type(self).__name__}.calls_to_fork"
        indices = read_calls(named, call(named, self.calls_to_fork, rollout=rollout))
        answered = {index for _, _, index in rollout.answers}
        return [index for index in indices if index in answered]

    def calls_to_fork(self, rollout: TracedRollout) -> Sequence[int]:
        """The indices of the calls from which this rollout of a complete group is tried again, an
        index twice for two tries. They may depend on the states in which calls were made, not on
        what was sampled in them or earned."""
        return ()

    @property
    def fewest_rewarded(self) -> int:
        """The number of members of a group that must have a reward for it to be trained on."""
        return min(2, self.group_size)

    @property
    def picks_tasks(self) -> bool:
        """Whether `next_task` is defined; otherwise tasks are taken epoch after epoch."""
        return type(self).next_task is not RLSettings.next_task or self.rise_at is not None

    def next_task(self, tasks: Sequence[Any], rng: random.Random) -> int:
        """Define this to pick tasks: returns the index of the task to run next. `rng` gives the
        same numbers for the same seed and number of earlier picks."""
        try:
            level = sorted({task["level"] + 0.0 for task in tasks})[: self._risen + 1][-1]
        except (KeyError, TypeError):
            raise ConfigError("rise_at needs tasks that have a level, a number") from None
        return rng.choice([at for at, task in enumerate(tasks) if task["level"] == level])

    def step_done(self, groups: Sequence[RewardedGroup]) -> Mapping[str, float]:
        """Called once after each step with its groups that have a reward, in the order in which
        their tasks were picked. Update your state here; the result is your metrics of the step."""
        if self.rise_at is None:
            return {}
        self._recent += [group.mean for group in groups]
        last = self._recent[-self.rise_window :]
        if len(last) == self.rise_window and fmean(last) >= self.rise_at:
            self._risen += 1
            self._recent = []
        return {"risen": self._risen}

    def state(self) -> Any:
        """The state that a checkpoint keeps for `restore`, in JSON types."""
        return None if self.rise_at is None else [self._risen, self._recent]

    def restore(self, state: Any) -> None:
        """Restore what `state` returned at the checkpoint."""
        self._risen, self._recent = state

    def saved_state(self) -> Any:
        """The result of `state`. ConfigError unless it can be restored."""
        own = type(self)
        state = self.state()
        if own.state is not RLSettings.state and own.restore is RLSettings.restore:
            raise ConfigError(
                f"{own.__name__} defines state and not restore, so that a resumed run would lose it"
            )
        try:
            same = msgspec.json.decode(msgspec.json.encode(state)) == state
        except (TypeError, ValueError, OverflowError, RecursionError):
            same = False
        if not same:
            raise ConfigError(
                f"{own.__name__}.state returned {state!r:.200}, which JSON does not preserve; "
                "return dicts with names of text, lists, text, finite numbers, booleans and None"
            )
        return state

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """Credit the groups of one step. Returns, for each rollout of each group, its transitions
        with an advantage per sampled token. Called in a thread, off the event loop; it may block.

        With `trained_critic` it takes `values` too, float32[T] of each transition, in order: the
        critic's estimates for the sampled tokens. The result then includes them, and their
        targets."""
        raise NotImplementedError

    @property
    def trained_critic(self) -> Critic | None:
        """The critic that is trained beside the policy; None: no critic."""
        return None

    def make_loss(self, step: int = 1) -> Loss:
        """The loss of the batch of a step, from 1."""
        own = {
            name: getattr(self, name) for name in Loss.__dataclass_fields__ if hasattr(self, name)
        }
        own["kl_coefficient"] = (
            self.kl_coefficient if self.kl_coefficient is not None else 0.04 * self.reference
        )
        return Loss(kind=self.loss_function, **own | {"aggregation": self.aggregation_function})


def read_calls(named: str, given: Any) -> list[int]:
    """Indices of calls. ConfigError, which calls them `named`, if they are something else."""
    try:
        return msgspec.convert(given, list[Annotated[int, msgspec.Meta(ge=0)]])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{named} is {given!r:.200}: {error}; give indices of calls, the first is 0"
        ) from None


def _read(what: str, given: Any, known: Mapping[str, Callable[..., Any]] = {}) -> Any:
    """None, or a name in the table, unchanged; otherwise the function meant."""
    return (
        given
        if given is None or (isinstance(given, str) and given in known)
        else read_function(what, given, known)
    )


def _unlike(group: RewardedGroup) -> RewardedGroup:
    """Two rollouts with the calls of one of this group, and rewards that no agent's have the mean
    of: for what only counts compared with another group."""
    longest = max(range(len(group.transitions)), key=lambda index: len(group.transitions[index]))
    return RewardedGroup(
        [group.transitions[longest]] * 2,
        (-1.5, 1.5 + 2**-20),
        rollouts=[group.rollouts[longest]] * 2 if group.rollouts else (),
    )


def _invalid(item: Any) -> Iterator[Any]:
    """The invalid parts of a credited transition."""
    if not isinstance(item, CreditedTransition):
        yield item
        return
    given: tuple[Any, ...] = (item.advantages, item.values, item.value_targets)
    for array in given:
        of_tokens = (
            isinstance(array, np.ndarray) and array.shape == item.transition.response_ids.shape
        )
        if array is not None and not (
            of_tokens and array.dtype.kind == "f" and bool(np.isfinite(array).all())
        ):
            yield array
