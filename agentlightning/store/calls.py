"""Calls: the methods of `LightningStore` as nouns, from which REST, its description and the client
are derived.

`@call` makes a noun of a method's parameters, and a method that passes it to `perform`. Parameters
in the route travel in the path, the others in the body, or for GET and DELETE in the query. Bodies
are JSON or msgpack. A server adds calls of its own as subclasses of `StoreCall`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar, cast, get_type_hints

import msgspec

from agentlightning.store import codec
from agentlightning.types import EnqueueRolloutRequest, KeyScope, Noun

F = TypeVar("F", bound=Callable[..., Any])
# the methods whose fields travel in the query, as they have no body
IN_QUERY: Final = ("GET", "DELETE")


_VERBS: Final = {
    "query": "list",
    "page": "list",
    "get": "read",
    "enqueue": "queue",
    "dequeue": "lease",
}


class StoreCall(Noun, frozen=True, kw_only=True):
    """One call. The `scope` "trainer" is that of keys that may do everything but administer the
    store. An `audited` call is logged. `ids` are fields that a client fills with new ids of a kind,
    so that a repeated call is recognised. A field `timeout` is how many seconds to wait for an
    answer."""

    method: ClassVar[str]
    route: ClassVar[str]
    scope: ClassVar[KeyScope] = "trainer"
    audited: ClassVar[bool] = False
    ids: ClassVar[Mapping[str, str]] = {}
    returns: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        cls.method = vars(cls).get("method", cls.__name__)

    @classmethod
    def words(cls) -> str:
        """The call in the words of messages: `query_keys` → `list keys`."""
        verb, _, what = cls.method.partition("_")
        return f"{_VERBS.get(verb, verb)} {what.replace('_', ' ')}".strip()

    def repeatable(self) -> bool:
        """Whether doing it twice is the same as doing it once, so that it may be repeated if no
        answer came."""
        return True


def call(
    route: str,
    scope: KeyScope = "trainer",
    *,
    audited: bool = False,
    ids: Mapping[str, str] | None = None,
    repeatable: Callable[[Any], bool] = StoreCall.repeatable,
) -> Callable[[F], F]:
    """Make a method of `LightningStore`, of which only signature and docstring are written, a
    call."""

    def decorate(function: F) -> F:
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        fields = [
            (parameter.name, hints[parameter.name])
            if parameter.default is parameter.empty
            else (parameter.name, hints[parameter.name], parameter.default)
            for parameter in parameters
        ]
        about = {
            "method": function.__name__,
            "route": route,
            "scope": scope,
            "audited": audited,
            "ids": ids or {},
        }
        kind = msgspec.defstruct(
            function.__name__,
            fields,
            bases=(StoreCall,),
            namespace={
                **about,
                "returns": hints["return"],
                "repeatable": repeatable,
                "__doc__": function.__doc__,
            },
            module=function.__module__,
            frozen=True,
        )

        @functools.wraps(function)
        async def method(store: Any, *args: Any, **given: Any) -> Any:
            return await store.perform(kind(*args, **given))

        setattr(method, _KIND, kind)
        return cast(F, method)

    return decorate


_KIND: Final = "_call"


def calls_of(store: type) -> dict[str, type[StoreCall]]:
    """The calls of a class by method name."""
    return {
        name: getattr(method, _KIND)
        for name, method in vars(store).items()
        if hasattr(method, _KIND)
    }


def named(call: StoreCall) -> StoreCall:
    """The call with all ids that the server would generate, so that it can be repeated without
    doing it twice."""
    given: dict[str, Any] = {
        field: codec.new_id(prefix)
        for field, prefix in call.ids.items()
        if getattr(call, field) is None
    }
    if call.method == "enqueue_many_rollouts":
        requests: Sequence[EnqueueRolloutRequest] = getattr(call, "requests")  # noqa: B009 - it has this field
        given["requests"] = [
            request
            if request.rollout_id is not None
            else msgspec.structs.replace(request, rollout_id=codec.new_id("ro"))
            for request in requests
        ]
    return msgspec.structs.replace(call, **given) if given else call


def path_fields(route: str) -> list[str]:
    """`POST /rollouts/{rollout_id}/cancel` → `["rollout_id"]`."""
    return [part[1:-1] for part in route.split("/") if part.startswith("{")]


class ErrorBody(Noun, frozen=True, kw_only=True, forbid_unknown_fields=False):
    message: str
    type: str = "error"


class ErrorReply(Noun, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The body of every unsuccessful answer."""

    error: ErrorBody
