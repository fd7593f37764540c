"""The calls of a server described: OpenAPI 3.1 at `/openapi.json`, and a page that shows it at
`/docs`."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import inspect
import re
from collections.abc import Sequence
from types import NoneType
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.server.rest import PREFIX
from agentlightning.store.calls import IN_QUERY, ErrorReply, StoreCall, path_fields

Json: TypeAlias = dict[str, Any]

_JSON: Final = "application/json"
_MSGPACK: Final = "application/msgpack"
_SCHEMAS: Final = "#/components/schemas/{name}"
_FAILURES: Final = {
    "401": "The key is missing or not valid.",
    "403": "The key does not cover this.",
    "404": "An id names nothing here.",
    "409": "Not allowed in the present state.",
    "413": "The body is longer than the server takes.",
    "422": "Malformed; the message says where.",
    "429": "Too many requests; `Retry-After` says when to ask again.",
    "503": "The store cannot be reached, or the server is stopping; ask again.",
}
_ABOUT: Final = (
    "The store and the gateway of Agent Lightning. Bodies are JSON or msgpack, by `Content-Type`; "
    "answers by `Accept`. Send a key as `Authorization: Bearer …`; a server without an admin key "
    "answers this machine's programs without one. Calls with a `timeout` wait so many seconds for "
    "something to answer with, at most a minute at a time."
)


def documentation_routes(kinds: Sequence[type[StoreCall]], *, protected: bool) -> list[BaseRoute]:
    """`/openapi.json` and `/docs` of a server that answers calls of these `kinds`. They need no
    key."""

    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(kinds, protected=protected))

    async def spec(request: Request) -> Response:
        return Response(encoded(), media_type=_JSON)

    async def page(request: Request) -> Response:
        html = (
            importlib.resources.files("agentlightning.server")
            .joinpath("docs.html")
            .read_text("utf-8")
        )
        policy = (
            "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src "
            "'unsafe-inline'"
        )
        return Response(html, media_type="text/html", headers={"content-security-policy": policy})

    return [Route("/openapi.json", spec), Route("/docs", page)]


def document(kinds: Sequence[type[StoreCall]], *, protected: bool) -> Json:
    """The whole description. Without `protected` the server also answers those who show no key."""
    shown = list(dict.fromkeys([ErrorReply, *kinds, *(kind.returns for kind in kinds)]))
    schemas, components = msgspec.json.schema_components(shown, ref_template=_SCHEMAS)
    shapes: dict[Any, Json] = dict(zip(shown, schemas, strict=True))
    paths: dict[str, Json] = {}
    for kind in kinds:
        method, _, path = kind.route.partition(" ")
        # A call's own shape, with what travels in the path, is nobody's body.
        operation = _operation(kind, components.pop(kind.__name__), shapes[kind.returns])
        paths.setdefault(PREFIX + path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Agent Lightning",
            "version": importlib.metadata.version("agent-lightning-next"),
            "description": _ABOUT,
        },
        "security": [{"key": []}] if protected else [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {code: _failure(meaning) for code, meaning in _FAILURES.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(kind: type[StoreCall], shape: Json, answer: Json) -> Json:
    """One call: where its fields travel, and what comes back."""
    in_path = path_fields(kind.route)
    in_query = kind.route.startswith(IN_QUERY)
    fields = {name: schema for name, schema in shape["properties"].items() if name not in in_path}
    required = [name for name in shape["required"] if name in fields]
    parameters = [
        _parameter(name, "path", shape["properties"][name], required=True) for name in in_path
    ]
    about = inspect.cleandoc(kind.__doc__ or "")
    operation: Json = {
        "operationId": kind.method,
        "summary": re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", kind.method).capitalize(),
        "description": f"{about}\n\nNeeds a key with the scope `{kind.scope}`.".strip(),
        "tags": [kind.route.partition(" /")[2].partition("/")[0]],
    }
    if in_query:
        parameters += [
            _parameter(name, "query", schema, required=name in required)
            for name, schema in fields.items()
        ]
    else:
        body = {
            "type": "object",
            "properties": fields,
            "required": required,
            "additionalProperties": False,
        }
        operation["requestBody"] = {"required": bool(required), "content": _content(body)}
    if parameters:
        operation["parameters"] = parameters
    if in_query and NoneType in getattr(kind.returns, "__args__", ()):
        # None is a 404
        (answer,) = (option for option in answer["anyOf"] if option != {"type": "null"})
    failures = {code: {"$ref": f"#/components/responses/{code}"} for code in _FAILURES}
    operation["responses"] = {
        "200": {"description": "Done.", "content": _content(answer)}
    } | failures
    return operation


def _parameter(name: str, place: str, schema: Json, *, required: bool) -> Json:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _content(schema: Json) -> Json:
    return {_JSON: {"schema": schema}, _MSGPACK: {"schema": schema}}


def _failure(meaning: str) -> Json:
    return {
        "description": meaning,
        "content": {_JSON: {"schema": {"$ref": _SCHEMAS.format(name="ErrorReply")}}},
    }
