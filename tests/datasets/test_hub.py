"""`hf:` names, with the real `huggingface_hub` against a server on loopback that speaks the hub's
protocol."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agentlightning.datasets.hub import HubName, push, read_hub_name
from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import ConfigError
from tests.cli.world import finish, start
from tests.test_trainer import policy

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories in memory, `{"datasets/me/data": {"tasks.jsonl": b"…"}}`; files need the token
    `good`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def _say(self, value: Any, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "content-length": str(len(body)),
            "x-repo-commit": COMMIT,
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        words = self.path.partition("?")[0].strip("/").split("/")
        if words[0] == "api":  # api/datasets/me/data/revision/main
            kind = words[1] + "/" if words[1] == "datasets" else ""
            name = kind + "/".join(words[2:4])
            files = self.server.repositories.get(name)
            if files is not None and "tree" in words:
                return self._say(
                    [
                        {"type": "file", "path": path, "size": len(one), "oid": "0"}
                        for path, one in files.items()
                    ]
                )
            siblings = [{"rfilename": file} for file in files or ()]
            return self._say(
                {"id": "/".join(words[2:4]), "sha": COMMIT, "siblings": siblings},
                404 if files is None else 200,
            )
        head, _, file = "/".join(words).partition("/resolve/")
        content = self.server.repositories.get(head, {}).get(file.partition("/")[2])
        if content is None or self.headers.get("authorization") != "Bearer good":
            return self._say(
                {"error": "no such file"},
                404 if content is None else 401,
                x_error_code="EntryNotFound",
            )
        return self._say(content, etag=f'"{hashlib.sha1(content).hexdigest()}"')

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        words = self.path.partition("?")[0].strip("/").split("/")
        if self.path == "/api/repos/create":
            told = json.loads(body)
            kind = "datasets/" if told.get("type") == "dataset" else ""
            self.server.repositories.setdefault(
                f"{kind}{told.get('organization', 'me')}/{told['name']}", {}
            )
            return self._say({"url": f"{self.server.url}/{kind}me/{told['name']}"})
        if "branch" in words:
            return self._say({}, 201)
        if words[-2] == "preupload":
            files = json.loads(body)["files"]
            return self._say(
                {
                    "files": [
                        {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for one in files
                    ]
                }
            )
        kind = "datasets/" if words[1] == "datasets" else ""
        files = self.server.repositories[kind + "/".join(words[2:4])]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        address = f"{self.server.url}/{kind}{'/'.join(words[2:4])}/commit/{COMMIT}"
        return self._say({"commitUrl": address, "commitOid": COMMIT, "success": True})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def agl(folder: Path, url: str, *arguments: str, code: int = 0) -> str:
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "good"}
    process = start(folder, *arguments, stdin=subprocess.DEVNULL, **variables)
    return finish(process, code)[1]


def test_a_hub_that_is_away_is_asked_once_and_its_cache_serves(tmp_path: Path, hub: Hub) -> None:
    policy().save(tmp_path / "model")
    hub.repositories["me/agent"] = {
        file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()
    }
    agl(tmp_path, hub.url, "chat", "me/agent")
    err = agl(tmp_path, hub.url, "chat", "me/nobody", code=1)
    assert "cannot load model 'me/nobody'" in err
    agl(tmp_path, "http://127.0.0.1:9", "chat", "me/agent")
    for name in ("nope", "me/nobody"):
        err = agl(tmp_path, "http://127.0.0.1:9", "chat", name, code=1)
        assert (
            f"there is no model {name!r} here" in err
            and "http://127.0.0.1:9 does not answer" in err
        )
        assert "Retrying" not in err


def test_errors_of_the_hub_name_what_was_asked_for(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "sft.jsonl").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"hf:me/wins/sft.jsonl: .*refused"):
        push(file, "hf:me/wins/sft.jsonl")
    with pytest.raises(ConfigError, match=r"hf:me/a--b/sft.jsonl: Cannot have --"):
        push(file, "hf:me/a--b/sft.jsonl")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    assert push(file, "hf:me/wins@second/sft.jsonl").startswith(
        f"{hub.url}/datasets/me/wins/commit/"
    )
    for name in ("model.safetensors", "optimizer.pt", "loop.json"):
        (tmp_path / "step" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "step" / name).write_bytes(b"x")
    push(tmp_path / "step", "hf:me/agent")
    assert hub.repositories["me/agent"].keys() == {"model.safetensors"}
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name, message in (
        ("nothing.jsonl", "Entry Not Found"),
        ("", "one of: sft.jsonl"),
        ("sft.jsonl", "HF_TOKEN"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_dataset(f"hf:me/wins/{name}".rstrip("/"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hf:me/agent", HubName("me/agent", None, None)),
        ("hf:me/agent@v1.0", HubName("me/agent", "v1.0", None)),
        ("hf:me/data@abc/a/b.jsonl", HubName("me/data", "abc", "a/b.jsonl")),
    ],
)
def test_a_name_is_read(name: str, found: HubName) -> None:
    assert read_hub_name(name) == found


@pytest.mark.parametrize(
    "name", ["hf:", "hf:agent", "hf:me/agent@", "hf:me//x", "hf:../..", "hf:me/a b"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="names nothing on the hub"):
        read_hub_name(name)
