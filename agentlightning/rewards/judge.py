"""A model that judges: it is asked for a score, and is never trained on its answer.

Its calls may go anywhere that speaks OpenAI's chat completions. The gateway records them as calls that do not train;
elsewhere the judge records what it asked and what it cost, where it is asked inside a rollout.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentlightning import semconv
from agentlightning.errors import BackendError, ConfigError
from agentlightning.semconv import FROZEN_HEADER
from agentlightning.tracing.context import current_binding
from agentlightning.tracing.operation import Operation, operation
from agentlightning.types import LLM, PromptTemplate

TEMPLATE = "Question:\n{question}\n\nRight answer:\n{reference}\n\nAnswer to be judged:\n{answer}"
INSTRUCTION = (
    "You judge answers. Say briefly what speaks for and against, then end with a line `Score: N`, N from {} to {}."
)
WAITS = (0.5, 2.0)  # seconds before each further try of a call that was refused for the moment
_SCORE = re.compile(r"score\W*?([-+]?\d+(?:\.\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class LLMJudge:
    """Scores answers by asking `llm`, which stays as it is while the policy learns.

    `template` is filled with the values given to `score`, and how to answer is added to it. Scores run from `worst` to
    `best` and are returned as 0 to 1. `llm.sampling_parameters` go with every call, such as `{"temperature": 0}`."""

    llm: LLM
    template: str | PromptTemplate = TEMPLATE
    worst: float = 0.0
    best: float = 10.0
    timeout: float = 120.0  # seconds for one answer

    def __post_init__(self) -> None:
        if not self.worst < self.best:
            raise ConfigError(f"worst is {self.worst} and best is {self.best}; a judge needs worst < best")

    async def score(self, **values: Any) -> float:
        """The judge's score of the template filled with `values`, from 0 to 1.

        ConfigError for a placeholder without a value, and where another model answered than was asked; BackendError
        where the judge cannot be reached or gives no score: that is no fault of the answer, so it is not worth 0."""
        template = (
            self.template if isinstance(self.template, PromptTemplate) else PromptTemplate(template=self.template)
        )
        messages = [
            {"role": "system", "content": INSTRUCTION.format(f"{self.worst:g}", f"{self.best:g}")},
            {"role": "user", "content": template.format(**values)},
        ]
        with operation(name="judge") as span:
            span.set_input(messages=messages)
            answer = await self._ask(messages)
            text, score = self._read(answer, span)
            span.set_output({"answer": text, "score": score})
        return score

    def score_sync(self, **values: Any) -> float:
        """`score` for code that is not async."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.score(**values))
        raise ConfigError("an event loop is running here; use `await judge.score(…)`")

    async def _ask(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The completion, after further tries of what was refused for the moment."""
        for wait in (*WAITS, None):
            try:
                return await self._post({"model": self.llm.model, "messages": messages, **self.llm.sampling_parameters})
            except BackendError as error:
                if wait is None or not (error.status == 429 or error.status >= 500):
                    raise
                await asyncio.sleep(wait)
        raise AssertionError("the last try returns or raises")

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.llm.endpoint.rstrip('/')}/chat/completions"
        headers = {FROZEN_HEADER: "true"}
        if self.llm.api_key is not None:
            headers["Authorization"] = f"Bearer {self.llm.api_key}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.timeout)) as session,
                session.post(url, json=body, headers=headers) as response,
            ):
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BackendError(f"the judge at {url} cannot be reached: {error or type(error).__name__}") from None
        if response.status != 200:
            raise BackendError(f"the judge at {url} answered {response.status}: {text:.500}", status=response.status)
        try:
            return json.loads(text)
        except ValueError:
            raise BackendError(f"the judge at {url} answered no JSON: {text:.200}", status=422) from None

    def _read(self, answer: dict[str, Any], span: Operation) -> tuple[str, float]:
        """The judge's words and its score from 0 to 1; what the call cost goes to `span`."""
        try:
            text = str(answer["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError):
            raise BackendError(f"the judge's answer is no chat completion: {answer!s:.200}", status=422) from None
        self._account(answer, span)
        found = _SCORE.findall(text)
        score = float(found[-1]) if found else None
        if score is None or not self.worst <= score <= self.best:
            raise BackendError(
                f"the judge gave no score from {self.worst:g} to {self.best:g}: {text[-200:]!r}", status=422
            )
        return text, (score - self.worst) / (self.best - self.worst)

    def _account(self, answer: dict[str, Any], span: Operation) -> None:
        """Tokens of a call that the gateway has recorded are in its own span, and are not counted twice."""
        model, call_id, usage = str(answer.get("model")), str(answer.get("id")), answer.get("usage") or {}
        binding = current_binding()
        span.set_attributes({semconv.GEN_AI_REQUEST_MODEL: self.llm.model, semconv.GEN_AI_RESPONSE_MODEL: model})
        if binding is not None and f"-{binding.tracer.attempt_id}-" in call_id:
            if model != self.llm.model:
                raise ConfigError(
                    f"no model behind the gateway is called {self.llm.model!r}; {model!r} answered in its place. "
                    "Register the judge there, or give LLMJudge the URL of another server"
                )
            return
        span.set_attributes(
            {
                semconv.GEN_AI_INPUT_TOKENS: usage.get("prompt_tokens"),
                semconv.GEN_AI_OUTPUT_TOKENS: usage.get("completion_tokens"),
            }
        )
