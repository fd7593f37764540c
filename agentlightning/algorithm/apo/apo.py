"""`APO`: automatic prompt optimisation by a beam search with textual gradients. Knows its settings."""

from __future__ import annotations

from dataclasses import dataclass

from agentlightning.algorithm.apo.beam import BeamSearch
from agentlightning.algorithm.apo.optimizer import Parts, PromptOptimizer
from agentlightning.errors import ConfigError


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

    def search(self, parts: Parts) -> BeamSearch:
        return BeamSearch(self, parts)
