"""The description of the interface is complete, is true under fuzzing, and can be read offline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.server import rest
from agentlightning.server.app import create_app
from agentlightning.server.model_calls import MODEL_CALLS
from agentlightning.server.serve import HttpServer
from agentlightning.store import calls
from agentlightning.store.base import CALLS
from agentlightning.store.sql import SqlStore

pytestmark = pytest.mark.anyio
KEY = "an admin's key"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth,"
    "unsupported_method"
)


async def described() -> dict[str, Any]:
    store = await SqlStore.open(":memory:")
    app = create_app(store, gateway=Gateway(ModelTable(), store))
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        whole = await (await http.get("/openapi.json")).json()
    await store.close()
    return whole


async def test_every_call_is_described_with_its_fields_where_they_travel():
    paths = (await described())["paths"]
    for kind in [*CALLS.values(), *MODEL_CALLS]:
        method, _, path = kind.route.partition(" ")
        operation = paths[f"/api/v1{path}"][method.lower()]
        parameters = {one["name"]: one["in"] for one in operation.get("parameters", ())}
        body = operation.get(
            "requestBody", {"content": {"application/json": {"schema": {"properties": {}}}}}
        )
        in_body = body["content"]["application/json"]["schema"]["properties"]
        expected = set(kind.__struct_fields__)
        assert set(parameters) | set(in_body) == expected, kind
        assert [name for name, place in parameters.items() if place == "path"] == calls.path_fields(
            path
        )
        assert not in_body or method not in calls.IN_QUERY
        assert {"200", "401", "403", "404", "409", "413", "422", "429", "503"} == set(
            operation["responses"]
        )


async def test_the_page_needs_neither_a_key_nor_the_internet(http):
    page = await http.get("/docs")
    assert (page.status, page.content_type) == (200, "text/html")
    text = await page.text()
    assert "openapi.json" in text
    assert "http://" not in text
    assert "https://" not in text
    whole = await (await http.get("/openapi.json")).json()
    assert whole["openapi"].startswith("3.1")
    assert whole["security"] == [{"key": []}]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)])
async def test_no_request_breaks_the_server_or_its_word(kind, request, tmp_path, monkeypatch):
    monkeypatch.setattr(rest, "LONGEST_POLL", 0.05)
    address = (
        request.getfixturevalue("postgres_database")
        if kind == "postgres"
        else tmp_path / "store.db"
    )
    store = await SqlStore.open(address)
    gateway = Gateway(ModelTable(), store, admin_key=KEY)
    async with HttpServer(create_app(store, gateway=gateway, admin_key=KEY)) as server:
        command = [str(Path(sys.executable).with_name("st")), "run", f"{server.url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--checks", CHECKS]
        # A registration asks whatever server it is told of, and a model may be called `a/hold`: a
        # PUT is known there.
        command += ["--exclude-path-regex", "^/api/v1/models/"]
        command += [
            "--phases",
            "coverage,fuzzing",
            "--max-examples",
            "5",
            "--request-timeout",
            "30",
        ]
        command += ["--generation-database", "none", "--warnings", "off", "--no-color"]
        done = await anyio.run_process(command, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout.decode()[-6000:]
        async with aiohttp.ClientSession(server.url) as http:
            assert (await http.get("/ready")).status == 200
    assert await store.check_store() == []
    await store.close()
