"""Who may do what: the admin key opens everything, an issued key what its scopes say in its project, an attempt's key
only its own attempt's spans.

This module knows keys and scopes. It does not know routes or what they do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from agentlightning.errors import ConflictError, ForbiddenError, NotFoundError, UnavailableError
from agentlightning.gateway.attribution import api_key_of
from agentlightning.gateway.locality import why_elsewhere
from agentlightning.semconv import CALL, REWARD
from agentlightning.server.sessions import Sessions
from agentlightning.store import calls
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import AdminCall, Call
from agentlightning.tracing.dialects import speaks_for_gateway
from agentlightning.types import DEFAULT_PROJECT, UNATTRIBUTED, Credential, EnqueueRolloutRequest, KeyScope, Span

C = TypeVar("C", bound=Call[Any])

_SCOPES: Final[tuple[KeyScope, ...]] = ("read", "grader", "worker", "trainer", "admin")
"""A key of each may call what those before it may. A grader reads, and writes spans with rewards."""

_NAMES: Final = ("rollout_id", "run_id", "group_id", "resources_id", "parent_id")
_MAKES: Final[Mapping[type[msgspec.Struct], str]] = {
    EnqueueRolloutRequest: "rollout_id",
    calls.StartRun: "run_id",
    calls.CreateGroup: "group_id",
    calls.AddResources: "resources_id",
}
"""The one id of a call that may be new, as it names what the call makes; all others must be in the caller's project."""

_LOOKED_INTO: Final = (
    calls.EnqueueRollouts,
    calls.StartRollout,
    calls.AddSpans,
    calls.WaitForRollouts,
    calls.UpdateWorker,
    calls.IssueWorkerKey,
    calls.GetTime,  # of no project
)


def is_of_one_project(kind: type[Call[Any]]) -> bool:
    """Whether a call can be kept to one project; others concern several, and are closed to the keys of one."""
    return kind in _LOOKED_INTO or any(name in kind.__struct_fields__ for name in ("project", *_NAMES))


class UnauthenticatedError(ForbiddenError):
    """No key, or one that nobody issued (HTTP 401)."""


ATTEMPT_BYTES: Final = 16 << 20  # of spans in a request; one of many small parts takes a hundred times that to read


@dataclass(frozen=True)
class Scope:
    """What a caller may touch. `attempt` is (rollout_id, attempt_id) of an attempt's own key."""

    name: str = "this machine"
    opens: frozenset[KeyScope] = frozenset(_SCOPES)
    project: str | None = None
    attempt: tuple[str, str] | None = None
    rewards: bool = True

    @classmethod
    def of(cls, credential: Credential) -> Scope:
        opens = frozenset(_SCOPES[: 1 + max((_SCOPES.index(scope) for scope in credential.scopes), default=-1)])
        rewards = credential.attempt is None or credential.rewards
        return cls(credential.name, opens, credential.project, credential.attempt, rewards)

    def require(self, kind: type[Call[Any]]) -> None:
        """ForbiddenError unless the caller may make calls of this kind."""
        if self.attempt is not None:
            if kind is not calls.AddSpans:
                raise ForbiddenError("an attempt's key can only add spans to its own attempt; this needs another key")
        elif kind.scope not in self.opens:
            raise ForbiddenError(f"{kind.__name__} needs a key with the scope {kind.scope!r}; {self.name} has not")
        elif self.project is not None and not is_of_one_project(kind):
            raise ForbiddenError(f"{kind.__name__} concerns all projects, and the key {self.name} is of one")

    def body_limit(self, limit: int) -> int:
        """Of the `limit` on a request's bytes, how much this caller may send: an agent, who is not trusted, less."""
        return limit if self.attempt is None else min(limit, ATTEMPT_BYTES)

    @property
    def is_admin(self) -> bool:
        """Whether the caller may touch everything."""
        return self.attempt is None and self.project is None and "admin" in self.opens

    def require_admin(self) -> None:
        if not self.is_admin:
            raise ForbiddenError(f"this needs an admin key of the whole store; {self.name} is not one")

    def refuses(self, span: Span) -> str | None:
        """Why the caller may not add a span with this content, or None: an attempt's key does not speak for the
        gateway, and gives rewards only if it was issued to."""
        if self.attempt is not None and speaks_for_gateway(span):
            return (
                f"span {span.span_id} holds what only the gateway records; leave out `tokens` (token ids) and names "
                f"that begin with {CALL}"
            )
        if not self.rewards and (span.name == REWARD or any(name.startswith(_REWARDS) for name in span.attributes)):
            return (
                f"span {span.span_id} holds a reward, which an agent's own key cannot give; use a grader's key, or "
                "one issued for the attempt with rewards=True"
            )
        return None

    def require_spans(self, spans: Iterable[Span]) -> None:
        """ForbiddenError if a span belongs to an attempt that the caller may not touch, or says what it may not."""
        for span in spans:
            if self.attempt is not None and (span.rollout_id, span.attempt_id) != self.attempt:
                raise ForbiddenError(
                    f"this key is for attempt {self.attempt[1]} of rollout {self.attempt[0]}; span {span.span_id} "
                    f"names attempt {span.attempt_id} of rollout {span.rollout_id}"
                )
            if reason := self.refuses(span):
                raise ForbiddenError(reason)


_REWARDS: Final = f"{REWARD}."


class Access:
    """Reads a caller's scope from the headers. Without an `admin_key` every program of this machine is trusted, except
    that an issued or an attempt's key keeps its narrow scope, and that another site's page in a browser of this machine
    is not."""

    def __init__(self, store: LightningStore, admin_key: str | None) -> None:
        self._store = store
        self._admin_key = None if admin_key is None else _digest(admin_key)
        self.sessions = Sessions()
        self._projects: dict[str, str] = {}  # of runs, which never change theirs

    async def scope(self, headers: Mapping[str, str]) -> Scope:
        """UnauthenticatedError if a key is needed and the caller has none that is valid, ForbiddenError if none is and
        the caller is not of this machine."""
        key = api_key_of(headers) or self.sessions.key_of(headers)
        # Digests are compared: they are of one length, so that not even the key's length shows in the time it takes.
        if key and self._admin_key is not None and hmac.compare_digest(_digest(key), self._admin_key):
            return Scope("the admin key")
        credential = await self._store.perform(calls.FindKey(api_key=key)) if key else None
        if credential is not None:
            return Scope.of(credential)
        if self._admin_key is None:
            if (reason := why_elsewhere(headers)) is not None:
                raise ForbiddenError(reason)
            return Scope()
        raise UnauthenticatedError(
            "the key is not valid here; send one of this server's keys as `Authorization: Bearer …` (`agl`: AGL_KEY)"
            if key
            else "this server needs a key; send it as `Authorization: Bearer …` (`agl` takes it from AGL_KEY)"
        )

    async def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Who the caller is, if their key is valid; nobody else's name can be had by inventing keys."""
        try:
            scope = await self.scope(headers)
        except ConflictError:  # of a worker that holds no attempt, or several
            return _digest(api_key_of(headers) or self.sessions.key_of(headers) or "").hex()
        except (ForbiddenError, UnavailableError):
            return None
        return None if scope == Scope() else scope.name

    async def confine(self, scope: Scope, call: C) -> C:
        """The call as this caller may make it: within its project, and under its name. ForbiddenError if it reaches
        outside."""
        if isinstance(call, calls.AddSpans):
            scope.require_spans(call.spans)
        if isinstance(call, AdminCall):
            call = msgspec.structs.replace(call, actor=scope.name)
        if scope.project is None:
            return call
        if "project" in call.__struct_fields__:
            _check_project(scope, getattr(call, "project", None))
            call = msgspec.structs.replace(call, project=scope.project)
        if "worker_id" in call.__struct_fields__:
            call = msgspec.structs.replace(call, worker_id=_worker_in(scope.project, getattr(call, "worker_id", None)))
        match call:
            case calls.EnqueueRollouts():
                requests = [await self._confined(scope, request) for request in call.requests]
                call = msgspec.structs.replace(call, requests=requests)
            case calls.StartRollout():
                call = msgspec.structs.replace(call, request=await self._confined(scope, call.request))
            case calls.AddSpans():
                for rollout_id in {span.rollout_id for span in call.spans}:
                    await self._check_name(scope, "rollout_id", rollout_id)
            case calls.WaitForRollouts():
                for rollout_id in dict.fromkeys(call.rollout_ids):  # said a million times it is looked up once
                    await self._check_name(scope, "rollout_id", rollout_id)
            case calls.CreateGroup(run_id=None):
                raise ForbiddenError(f"{scope.name} is a key of one project: give the group a run_id of that project")
            case _:
                pass
        await self._check_names(scope, call)
        return call

    async def _confined(self, scope: Scope, request: EnqueueRolloutRequest) -> EnqueueRolloutRequest:
        _check_project(scope, request.project)
        await self._check_names(scope, request)
        return msgspec.structs.replace(request, project=scope.project)

    async def _check_names(self, scope: Scope, one: msgspec.Struct) -> None:
        for field in _NAMES:
            value = getattr(one, field, None)
            if value is not None:
                await self._check_name(scope, field, value, may_be_new=_MAKES.get(type(one)) == field)

    async def _check_name(self, scope: Scope, field: str, value: str, *, may_be_new: bool = False) -> None:
        """NotFoundError for an id that is not of the caller's project, and the same for one that is nowhere: which ids
        other projects use is not this caller's business."""
        project = await self._project_of(field, value)
        if project != scope.project and not (project is None and may_be_new):
            raise NotFoundError(f"there is no {field} {value!r} in project {scope.project}, all that this key reaches")

    async def _project_of(self, field: str, value: str) -> str | None:
        """The project of what an id names, "" for what belongs to none; None if it names nothing yet."""
        match field:
            case "rollout_id":
                if value == UNATTRIBUTED:  # also before the store has made it
                    return DEFAULT_PROJECT
                found = await self._store.get_rollout_by_id(value)
            case "run_id":
                if value not in self._projects:
                    self._projects |= {run.run_id: run.project for run in await self._store.query_runs()}
                return self._projects.get(value)
            case "group_id":
                group = await self._store.get_group(value)
                if group is None:
                    return None
                return "" if group.run_id is None else await self._project_of("run_id", group.run_id)
            case _:
                found = await self._store.get_resources_by_id(value)
        return None if found is None else found.project


def _check_project(scope: Scope, project: str | None) -> None:
    if project not in (None, scope.project):
        raise NotFoundError(f"there is no project {project!r} for {scope.name}, which is a key of {scope.project}")


def _worker_in(project: str, worker_id: str | None) -> str | None:
    """A worker's name under a project's key, `project/worker`: workers of other projects cannot be seen or moved by
    guessing theirs."""
    if not worker_id or worker_id.startswith(f"{project}/"):
        return worker_id
    return f"{project}/{worker_id}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
