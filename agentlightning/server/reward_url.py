"""The reward URL of an attempt: `POST /rewards/KEY` with a line of JSON. The key in the path is all
that authorises it, and names the attempt."""

from __future__ import annotations

import hashlib
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import ForbiddenError, InvalidError
from agentlightning.semconv import ANNOTATION, REWARD_POSTED
from agentlightning.server.access import UnauthenticatedError
from agentlightning.server.request_log import note_caller
from agentlightning.server.requests import in_json, receive_body, refusal
from agentlightning.store.base import LightningStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.rewards import parse_reward, reward_attributes

_LONGEST: Final = 64 * 1024  # bytes


def reward_route(store: LightningStore) -> Route:
    """The route over one store. A body that is no reward is answered 400 with what to send; a
    request that repeats an `Idempotency-Key` counts once."""

    async def give(request: Request) -> Response:
        key = request.path_params["key"]
        rollout_id, attempt_id = await _attempt_of(store, request, key)
        try:
            given = parse_reward(await receive_body(request.receive, _LONGEST))
        except InvalidError as error:
            return refusal(400, "invalid", str(error))
        tracer = AttemptTracer(rollout_id, attempt_id)
        now = time.time()
        repeated = request.headers.get("idempotency-key")
        tracer.record(
            ANNOTATION,
            {**reward_attributes(*given), REWARD_POSTED: True},
            start_time=now,
            end_time=now,
            # Of the key as well: an agent that can guess the header could otherwise take the
            # reward's place.
            span_id=None
            if repeated is None
            else hashlib.sha256(f"{key} {repeated}".encode()).hexdigest()[:16],
        )
        await store.store_spans(tracer.drain())
        return in_json(given._asdict())

    return Route("/rewards/{key}", give, methods=["POST"])


async def _attempt_of(store: LightningStore, request: Request, key: str) -> tuple[str, str]:
    """Whose rewards the key in the path gives; UnauthenticatedError, or ForbiddenError for a key of
    another kind."""
    credential = await store.find_key(key)
    if credential is None:
        raise UnauthenticatedError(
            "this URL holds no key of this server; post to $AGL_REWARD_URL unchanged"
        )
    note_caller(request.scope, credential.name)
    if credential.attempt is None or not credential.rewards:
        raise ForbiddenError(
            f"{credential.name} cannot give rewards at this URL; use the reward key that an "
            "attempt is leased with ($AGL_REWARD_URL), or post the spans of a grader"
        )
    return credential.attempt
