"""A server with the policy of `policy.py`, and a runner in a framework's own environment that runs
an example once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentlightning import semconv
from agentlightning.data.call_filter import OTHER_AGENT, CallFilter
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import END
from agentlightning.server.app import ServerSettings
from agentlightning.server.server_process import running_server
from agentlightning.store.client import LightningStoreClient
from agentlightning.tracing.dialects import input_messages
from agentlightning.tracing.steps import Step, read_steps
from agentlightning.types import LLM, EnqueueRolloutRequest, Rollout, Span
from tests.frameworks.policy import TASK
from tests.gateway.world import GREEDY, talking

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
KEY = "an admin's key"
NOWHERE = "http://127.0.0.1:9"  # where nobody listens


@dataclass(frozen=True)
class Outcome:
    """A rollout that has ended, with its spans. `said` is what its runner wrote to stderr."""

    rollout: Rollout
    spans: Sequence[Span]
    chat: ChatTemplate
    said: str

    @property
    def calls(self) -> list[Span]:
        """The gateway's spans, in order."""
        return sorted(
            (span for span in self.spans if span.tokens), key=lambda span: span.start_time
        )

    @property
    def tools(self) -> list[Step]:
        """The executions of tools that spans tell of."""
        return [step for step in read_steps(self.spans) if step.kind == "tool"]

    def learned(self, agents: str | None = None) -> TracedRollout:
        return trace_rollout(self.rollout, self.spans, calls=CallFilter(agents=agents))

    def streamed(self) -> list[bool]:
        """Of each call, whether its answer was streamed."""
        return [span.attributes[semconv.CALL_STREAM] is True for span in self.calls]

    def answers(self) -> list[str]:
        """Of each call, the text that was sampled."""
        ids = [span.tokens.choices[0].token_ids for span in self.calls if span.tokens]
        return [self.chat.token_bytes.text(list(one)).removesuffix(END) for one in ids]


def bin_of(environment: str, *, required: bool = True) -> Path:
    """The programs of a framework's environment, such as `.venv-crewai/bin`; skips the test where
    it was not made."""
    folder = ROOT / f".venv-{environment}"
    if not (folder / ".setup").is_file():
        reason = f"there is no {folder.name}; `make frameworks` makes it"
        if required and os.environ.get("AGL_REQUIRE_FRAMEWORKS"):
            pytest.fail(f"AGL_REQUIRE_FRAMEWORKS is set, and {reason}")
        pytest.skip(reason)
    return folder / "bin"


def play(
    policy: Policy, directory: Path, example: Path, programs: Path, *arguments: str
) -> Outcome:
    """Enqueue one rollout, and run `agl runner ARGUMENTS` in the example's folder until it has
    ended."""
    return asyncio.run(asyncio.wait_for(_play(policy, directory, example, programs, arguments), 90))


async def _play(
    policy: Policy, directory: Path, example: Path, programs: Path, arguments: Sequence[str]
) -> Outcome:
    chat = ChatTemplate.from_pretrained(policy.tokenizer)
    async with talking(policy, length=4096) as (backend, _):
        model = ModelEntry("policy", backend, train=GREEDY, aliases=("writer", "rewriter"))
        settings = ServerSettings(f"{directory}/store.sqlite", synchronous="NORMAL", key=KEY)
        async with running_server(settings, [model]) as running:
            store = LightningStoreClient(running.url, api_key=KEY)
            try:
                await store.add_resources(
                    {"llm": LLM(endpoint=f"{running.url}/v1", model="policy", gateway=True)}
                )
                (queued,) = await store.enqueue_many_rollouts(
                    [EnqueueRolloutRequest(input={"topic": TASK})]
                )
                rollout, said = await _run(
                    store, queued, example, programs, [*arguments, "--server", running.url]
                )
                return Outcome(rollout, await store.query_spans(rollout.rollout_id), chat, said)
            finally:
                await store.close()


async def _run(
    store: LightningStoreClient,
    queued: Rollout,
    example: Path,
    programs: Path,
    arguments: Sequence[str],
) -> tuple[Rollout, str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "ANTHROPIC_"))
    }
    path = f"{programs}{os.pathsep}{variables['PATH']}"
    offline = {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}
    process = await asyncio.create_subprocess_exec(
        *(programs / "agl", "runner", *arguments),
        cwd=example,
        env={**variables, **offline, "PATH": path, "AGL_KEY": KEY, "PYTHONUNBUFFERED": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    output = asyncio.create_task(process.communicate())
    ended = asyncio.create_task(store.wait_for_rollouts([queued.rollout_id]))
    try:
        await asyncio.wait([output, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if process.returncode is None:
            process.terminate()
    _, said = await output
    assert ended.done(), f"the runner ended before its rollout: {said.decode()}"
    return ended.result()[0], said.decode()


def assert_exact(outcome: Outcome) -> None:
    """Each call has its prompt and its answer as exact ids, with a logprob for each that was
    sampled; its prompt's messages, rendered and tokenised anew, are the same; and all may be
    trained."""
    assert outcome.rollout.status == "succeeded", outcome.said
    for span in outcome.calls:
        assert span.tokens is not None and span.tokens.prompt_token_ids
        (choice,) = span.tokens.choices
        assert len(choice.token_ids) == len(choice.logprobs) > 0
        assert semconv.CALL_FLAG not in span.attributes
        messages = input_messages(span.attributes)
        tools = json.loads(str(span.attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS, "[]")))
        rendered = [outcome.chat.render(messages, offered) for offered in (tools, [])]
        assert span.tokens.prompt_token_ids in [outcome.chat.encode(text) for text in rendered]
    learned = outcome.learned()
    assert len(learned.transitions) == len(outcome.calls) and not learned.excluded


def assert_tools_told(outcome: Outcome, *, by_spans: bool = True) -> None:
    """`add` is known to have worked and `divide` to have failed; of other tools, such as handoffs,
    nothing is said. Without spans of tools the agent's own requests tell, and no durations are
    known."""
    went = [tool for transition in outcome.learned().transitions for tool in transition.tools]
    assert [(tool.tool, tool.status) for tool in went if tool.tool in ("add", "divide")] == [
        ("add", 1),
        ("divide", -1),
    ]
    assert all((tool.duration is not None) == by_spans for tool in went)
    first, second = outcome.learned().transitions[:2]  # each belongs to the call that asked for it
    assert [tool.tool for tool in (*first.tools, *second.tools)] == ["add", "divide"]
    executed = [
        (step.name, step.failed) for step in outcome.tools if step.name in ("add", "divide")
    ]
    assert executed == ([("add", False), ("divide", True)] if by_spans else [])


def assert_agents_chosen(outcome: Outcome, agents: Sequence[str]) -> None:
    """`agents` names the agent of each call; each of them can be trained alone; the rollout's
    reward is the agent's."""
    assert [transition.agent for transition in outcome.learned().transitions] == list(agents)
    for chosen in set(agents):
        learned = outcome.learned(chosen)
        assert [transition.agent for transition in learned.transitions] == [
            one for one in agents if one == chosen
        ]
        assert learned.excluded == {OTHER_AGENT: len(agents) - len(learned.transitions)}
        assert learned.reward == 1.0
