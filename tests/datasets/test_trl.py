"""TRL's SFTTrainer reads what is exported, and learns what was said."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentlightning.data.recordings import Recorded
from agentlightning.datasets.export import Wanted, sft_lines
from agentlightning.datasets.parquet import TransitionFile, transition_rows
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import ASSISTANT, END, chat_text, make_model, make_tokenizer
from agentlightning.types import SampledChoice, Span, TokenCapture
from tests.data.recordings import call, recorded, reward, says, tool_says

ROOT = Path(__file__).parents[2]


def tool(name: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {one: {"type": "string"} for one in parameters}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("memory", "query"), tool("search", "from", "to")]
ARGUMENTS = '{"from": "Oslo", "to": "Rome"}'
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": ARGUMENTS}}
SPOKEN = [
    says("system", "Travel desk."),
    says("user", "A flight to Rome."),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    tool_says("c1", "flight: KL23"),
    says("assistant", "KL23"),
]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL made of each file."""
    if not (ROOT / ".venv-trl" / ".setup").is_file():
        reason = "there is no .venv-trl; `make .venv-trl/.setup` makes it"
        if os.environ.get("AGL_REQUIRE_TRL"):
            pytest.fail(f"AGL_REQUIRE_TRL is set, and {reason}")
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("trl")
    tokenizer = make_tokenizer([chat_text(SPOKEN, TOOLS)] * 3, 400)
    Policy(make_model(tokenizer, seed=0), tokenizer).save(folder / "model")
    rollouts = [rollout(index, tokenizer) for index in range(3)]
    made = [line for one in rollouts for line in sft_lines([one], Wanted()).lines]
    (folder / "sft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    with (folder / "transitions.parquet").open("wb") as file:
        table = TransitionFile(file)
        for one in rollouts:
            table.write(transition_rows(one, Wanted()))
        table.close()
    command = [
        ROOT / ".venv-trl" / "bin" / "python",
        Path(__file__).with_name("read_in_trl.py"),
        folder / "model",
        folder,
    ]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rollout(index: int, tokenizer: Any) -> Recorded:
    """Two calls, with the ids that the tokenizer makes of them."""
    spans = [
        sampled(0, SPOKEN[:2], SPOKEN[2], tokenizer),
        sampled(1, SPOKEN[:4], SPOKEN[4], tokenizer),
    ]
    return recorded(*spans, reward(1.0), index=index, group=None)


def sampled(index: int, messages: list[Any], answer: Any, tokenizer: Any) -> Span:
    before, after = chat_text(messages, TOOLS) + ASSISTANT, chat_text([*messages, answer], TOOLS)
    prompt, whole = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (before, after)
    )
    ids = whole[len(prompt) :]
    choice = SampledChoice(token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop")
    capture = TokenCapture(prompt_token_ids=prompt, choices=(choice,))
    span = call(index, messages, answer, GEN_AI_TOOL_DEFINITIONS=json.dumps(TOOLS))
    return type(span)(
        **{name: getattr(span, name) for name in span.__struct_fields__} | {"tokens": capture}
    )


def test_conversations_with_tools_come_out_as_the_model_saw_them(read: dict[str, Any]) -> None:
    assert read["sft"]["text"] == chat_text(SPOKEN, TOOLS)
    assert read["sft"]["loss"] > 0


def test_recorded_tokens_are_trained_as_they_were_sampled(read: dict[str, Any]) -> None:
    assert read["parquet"]["text"] == chat_text(SPOKEN[:3], TOOLS)
    assert (
        read["parquet"]["trained"]
        == f'<tool_call>{{"name": "search", "arguments": {ARGUMENTS}}}</tool_call>{END}'
    )
