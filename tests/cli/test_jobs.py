"""The commands doing their jobs, as processes, with a real model, a real server and a real
agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import pytest
from openai import AuthenticationError, OpenAI

from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import chat_text, make_model, make_tokenizer
from tests.cli.world import ROOT, finish, start, staying_up
from tests.docs_pages import read_blocks

AGENT = """
import agentlightning as agl

@agl.rollout
async def agent(task, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["say"]}])
    return (len(answer.choices[0].message.content or "") % 5) / 4

"""

RUN_FILE = """
agent: agent.py:agent
model: model
train_dataset: tasks.jsonl
val_dataset: tasks.jsonl
algorithm: {name: grpo, steps: 2, tasks_per_step: 2, group_size: 4, max_tokens: 8}
optimizer: {learning_rate: 1e-4}
max_sequence_length: 128
n_runners: 8
run_dir: run
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it: an agent, tasks, a run file and a model."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"say": word}) + "\n" for word in ("one", "two", "three"))
    )
    (folder / "run.yaml").write_text(RUN_FILE)
    messages = [
        {"role": "user", "content": "one two three"},
        {"role": "assistant", "content": "four five"},
    ]
    tokenizer = make_tokenizer([chat_text(messages, [])], 300)
    Policy(make_model(tokenizer, seed=0), tokenizer).save(folder / "model")
    return folder


def last_json(out: str) -> dict[str, Any]:
    return json.loads(out.rstrip("\n").rpartition("\n")[2])


@pytest.mark.slow
def test_a_dry_run_measures_two_groups_and_keeps_nothing(project: Path) -> None:
    before = sorted(project.iterdir())
    out, _ = finish(start(project, "train", "--dry-run", "--json"))
    told = last_json(out)
    assert (
        told["training_rollouts"] == 2 * 2 * 4
        and told["evaluations"] == 2
        and told["val_tasks"] == 3
    )
    assert (
        told["calls"] == 16 + 2 * 3
        and 0 < told["answer_tokens"] <= 8 * told["calls"] <= 2 * told["prompt_tokens"]
    )
    assert told["rollout_seconds"] > 0
    assert sorted(project.iterdir()) == before


@pytest.mark.slow
def test_a_chat_keeps_the_conversation_until_it_begins_anew(project: Path) -> None:
    def talk(*arguments: str, said: str) -> str:
        command = [sys.executable, "-m", "agentlightning.cli.main", "chat", *arguments]
        done = subprocess.run(
            command, cwd=project, input=said, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = talk(
        "model",
        "--max-tokens",
        "4",
        "--json",
        "--temperature",
        "0",
        said="one\n/new\n\none\none\n/quit\n",
    )
    first, again, third = [json.loads(line) for line in out.splitlines()]
    assert first == again and third["question"] == "one"
    with staying_up(project, "serve", "model", "--port", "0") as (_, url):
        out = talk(f"{url}/v1", "--max-tokens", "4", "--temperature", "0", said="one\n")
        assert out == f"{first['answer']}\n"


@pytest.mark.slow
def test_serve_answers_openai_and_anthropic_clients_that_have_the_key(project: Path) -> None:
    arguments = ("serve", "model", "--port", "0", "--model-name", "mine", "--json")
    with staying_up(project, *arguments, AGL_KEY="secret-key") as (process, url):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"url": url, "model": "mine"}
        with OpenAI(base_url=f"{url}/v1", api_key="secret-key", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["mine"]
            response = client.responses.create(model="mine", input="one", max_output_tokens=4)
            assert response.usage is not None and 0 < response.usage.output_tokens <= 4
        with anthropic.Anthropic(base_url=url, api_key="secret-key", max_retries=0) as claude:
            message = claude.messages.create(
                model="mine", messages=[{"role": "user", "content": "one"}], max_tokens=4
            )
            assert 0 < message.usage.output_tokens <= 4
        with (
            OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(AuthenticationError),
        ):
            client.models.list()


@pytest.mark.slow
def test_serve_refuses_the_network_without_a_key_or_a_taken_port(project: Path) -> None:
    _, err = finish(start(project, "serve", "model", "--host", "0.0.0.0", AGL_KEY=""), code=1)
    assert "key" in err
    with staying_up(project, "server", "--port", "0") as (_, url):
        _, err = finish(start(project, "serve", "model", "--port", url.rpartition(":")[2]), code=1)
        assert "taken" in err


@pytest.mark.slow
def test_a_task_that_names_no_model_gets_the_servers(project: Path) -> None:
    """As the README prints it: server, curl and runner, with its agent."""
    [agent] = [
        block.body for block in read_blocks(ROOT / "README.md") if "@agl.rollout" in block.body
    ]
    (project / "readme.py").write_text(agent.partition("trainer =")[0])

    def runs(url: str, inputs: int) -> tuple[list[dict[str, Any]], str]:
        tasks = json.dumps({"requests": [{"input": {"question": "2+2", "answer": "4"}}] * inputs})
        posted = subprocess.run(
            ["curl", "-sf", f"{url}/api/v1/rollouts", "-d", tasks], capture_output=True, check=False
        )
        assert posted.returncode == 0
        runner = ("runner", "readme.py:agent", "--server", url, "--idle", "2s")
        _, said = finish(start(project, *runner))
        out, _ = finish(
            start(project, "rollouts", "ls", "--server", url, "--limit", inputs, "--json")
        )
        return [json.loads(line) for line in out.splitlines()], said

    server = ("server", "--port", "0", "--store", "readme.sqlite")
    with staying_up(project, *server) as (_, url):
        [failed], said = runs(url, 1)
        assert failed["status"] == "failed"
        assert (
            "start the server with --model or --backend" in said
            and "POST /api/v1/resources" in said
        )
    with staying_up(project, *server, "--model", "model") as (_, url):
        served, _ = runs(url, 3)
        assert [rollout["status"] for rollout in served] == ["succeeded"] * 3
        shown, _ = finish(
            start(project, "rollouts", "show", served[0]["rollout_id"], "--server", url)
        )
        assert "call model" in shown and "reward primary 0" in shown
        with staying_up(
            project, *server[:3], "--store", "second.sqlite", "--backend", f"{url}/v1"
        ) as (_, second):
            [served], _ = runs(second, 1)
            assert served["status"] == "succeeded"
