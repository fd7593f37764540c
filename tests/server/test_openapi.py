"""The description of the interface is complete, is true under fuzzing, and can be read offline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from starlette.routing import Mount, Route

from agentlightning.gateway.app import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.models import ModelRegistration
from agentlightning.server.openapi import document
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


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from references(each)


@pytest.mark.parametrize("with_store", [True, False])
def test_every_reference_leads_somewhere(with_store):
    whole = document(with_store=with_store)
    for reference in set(references(whole)):
        place: Any = whole
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_every_call_is_described_with_its_fields_where_they_travel():
    paths = document()["paths"]
    for kind in CALLS.values():
        method, _, path = kind.route.partition(" ")
        operation = paths[f"/api/v1{path}"][method.lower()]
        parameters = {one["name"]: one["in"] for one in operation.get("parameters", ())}
        body = operation.get("requestBody", {"content": {"application/json": {"schema": {"properties": {}}}}})
        in_body = body["content"]["application/json"]["schema"]["properties"]
        assert set(parameters) | set(in_body) == set(kind.__struct_fields__), kind
        assert [name for name, place in parameters.items() if place == "path"] == calls.path_fields(path)
        assert not in_body or method != "GET"
        assert {"200", "401", "403", "404", "409", "413", "422", "429", "503"} == set(operation["responses"])


async def test_every_route_of_the_gateway_and_its_models_is_described(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    gateway = Gateway(ModelTable(), store)
    app = create_app(store, gateway=gateway)
    (mount,) = (route for route in app.routes if isinstance(route, Mount))
    beside = [(f"{mount.path}{route.path}", route) for route in mount.routes if route.path.startswith("/models")]
    own = [(route.path, route) for route in app.routes if isinstance(route, Route) and "/v1/" in route.path]
    served = {
        (method.lower(), path.replace(":path}", "}"))
        for path, route in [*beside, *own]
        for method in route.methods - {"HEAD"}
    }
    paths = document()["paths"]
    assert served <= {(method, path) for path, methods in paths.items() for method in methods}
    assert len(served) == 6 + 2 * (7 + 3 + 1)
    for method, path in served:
        parameters = [one["name"] for one in paths[path][method].get("parameters", ()) if one["in"] == "path"]
        assert parameters == calls.path_fields(path)
    await gateway.close()
    await store.close()


def test_the_bodies_of_calls_about_models_are_described():
    whole = document()
    put = whole["paths"]["/api/v1/models/{name}"]["put"]
    schema = put["requestBody"]["content"]["application/json"]["schema"]
    registration = whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert set(registration["properties"]) == set(ModelRegistration.__struct_fields__)
    hold = whole["paths"]["/api/v1/models/{name}/hold"]["post"]
    assert set(hold["responses"]) == {"204", "default"}
    assert "ModelRegistration" not in document(with_gateway=False)["components"]["schemas"]


async def test_the_page_needs_neither_a_key_nor_the_internet(http):
    page = await http.get("/docs")
    assert (page.status, page.content_type) == (200, "text/html")
    text = await page.text()
    assert "openapi.json" in text
    assert "http://" not in text
    assert "https://" not in text
    described = await (await http.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    assert described["security"] == [{"key": []}]
    assert "/v1/chat/completions" not in described["paths"]  # this server has no gateway


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)])
async def test_no_request_breaks_the_server_or_its_word(kind, request, tmp_path):
    address = request.getfixturevalue("postgres_database") if kind == "postgres" else tmp_path / "store.db"
    store = await SqlStore.open(address)
    gateway = Gateway(ModelTable(), store, admin_key=KEY)
    async with HttpServer(create_app(store, gateway=gateway, admin_key=KEY, longest_poll=0.05)) as server:
        command = [str(Path(sys.executable).with_name("st")), "run", f"{server.url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--checks", CHECKS]
        # A registration asks whatever server it is told of, and a model may be called `a/hold`: a PUT is known there.
        # What serves the page is in short, and is tested with it.
        command += ["--exclude-path-regex", "^/api/v1/(models|dashboard)/"]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "5", "--request-timeout", "30"]
        command += ["--generation-database", "none", "--warnings", "off", "--no-color"]
        done = await anyio.run_process(command, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout.decode()[-6000:]
        async with aiohttp.ClientSession(server.url) as http:
            assert (await http.get("/ready")).status == 200
    assert await store.check_store() == []
    await store.close()
