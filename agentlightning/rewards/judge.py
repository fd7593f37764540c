"""A model as judge: it scores answers and is never trained.

It may be any endpoint of OpenAI's chat completions. Behind the gateway, its calls are recorded as
calls that do not train. Elsewhere, inside a rollout, the judge records its question and its tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentlightning import semconv
from agentlightning.errors import BackendError, ConfigError
from agentlightning.rewards.chat_completion import Completion, complete
from agentlightning.semconv import FROZEN_HEADER
from agentlightning.tracing.context import current_binding
from agentlightning.tracing.operation import Operation, operation
from agentlightning.types import LLM, PromptTemplate

TEMPLATE = "Question:\n{question}\n\nRight answer:\n{reference}\n\nAnswer to be judged:\n{answer}"
INSTRUCTION = (
    "You judge answers. Say briefly what speaks for and against, then end with a line `Score: N`, "
    "N from {} to {}."
)
_SCORE = re.compile(r"score\W*?([-+]?\d+(?:\.\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class LLMJudge:
    """Scores answers with the model `llm`, which is not trained.

    `template` is filled with the values given to `score`; the form of the answer is added. The
    model answers from `worst` to `best`, which is scaled to 0 to 1. Every call has
    `llm.sampling_parameters`, such as `{"temperature": 0}`."""

    llm: LLM
    template: str | PromptTemplate = TEMPLATE
    worst: float = 0.0
    best: float = 10.0
    timeout: float = 120.0  # seconds for one answer

    def __post_init__(self) -> None:
        if not self.worst < self.best:
            raise ConfigError(
                f"worst is {self.worst} and best is {self.best}; a judge needs worst < best"
            )

    async def score(self, **values: Any) -> float:
        """The score, from 0 to 1, of the template filled with `values`.

        ConfigError if a placeholder has no value, or another model answered; BackendError if the
        judge cannot be reached or gives no score. That is not the answer's fault, so its score is
        not 0."""
        given = self.template
        template = given if isinstance(given, PromptTemplate) else PromptTemplate(template=given)
        messages = [
            {"role": "system", "content": INSTRUCTION.format(f"{self.worst:g}", f"{self.best:g}")},
            {"role": "user", "content": template.format(**values)},
        ]
        with operation(name="judge") as span:
            span.set_input(messages=messages)
            answer = await complete(
                self.llm, messages, timeout=self.timeout, headers={FROZEN_HEADER: "true"}
            )
            self._account(answer, span)
            score = self._read(answer.text)
            span.set_output({"answer": answer.text, "score": score})
        return score

    def _read(self, text: str) -> float:
        found = _SCORE.findall(text)
        score = float(found[-1]) if found else None
        if score is None or not self.worst <= score <= self.best:
            raise BackendError(
                f"the judge gave no score from {self.worst:g} to {self.best:g}: {text[-200:]!r}",
                status=422,
            )
        return (score - self.worst) / (self.best - self.worst)

    def _account(self, answer: Completion, span: Operation) -> None:
        """Record the call. Tokens of a call that the gateway has recorded are in its span, and not
        counted twice."""
        binding = current_binding()
        attributes: dict[str, Any] = {
            semconv.GEN_AI_REQUEST_MODEL: self.llm.model,
            semconv.GEN_AI_RESPONSE_MODEL: answer.model,
        }
        if binding is None or f"-{binding.tracer.attempt_id}-" not in answer.call_id:
            attributes |= {
                semconv.GEN_AI_INPUT_TOKENS: answer.read,
                semconv.GEN_AI_OUTPUT_TOKENS: answer.written,
            }
        elif answer.model != self.llm.model:
            raise ConfigError(
                f"no model behind the gateway is called {self.llm.model!r}; {answer.model!r} "
                "answered in its place. Register the judge there, or give LLMJudge the URL of "
                "another server"
            )
        span.set_attributes(attributes)
