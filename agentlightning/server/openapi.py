"""The interface described: OpenAPI 3.1 at `/openapi.json`, made from the calls themselves, and a page to read it at
`/docs`.

This module knows what each call takes and returns, and which answers there are; of the gateway's endpoints, whose
protocols are described by their makers, only what they are. The page needs nothing from elsewhere: it works on a
machine without internet.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import inspect
import re
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.gateway.updates import WeightUpdate
from agentlightning.server.models import Hold, ModelDescription, ModelRegistration, Release, Updated
from agentlightning.server.rest import PREFIX
from agentlightning.server.reward_url import REWARD_PATH
from agentlightning.store import calls
from agentlightning.store.calls import AdminCall, Call, ErrorReply

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


@dataclass(frozen=True)
class _ModelCall:
    """One route of the gateway's table of models: what it is called, takes and returns, None for an empty answer."""

    route: str
    operation: str
    about: str
    body: Any = None
    returns: Any = None
    failures: tuple[str, ...] = ()


_MODEL_CALLS: Final = (
    _ModelCall("GET /models", "ListModels", "Every model of the gateway, and how each of its servers does",
               returns=list[ModelDescription]),
    _ModelCall("PUT /models/{name}", "RegisterModel", "Register a model's servers, or replace the model of this name",
               ModelRegistration, ModelDescription, ("409", "413", "422")),
    _ModelCall("DELETE /models/{name}", "RemoveModel", "Take a model away; with `owner` only if it is still theirs"),
    _ModelCall("POST /models/{name}/hold", "HoldModel", "Let a model's calls wait, as while its weights are changed",
               Hold, failures=("404", "413", "422")),
    _ModelCall("POST /models/{name}/release", "ReleaseModel", "Let a model's calls through again",
               Release, failures=("404", "413", "422")),
    _ModelCall("POST /models/{name}/weights", "UpdateWeights", "Have a model's servers load weights, its calls held",
               WeightUpdate, Updated, ("404", "409", "413", "422", "502", "503")),
)  # fmt: skip
# Endpoint → what it is, of those that take a request for a model.
_MODEL_ENDPOINTS: Final = {
    "chat/completions": "OpenAI's chat completions, streamed or whole",
    "completions": "OpenAI's completions, of one text or of token ids, streamed or whole",
    "responses": "OpenAI's responses, streamed or whole",
    "embeddings": "OpenAI's embeddings, of servers that make them",
    "messages": "Anthropic's messages, streamed or whole",
    "messages/count_tokens": "How many tokens the prompt of a message has",
}

# Route and the names of its query → what it is. They serve the page and change with it, so in short.
_DASHBOARD: Final = {
    "GET /session": "Who looks, and what they may do",
    "POST /session": 'Begin a session: a cookie for `{"key": …}`',
    "DELETE /session": "End the session",
    "GET /runs?project": "Runs, with what they measured last",
    "GET /series?run&name&points": "Curves of runs, several steps in one point where there are more",
    "GET /quality?run": "What a run left out of training, and why",
    "GET /prompts?run": "The candidates of a search for prompts",
    "POST /rollouts": "A page of rollouts, with reward, error, calls, tokens and agents of each",
    "GET /rollouts/{rollout_id}?attempt": "A rollout as a conversation, and all that is stored of it",
    "GET /rollouts/{rollout_id}/request?call": "The request of a call, to send it again",
    "GET /rollouts/{rollout_id}/tokens?call&now": "The tokens of a call, with what is known of each",
    "POST /rollouts/{rollout_id}/score": "Give a rollout a reward",
    "GET /groups/{group_id}": "A group side by side",
    "GET /groups/{group_id}/tree": "A group's calls over token ids",
    "POST /credit": "Rewards, returns and advantages, as trained or with other settings",
    "POST /export": "A selection of rollouts as a file",
}


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
    kinds = list(calls.all_calls())
    answers = [kind.returns() for kind in kinds]
    model_calls = _MODEL_CALLS if with_store and with_gateway else ()
    bodies = [kind for call in model_calls for kind in (call.body, call.returns) if kind is not None]
    all_kinds = [*kinds, *answers, ErrorReply, *bodies]
    shapes, components = _simple(msgspec.json.schema_components(all_kinds, ref_template=_SCHEMAS))
    returned = shapes[len(kinds) : len(kinds) + len(answers)]
    of_models = iter(shapes[len(shapes) - len(bodies) :])
    paths: dict[str, Json] = {}
    if with_store:
        for kind, answer in zip(kinds, returned, strict=True):
            method, _, path = kind.route.partition(" ")
            paths.setdefault(PREFIX + path, {})[method.lower()] = _operation(kind, components[kind.__name__], answer)
    for call in model_calls:
        method, _, path = call.route.partition(" ")
        body, answer = (None if kind is None else next(of_models) for kind in (call.body, call.returns))
        paths.setdefault(PREFIX + path, {})[method.lower()] = _model_operation(call, body, answer)
    for (method, path), operation in _others(with_store, with_gateway).items():
        paths.setdefault(path, {})[method] = operation
    for kind in kinds:
        # A call's own shape, with what travels in the path, is nobody's body.
        del components[kind.__name__]
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
        return [_simple(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    prefix = schema.get("prefixItems")
    if prefix is not None:
        schema = {name: value for name, value in schema.items() if name != "prefixItems"}
        schema["items"] = prefix[0] if all(one == prefix[0] for one in prefix) else {"anyOf": prefix}
    return {name: _simple(value) for name, value in schema.items()}


def _operation(kind: type[Call[Any]], shape: Json, answer: Json) -> Json:
    """One call: where its fields travel, and what comes back."""
    in_path = calls.path_fields(kind.route)
    fields = {name: schema for name, schema in shape["properties"].items() if name not in in_path}
    if issubclass(kind, AdminCall):
        del fields["actor"]  # the server fills it in
    required = [name for name in shape["required"] if name in fields]
    parameters = [_parameter(name, "path", shape["properties"][name], required=True) for name in in_path]
    about = inspect.cleandoc(vars(kind).get("__doc__") or "")
    operation: Json = {
        "operationId": kind.__name__,
        "summary": re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).capitalize(),
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
    if kind.route.startswith("GET ") and NoneType in getattr(kind.returns(), "__args__", ()):
        (answer,) = (one for one in answer["anyOf"] if one != {"type": "null"})  # None is a 404
    operation["responses"] = {"200": {"description": "Done.", "content": _content(answer)}} | _failures(*_FAILURES)
    return operation


def _others(with_store: bool, with_gateway: bool) -> dict[tuple[str, str], Json]:
    """The routes that are no calls of the store, in short."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    stream = {"text/event-stream": {}}
    anything: Json = {_JSON: {"schema": {"type": "object"}}}
    found: dict[tuple[str, str], Json] = {
        ("get", "/health"): _plain("Whether the process lives", "server", anything) | {"security": []},
        ("get", "/ready"): _plain("Whether the store answers", "server", anything)
        | {"security": [], "responses": {"200": _answered(anything), "503": _answered(anything)}},
        ("get", "/metrics"): _plain("Counters in Prometheus's format", "server", text, "401", "403", "429"),
    }
    if with_store:
        found["get", f"{PREFIX}/events"] = _plain(
            "What happens in the store, as server-sent events: `rollout`, `spans`, `groups`, `queued`, `reset`",
            "events", stream, "401", "403", "429", "503",
        )  # fmt: skip
        found["post", REWARD_PATH] = _reward_operation()
        for prefix in ("", _ATTEMPT):
            found["post", f"{prefix}/v1/traces"] = _plain(
                "Spans of any OpenTelemetry exporter (OTLP over HTTP)", "otlp", anything | {
                    "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}
                }, path=prefix, body=True,
            )  # fmt: skip
            refusals = {code: _answered(anything) for code in ("400", "401", "403", "404", "413", "415", "429", "503")}
            found["post", f"{prefix}/v1/traces"]["responses"] |= refusals  # a google.rpc.Status
        for route, about in _DASHBOARD.items():
            method, place = route.lower().split(" ")
            path, _, names = place.partition("?")
            content = {"application/octet-stream": {}} if path == "/export" else anything
            one = found[method, f"{PREFIX}/dashboard{path}"] = _plain(
                about, "dashboard", content, *_FAILURES, path=path, body=method == "post"
            )
            one["parameters"] += [
                _parameter(name, "query", {"type": "string"}, required=False) for name in names.split("&") if name
            ]
            if method == "delete":
                one["responses"]["204"] = {"description": "Done."}
    if with_gateway:
        for prefix in ("", _ATTEMPT) if with_store else ("",):
            for endpoint, about in _MODEL_ENDPOINTS.items():
                content = anything | stream if "streamed" in about else anything
                found["post", f"{prefix}/v1/{endpoint}"] = _plain(
                    about, "gateway", content, "400", "401", "403", "404", "413", "422", "429", "502", "503", "504",
                    path=prefix, body=True,
                )  # fmt: skip
            shown = {
                ("get", "models"): "The models there are",
                ("get", "models/{name}"): "One of them",
                ("get", "responses/{response_id}"): "A recent response, as it was answered",
                ("delete", "responses/{response_id}"): "Forget a response, so that no call can continue it",
            }
            for (method, endpoint), about in shown.items():
                path = f"{prefix}/v1/{endpoint}"
                found[method, path] = _plain(about, "gateway", anything, "400", "401", "403", "404", "429", path=path)
    return found


def _model_operation(call: _ModelCall, body: Json | None, answer: Json | None) -> Json:
    """One call about the table of models: its `body` and `answer` as schemas."""
    method, _, path = call.route.partition(" ")
    done = {"204": {"description": "Done."}} if answer is None else {"200": _answered({_JSON: {"schema": answer}})}
    operation: Json = {
        "operationId": call.operation,
        "summary": call.about,
        "description": "Needs the admin key.",
        "tags": ["models"],
        "parameters": [_parameter(name, "path", {"type": "string"}, required=True) for name in calls.path_fields(path)],
        "responses": done | _failures("401", "403", "429", *call.failures),
    }
    if method == "DELETE":
        operation["parameters"].append(_parameter("owner", "query", {"type": "string"}, required=False))
    if body is not None:
        operation["requestBody"] = {"required": method == "PUT", "content": {_JSON: {"schema": body}}}
    return operation


def _reward_operation() -> Json:
    """The one route whose key is part of its path."""
    number: Json = {"type": "number"}
    named: Json = {"type": "object", "additionalProperties": True}
    operation = _plain(
        "Give an attempt a reward: a number, or an object of named ones", "rewards", {_JSON: {"schema": named}},
        "400", "401", "403", "404", "413", "429", "503", path=REWARD_PATH,
    )  # fmt: skip
    operation["parameters"].append(_parameter("Idempotency-Key", "header", {"type": "string"}, required=False))
    body: Json = {"schema": {"anyOf": [number, named]}}
    return operation | {"requestBody": {"required": True, "content": {_JSON: body}}, "security": []}


def _plain(about: str, tag: str, content: Json, *failures: str, path: str = "", body: bool = False) -> Json:
    operation: Json = {
        "summary": about,
        "tags": [tag],
        "responses": {"200": _answered(content)} | _failures(*failures),
    }
    if path:
        operation["parameters"] = [
            _parameter(name, "path", {"type": "string"}, required=True) for name in calls.path_fields(path)
        ]
    if body:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}
    return operation


def _answered(content: Json) -> Json:
    return {"description": "Answered.", "content": content}


def _parameter(name: str, place: str, schema: Json, *, required: bool) -> Json:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _content(schema: Json) -> Json:
    return {_JSON: {"schema": schema}, _MSGPACK: {"schema": schema}}


def _failures(*codes: str) -> Json:
    return {
        code: {"$ref": f"#/components/responses/{code}"} if code in _FAILURES else _failure("See the message.")
        for code in codes
    }


def _failure(meaning: str) -> Json:
    return {"description": meaning, "content": {_JSON: {"schema": {"$ref": _SCHEMAS.format(name="ErrorReply")}}}}
