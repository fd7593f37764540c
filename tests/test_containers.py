"""The container files name only what exists: options, extras, files, and a health check that a real
server passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import click
import pytest
import yaml

from agentlightning.cli.main import agl
from agentlightning.cli.server_commands import server
from agentlightning.server.app import ServerSettings, create_app
from agentlightning.server.serve import HttpServer
from agentlightning.server.server_process import running_server

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
NGINX = (ROOT / "deploy" / "nginx.conf").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())


def instruction(name: str) -> list[str]:
    """The words of an instruction in JSON form, such as `CMD ["a", "b"]`."""
    found = re.search(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found, name
    return json.loads(found[1])


@pytest.mark.parametrize(
    "command",
    [
        instruction("CMD"),
        *(COMPOSE["services"][name]["command"] for name in ("server", "gateway1")),
    ],
)
def test_the_server_is_started_with_options_that_it_has(command: list[str]) -> None:
    entrypoint = instruction("ENTRYPOINT")
    assert entrypoint[:2] == ["agl", "server"]
    with click.Context(server) as context:
        options = {name for parameter in server.params for name in parameter.opts}
        assert {word for word in entrypoint + command if word.startswith("--")} <= options
        server.parse_args(context, [*entrypoint[2:], *command])
    assert context.params["host"] == "0.0.0.0"


def test_what_it_installs_copies_and_publishes_exists() -> None:
    found = re.search(r'"\.\[([\w,-]+)\]"', DOCKERFILE)
    assert found
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(found[1].split(",")) <= set(extras)
    allowed = {
        line[1:]
        for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    assert {source for line in lines for source in line.split()[:-1]} == allowed
    assert all((ROOT / path).exists() for path in allowed)
    entrypoint = instruction("ENTRYPOINT")
    port = entrypoint[entrypoint.index("--port") + 1]
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE) == [port]
    assert COMPOSE["services"]["nginx"]["ports"] == [f"127.0.0.1:{port}:80"]
    servers = re.findall(r"^    server (\w+):(\d+);$", NGINX, re.MULTILINE)
    assert servers == [(name, port) for name in ("server", "gateway1", "gateway2")]
    assert {name for name, _ in servers} < set(COMPOSE["services"])


@pytest.mark.anyio
async def test_the_health_check_passes_on_a_server_and_fails_without() -> None:
    found = re.search(r"HEALTHCHECK .*\\\n\s+CMD (\[.*\])", DOCKERFILE)
    assert found
    program, flag, script = json.loads(found[1])
    assert program == "python"

    async def check(port: str) -> int:
        command = [sys.executable, flag, script.replace(":8123/", f":{port}/")]
        done = await anyio.run_process(command, check=False, stderr=subprocess.DEVNULL)
        return done.returncode

    async with HttpServer(create_app(None)) as http:
        port = http.url.rpartition(":")[2]
        assert await check(port) == 0
    assert await check(port) != 0


def test_secrets_are_required_and_never_on_a_command_line() -> None:
    services = COMPOSE["services"]
    assert services["server"]["environment"]["AGL_KEY"].startswith("${AGL_KEY:?")
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith(
        "${POSTGRES_PASSWORD:?"
    )
    assert not any("$" in word for word in services["server"]["command"])


METRIC = re.compile(r"\bagl_\w+")


@pytest.mark.anyio
async def test_alerts_and_board_ask_for_metrics_that_a_server_has(tmp_path: Path) -> None:
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    asked = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    settings = ServerSettings(store=str(tmp_path / "store.sqlite"))
    async with running_server(settings) as running, aiohttp.ClientSession() as http:
        shown = await (await http.get(f"{running.url}/metrics")).text()
    known = {line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE")}
    assert len(known) > 10 and {name for text in asked for name in METRIC.findall(text)} <= known


@pytest.mark.parametrize("unit", ["agl-server.service", "agl-runner.service"])
def test_services_start_commands_with_options_that_they_have(unit: str) -> None:
    text = (ROOT / "deploy" / unit).read_text()
    found = re.search(r"^ExecStart=\S+/agl (\w+) (.+)$", text, re.MULTILINE)
    assert found
    command = agl.get_command(click.Context(agl), found[1])
    assert command is not None
    with click.Context(command) as context:
        command.parse_args(
            context, found[2].replace("${AGL_SERVER}", "https://agl.example.com").split()
        )
