"""The interface described: OpenAPI 3.1 at `/openapi.json`, made from the calls themselves, and a page to read it at
`/docs`.

This module knows what each call takes and returns, and which answers there are; of endpoints whose protocols are
described by their makers, only what they are, and nothing of the routes that serve the dashboard's page and change with
it. The page needs nothing from elsewhere: it works on a machine without internet.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Any, Final, TypeAlias, cast, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.server.models import MODEL_CALLS
from agentlightning.server.rest import PREFIX
from agentlightning.server.reward_url import REWARD_PATH
from agentlightning.store import calls
from agentlightning.store.base import CALLS
from agentlightning.store.calls import Call, ErrorReply

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
    "The store and the gateway of Agent Lightning. Bodies are JSON or msgpack, by `Content-Type`; answers by `Accept`. "
    "Send a key as `Authorization: Bearer …`; a server without an admin key answers this machine's programs without "
    "one. Calls with a `timeout` wait so many seconds for something to answer with, at most a minute at a time."
)
_ATTEMPT: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"

# What the rest is, by route. What is under `/v1` is under each attempt's own prefix too.
_OF_EVERY_SERVER: Final = {
    "GET /health": "Whether the process lives",
    "GET /ready": "Whether the store answers",
    "GET /metrics": "Counters in Prometheus's text format",
}
_OF_A_STORE: Final = {
    f"GET {PREFIX}/events": "What happens in the store, as server-sent events: "
    "`rollout`, `spans`, `groups`, `metrics`, `queued`, `reset`",
    f"POST {REWARD_PATH}": "Give an attempt a reward: a number, or an object of named ones. "
    "A request that repeats an `Idempotency-Key` counts once",
    "POST /v1/traces": "Spans of any OpenTelemetry exporter (OTLP over HTTP), as protobuf or JSON",
}
_OF_A_GATEWAY: Final = {
    "POST /v1/chat/completions": "OpenAI's chat completions, streamed or whole",
    "POST /v1/completions": "OpenAI's completions, of one text or of token ids, streamed or whole",
    "POST /v1/responses": "OpenAI's responses, streamed or whole",
    "GET /v1/responses": "Declined (426): there is no websocket",
    "POST /v1/embeddings": "OpenAI's embeddings, of servers that make them",
    "POST /v1/messages": "Anthropic's messages, streamed or whole",
    "POST /v1/messages/count_tokens": "How many tokens the prompt of a message has",
    "POST /v1beta/models/{call}": "Google's `{model}:generateContent`, `:streamGenerateContent` and `:countTokens`",
    "POST /v1/models/{call}": "The same",
    "GET /v1/models": "The models there are",
    "GET /v1/models/{name}": "One of them",
}
_WITHOUT_KEY: Final = ("/health", "/ready", REWARD_PATH)


def documentation_routes(*, with_store: bool, with_gateway: bool, protected: bool) -> list[BaseRoute]:
    """`/openapi.json` and `/docs` of a server with or without a store, a gateway and an admin key. They need no key."""

    async def spec(request: Request) -> Response:
        return Response(_encoded(with_store, with_gateway, protected), media_type=_JSON)

    async def page(request: Request) -> Response:
        html = importlib.resources.files("agentlightning.server").joinpath("docs.html").read_text("utf-8")
        policy = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        return Response(html, media_type="text/html", headers={"content-security-policy": policy})

    return [Route("/openapi.json", spec, methods=["GET"]), Route("/docs", page, methods=["GET"])]


@functools.cache
def _encoded(with_store: bool, with_gateway: bool, protected: bool) -> bytes:
    return msgspec.json.encode(document(with_store=with_store, with_gateway=with_gateway, protected=protected))


def document(*, with_store: bool = True, with_gateway: bool = True, protected: bool = True) -> Json:
    """The whole description. Without `protected` the server also answers those who show no key."""
    kinds = list(CALLS.values()) if with_store else []
    of_models = {
        route: (handler, get_type_hints(handler))
        for route, handler in MODEL_CALLS.items()
        if with_store and with_gateway
    }
    bodies = [hints[name] for _, hints in of_models.values() for name in ("asked", "return") if name in hints]
    told = list(dict.fromkeys([ErrorReply, *kinds, *(kind.returns for kind in kinds), *bodies]))
    schemas, components = _simple(msgspec.json.schema_components(told, ref_template=_SCHEMAS))
    shapes: dict[Any, Json] = dict(zip(told, schemas, strict=True))
    paths: dict[str, Json] = {}

    def describe(route: str, operation: Json) -> None:
        method, _, path = route.partition(" ")
        paths.setdefault(path, {})[method.lower()] = operation

    for kind in kinds:
        # A call's own shape, with what travels in the path, is nobody's body.
        shape = components.pop(kind.method)
        describe(kind.route.replace("/", f"{PREFIX}/", 1), _operation(kind, shape, shapes[kind.returns]))
    for route, (handler, hints) in of_models.items():
        described = _model_operation(route, handler, shapes.get(hints.get("asked")), shapes[hints["return"]])
        describe(route.replace("/", f"{PREFIX}/", 1), described)
    plain = _OF_EVERY_SERVER | (_OF_A_STORE if with_store else {}) | (_OF_A_GATEWAY if with_gateway else {})
    for route, about in plain.items():
        describe(route, _plain(route, about))
        if with_store and " /v1" in route:
            attributed = route.replace(" ", f" {_ATTEMPT}")
            describe(attributed, _plain(attributed, about))
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


def _simple(schema: Any) -> Any:
    """The same schema without `prefixItems`, which many tools mistake: a pair of numbers is two items, all numbers."""
    if isinstance(schema, list | tuple):
        return [_simple(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _simple(value) for name, value in cast(Json, schema).items() if name != "prefixItems"}
    if "prefixItems" in schema:
        parts["items"] = {"anyOf": _simple(schema["prefixItems"])}
    return parts


def _operation(kind: type[Call], shape: Json, answer: Json) -> Json:
    """One call: where its fields travel, and what comes back."""
    in_path = calls.path_fields(kind.route)
    fields = {name: schema for name, schema in shape["properties"].items() if name not in in_path}
    required = [name for name in shape["required"] if name in fields]
    parameters = [_parameter(name, "path", shape["properties"][name], required=True) for name in in_path]
    about = inspect.cleandoc(kind.__doc__ or "")
    operation: Json = {
        "operationId": kind.method,
        "summary": kind.method.replace("_", " ").capitalize(),
        "description": f"{about}\n\nNeeds a key with the scope `{kind.scope}`.".strip(),
        "tags": [kind.route.partition(" /")[2].partition("/")[0]],
    }
    if kind.route.startswith("GET "):
        parameters += [_parameter(name, "query", schema, required=name in required) for name, schema in fields.items()]
    else:
        body = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
        operation["requestBody"] = {"required": bool(required), "content": _content(body)}
    if parameters:
        operation["parameters"] = parameters
    if kind.route.startswith("GET ") and NoneType in getattr(kind.returns, "__args__", ()):
        (answer,) = (one for one in answer["anyOf"] if one != {"type": "null"})  # None is a 404
    failures = {code: {"$ref": f"#/components/responses/{code}"} for code in _FAILURES}
    operation["responses"] = {"200": {"description": "Done.", "content": _content(answer)}} | failures
    return operation


def _model_operation(route: str, handler: Callable[..., Any], body: Json | None, answer: Json) -> Json:
    """One call about the table of models."""
    operation = _plain(route, str(handler.__doc__))
    operation |= {
        "operationId": handler.__name__.title().replace("_", ""),
        "tags": ["models"],
        "description": "Needs the admin key.",
    }
    if route.startswith("DELETE "):
        operation["parameters"].append(_parameter("owner", "query", {"type": "string"}, required=False))
    if body is not None:
        operation["requestBody"] = {"required": route.startswith("PUT "), "content": {_JSON: {"schema": body}}}
    done = {"description": "Done."}
    with_body = {"200": done | {"content": {_JSON: {"schema": answer}}}}
    operation["responses"] = {"204": done} if answer == {"type": "null"} else with_body
    operation["responses"]["default"] = _failure("See the message.")
    return operation


def _plain(route: str, about: str) -> Json:
    """A route in short. Its failures are in the form of its protocol."""
    method, _, path = route.partition(" ")
    operation: Json = {
        "summary": about,
        "tags": ["gateway" if "/v1/" in route else "server"],
        "parameters": [_parameter(name, "path", {"type": "string"}, required=True) for name in calls.path_fields(path)],
        "responses": {"200": {"description": "Answered."}, "default": {"description": "Refused, or failed."}},
    }
    if method == "POST":
        taken = ["number", "object"] if path == REWARD_PATH else "object"
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": {"type": taken}}}}
    return operation | ({"security": []} if path in _WITHOUT_KEY else {})


def _parameter(name: str, place: str, schema: Json, *, required: bool) -> Json:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _content(schema: Json) -> Json:
    return {_JSON: {"schema": schema}, _MSGPACK: {"schema": schema}}


def _failure(meaning: str) -> Json:
    return {"description": meaning, "content": {_JSON: {"schema": {"$ref": _SCHEMAS.format(name="ErrorReply")}}}}
