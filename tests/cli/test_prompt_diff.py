"""`agl prompts diff`: a patch of the program's own files, proved by a run of the patched copy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli.main import run
from agentlightning.prompts.components import write_candidate
from agentlightning.types import PromptCandidate, PromptText

AGENT = """\
import json
from pathlib import Path

import agentlightning as agl

HERE = Path(__file__).parent
RULE = "You are the writer.\\nBe brief."
DESK = "You are the desk of {name}."


def joined(parts):
    return " ".join(parts)


@agl.rollout
async def agent(task, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    for system in (
        RULE,
        DESK.format(name=task["hotel"]),
        f"You are the cook of {task['hotel']}. Cook.",
        json.loads((HERE / "texts" / "all.json").read_text())["judge"],
        joined(["You are the", "porter."]),
    ):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task["hotel"]}]
        await client.chat.completions.create(model=llm.model, messages=messages)
    return 1.0
"""
NEW = {
    "writer.system": ("You are the writer.\nBe brief.", 'You are the writer.\nBe "brief" in {x}.'),
    "desk.system": ("You are the desk of {hole1}.", "At {hole1} you are the desk, {always}."),
    "cook.system": ("You are the cook of {hole1}. Cook.", "You are the cook of {hole1}. Fry."),
    "judge.system": ("You are the judge.", "You are the mild judge."),
    "porter.system": ("You are the porter.", "You are the quick porter."),
}


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}}
        body = json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.json").write_text('{"judge": "You are the judge."}\n')
    hotels = ("Ritz", "Savoy", "Adlon", "Sacher", "Plaza")
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"hotel": "{one}"}}\n' for one in hotels))
    url = f"http://127.0.0.1:{server.server_port}/v1"
    llm = {"resource_type": "llm", "endpoint": url, "model": "m"}
    settings = {"agent": "agent.py:agent", "initial_resources": {"llm": llm}}
    settings |= {"train_dataset": "tasks.jsonl", "val_dataset": "tasks.jsonl"}
    (tmp_path / "run.yaml").write_text(json.dumps(settings | {"algorithm": {"name": "gepa"}}))
    texts = {
        name: PromptText(place="system", sent=sent, text=text) for name, (sent, text) in NEW.items()
    }
    write_candidate(PromptCandidate(components=texts), tmp_path / "prompts.json")
    yield tmp_path
    server.shutdown()
    server.server_close()


def diff(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["prompts", "diff", "prompts.json", "run.yaml", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_a_patched_copy_sends_is_shown_as_a_patch_and_the_rest_as_texts(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = diff(capsys)
    assert code == 0, err
    assert "4 of 5 texts are patched: shown" in err, out
    assert "+++ b/agent.py" in out and "+++ b/texts/all.json" in out
    assert '+DESK = "At {name} you are the desk, {{always}}."' in out
    assert "porter.system is not patched: no file has it as one text" in out
    assert "You are the quick porter." in out
    assert (project / "agent.py").read_text() == AGENT

    code, out, err = diff(capsys, "--write", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["patched"] == ["cook.system", "desk.system", "judge.system", "writer.system"]
    assert found["not_patched"].keys() == {"porter.system"}
    patched = (project / "agent.py").read_text()
    assert "{{always}}" in patched and "Fry." in patched and 'Be "brief" in {x}.' in patched
    assert json.loads((project / "texts" / "all.json").read_text()) == {
        "judge": "You are the mild judge."
    }
    code, out, err = diff(capsys)
    assert "0 of 5 texts are patched" in err


def test_an_agent_that_is_in_no_file_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "run.yaml").write_text("agent: agent:agent\ntrain_dataset: tasks.jsonl\n")
    code, _, err = diff(capsys)
    assert code == 1 and "a patch needs an agent in a file" in err
    (project / "run.yaml").unlink()
    code, _, err = diff(capsys)
    assert code == 1 and "no run file" in err
