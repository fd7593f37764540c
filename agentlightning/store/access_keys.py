"""Keys that were issued, and the log of who used administrative power.

Of a key only a digest is stored. This module knows rows; what a scope opens is decided by the server.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from typing import Any, Final

import msgspec

from agentlightning.errors import InvalidError, NotFoundError
from agentlightning.store import calls, codec, keys, query
from agentlightning.store.attempts import load_standing, touch_worker
from agentlightning.store.calls import AdminCall
from agentlightning.store.database import Connection
from agentlightning.store.tables import KEYS
from agentlightning.store.transaction import Transaction
from agentlightning.types import ApiKey, Filter, IssuedKey

_log: Final = logging.getLogger("agentlightning.audit")

PREFIX: Final = "aglk-"
_LONGEST_DETAIL: Final = 2000  # characters
_LONGEST_NAME: Final = 200  # characters
_LONGEST_LIFETIME: Final = 1e10  # seconds: three centuries, and still a date


def issue(tx: Transaction, call: calls.IssueKey) -> IssuedKey:
    """Make a key; its secret is in the answer and nowhere else."""
    if not call.scopes:
        raise InvalidError("a key without scopes opens nothing; give some of read, worker, grader, trainer, admin")
    if not (1 <= len(call.name) <= _LONGEST_NAME and call.name.isprintable()):
        raise InvalidError(f"the key's name is {call.name[:50]!r}; give 1 to {_LONGEST_NAME} printable characters")
    if call.lifetime_seconds is not None and not 0 < call.lifetime_seconds <= _LONGEST_LIFETIME:
        raise InvalidError(
            f"lifetime_seconds is {call.lifetime_seconds}; it must be positive and at most {_LONGEST_LIFETIME:g}, or "
            "None for no limit"
        )
    api_key = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(
        key_id=codec.new_id("key"),
        name=call.name,
        scopes=tuple(dict.fromkeys(call.scopes)),
        create_time=tx.now,
        expire_time=None if call.lifetime_seconds is None else tx.now + call.lifetime_seconds,
    )
    KEYS.insert(tx.connection, key, digest=digest(api_key))
    return IssuedKey(**msgspec.structs.asdict(key), api_key=api_key)


def issue_for_attempt(tx: Transaction, call: calls.IssueAttemptKey) -> str:
    """A key of one attempt, that may write its rewards or not."""
    load_standing(tx.connection, call.rollout_id, call.attempt_id)
    return keys.sign(tx.secret, call.rollout_id, call.attempt_id, rewards=call.rewards)


def issue_for_worker(tx: Transaction, call: calls.IssueWorkerKey) -> str:
    """The key of one worker."""
    touch_worker(tx, call.worker_id)
    return keys.sign_worker(tx.secret, call.worker_id)


def held_by(connection: Connection, worker_id: str) -> list[tuple[str, str]]:
    """(rollout_id, attempt_id) of the attempts a worker holds: the active ones, else the one that fell silent and that
    its next sign of life will revive."""
    held = connection.execute(
        "SELECT rollout_id, attempt_id FROM attempts WHERE status IN ('preparing', 'running') AND worker_id = ?",
        (worker_id,),
    ).fetchall()
    silent = (
        held
        or connection.execute(
            "SELECT a.rollout_id, a.attempt_id FROM rollouts r JOIN attempts a "
            "ON a.rollout_id = r.rollout_id AND a.sequence_id = r.attempts "
            "WHERE r.status IN ('queuing', 'requeuing') AND a.status = 'unresponsive' AND a.worker_id = ?",
            (worker_id,),
        ).fetchall()
    )
    return [(rollout_id, attempt_id) for rollout_id, attempt_id in silent]


def revoke(tx: Transaction, call: calls.RevokeKey) -> ApiKey:
    """End a key at once and for good; one that has ended stays as it is."""
    tx.connection.execute(
        "UPDATE api_keys SET revoke_time = ? WHERE key_id = ? AND revoke_time IS NULL", (tx.now, call.key_id)
    )
    key = KEYS.one(tx.connection, "WHERE key_id = ?", call.key_id)
    if key is None:
        raise NotFoundError(f"there is no key {call.key_id!r}; `agl keys list` shows those there are")
    tx.changes.keys = True
    return key


def find(connection: Connection, api_key: str) -> ApiKey | None:
    """The key with this secret, also when it has expired or been revoked."""
    return KEYS.one(connection, "WHERE digest = ?", digest(api_key))


def query_keys(tx: Transaction, call: calls.QueryKeys) -> list[ApiKey]:
    return KEYS.all(tx.connection, "ORDER BY create_time, key_id")


def digest(api_key: str) -> str:
    # The key is 32 random bytes: nothing that a slow hash would have to protect.
    return hashlib.sha256(api_key.encode()).hexdigest()


# --- administrative calls ----------------------------------------------------------------------------------------


def log(call: AdminCall[Any]) -> None:
    """A line of who asks for what: without secrets, and without what users wrote, which may be erased to forget it."""
    action, asked = type(call).__name__, msgspec.structs.asdict(call)
    if isinstance(call, calls.ImportRollout):
        counts = {"attempts": len(call.attempts), "spans": len(call.spans)}
        asked = {"rollout_id": call.rollout.rollout_id, **counts}
    elif isinstance(call, calls.DeleteRollouts):
        asked["where"] = _without_texts(call.where)
    asked.pop("actor", None)
    detail = json.dumps(asked, default=msgspec.to_builtins)[:_LONGEST_DETAIL]
    _log.info("%s by %s: %s", action, call.actor, detail, extra={"fields": {"action": action, "actor": call.actor}})


def _without_texts(where: Filter) -> Filter:
    column = query.ROLLOUTS.columns.get(str(where.field))
    if column is not None and column.kind != "json":
        return where
    value = None if where.value is None else "not recorded"
    return msgspec.structs.replace(where, value=value, of=tuple(map(_without_texts, where.of)))
