"""Issued keys, and the audit log of administrative calls.

Only a digest of a key is stored. The server decides what a scope may do.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import InvalidError, NotFoundError
from agentlightning.store import codec, keys
from agentlightning.store.attempts import load_standing, touch_worker
from agentlightning.store.database import Connection, Transaction
from agentlightning.store.tables import KEYS
from agentlightning.types import ApiKey, IssuedKey, KeyScope

PREFIX: Final = "aglk-"
_LONGEST_NAME: Final = 200  # characters
_LONGEST_LIFETIME: Final = 1e10  # seconds: three centuries, and still a date


def issue_key(tx: Transaction, name: str, scopes: Sequence[KeyScope], lifetime_seconds: float | None) -> IssuedKey:
    """Issue a key. Only the answer has its secret."""
    if not scopes:
        raise InvalidError("a key without scopes opens nothing; give some of read, worker, grader, trainer, admin")
    if not (1 <= len(name) <= _LONGEST_NAME and name.isprintable()):
        raise InvalidError(f"the key's name is {name[:50]!r}; give 1 to {_LONGEST_NAME} printable characters")
    if lifetime_seconds is not None and not 0 < lifetime_seconds <= _LONGEST_LIFETIME:
        raise InvalidError(
            f"lifetime_seconds is {lifetime_seconds}; it must be positive and at most {_LONGEST_LIFETIME:g}, or "
            "None for no limit"
        )
    api_key = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(
        key_id=codec.new_id("key"),
        name=name,
        scopes=tuple(dict.fromkeys(scopes)),
        create_time=tx.now,
        expire_time=None if lifetime_seconds is None else tx.now + lifetime_seconds,
    )
    KEYS.insert(tx.connection, key, digest=digest(api_key))
    return IssuedKey(**msgspec.structs.asdict(key), api_key=api_key)


def issue_attempt_key(tx: Transaction, rollout_id: str, attempt_id: str, rewards: bool) -> str:
    """A key of one attempt, with or without the right to write its rewards."""
    load_standing(tx.connection, rollout_id, attempt_id)
    return keys.sign(tx.secret, rollout_id, attempt_id, rewards=rewards)


def issue_worker_key(tx: Transaction, worker_id: str) -> str:
    """The key of one worker."""
    touch_worker(tx, worker_id)
    return keys.sign_worker(tx.secret, worker_id)


def held_by(connection: Connection, worker_id: str) -> list[tuple[str, str]]:
    """(rollout_id, attempt_id) of the attempts that a worker holds: the active ones, or else an unresponsive
    attempt that it can still revive."""
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


def revoke_key(tx: Transaction, key_id: str) -> ApiKey:
    """Revoke a key at once and for good. An ended key stays unchanged."""
    tx.connection.execute(
        "UPDATE api_keys SET revoke_time = ? WHERE key_id = ? AND revoke_time IS NULL", (tx.now, key_id)
    )
    key = KEYS.one(tx.connection, "WHERE key_id = ?", key_id)
    if key is None:
        raise NotFoundError(f"there is no key {key_id!r}; `agl keys list` shows those there are")
    tx.changes.keys = True
    return key


def find(connection: Connection, api_key: str) -> ApiKey | None:
    """The key with this secret, even if it has expired or is revoked."""
    return KEYS.one(connection, "WHERE digest = ?", digest(api_key))


def query_keys(tx: Transaction) -> list[ApiKey]:
    return KEYS.all(tx.connection, "ORDER BY create_time, key_id")


def digest(api_key: str) -> str:
    # The key is 32 random bytes: nothing that a slow hash would have to protect.
    return hashlib.sha256(api_key.encode()).hexdigest()


_log: Final = logging.getLogger("agentlightning.audit")
_LOGGED: Final = {
    *("rollout_id", "attempt_id", "rewards", "unfinished", "scrub", "key_id", "name", "scopes", "lifetime_seconds")
}


def audit(action: str, actor: str, asked: Mapping[str, Any]) -> None:
    """Log who made a call, without secrets and without the user's text, which may have to be deleted."""
    detail = {name: value for name, value in asked.items() if name in _LOGGED}
    fields = {"action": action, "actor": actor}
    _log.info("%s by %s: %s", action, actor, msgspec.json.encode(detail).decode(), extra={"fields": fields})
