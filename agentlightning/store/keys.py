"""API keys of attempts and workers, signed, so that checking one needs no lookup.

An attempt's key is `agl-<ids>.<signature>`, both in URL-safe base64: it names the rollout and
attempt, and whether it may write rewards. A worker's key, `agl-wk-<id>.<signature>`, names the
worker. Only the store's secret can sign them. This module does not know what keys allow."""

from __future__ import annotations

import base64
import hmac
import secrets
from typing import Final, NamedTuple

PREFIX: Final = "agl-"
_REWARDS: Final = "/rewards"
WORKER_PREFIX: Final = f"{PREFIX}wk-"
# signed before a worker's id, and in no attempt's: neither key passes for the other
_OF_WORKER: Final = b"worker\0"


def new_secret() -> bytes:
    """32 random bytes for signing keys."""
    return secrets.token_bytes(32)


class AttemptKey(NamedTuple):
    """The contents of an attempt's key."""

    rollout_id: str
    attempt_id: str
    rewards: bool = False


def sign(secret: bytes, rollout_id: str, attempt_id: str, *, rewards: bool = False) -> str:
    """The API key of one attempt. Ids contain no `/`."""
    ids = f"{rollout_id}/{attempt_id}{_REWARDS if rewards else ''}".encode()
    return f"{PREFIX}{_text(ids)}.{_text(_mac(secret, ids))}"


def verify(secret: bytes, api_key: str) -> AttemptKey | None:
    """The contents of a key signed with `secret`, else None. Takes the same time for all wrong keys
    of this form."""
    claimed = claimed_attempt(api_key)
    if claimed is None:
        return None
    # The key is rebuilt, so that no second spelling of the same signature passes.
    genuine = sign(secret, *claimed[:2], rewards=claimed.rewards)
    return (
        claimed
        if hmac.compare_digest(api_key.encode(errors="surrogatepass"), genuine.encode())
        else None
    )


def claimed_attempt(api_key: str) -> AttemptKey | None:
    """The contents of a key without checking its signature; None for another form, such as a
    placeholder."""
    if not api_key.startswith(PREFIX):
        return None
    try:
        ids = _bytes(api_key.removeprefix(PREFIX).partition(".")[0]).decode()
        rollout_id, attempt_id = ids.removesuffix(_REWARDS).split("/")
    except ValueError:
        return None
    return AttemptKey(rollout_id, attempt_id, ids.endswith(_REWARDS))


def sign_worker(secret: bytes, worker_id: str) -> str:
    """The API key of one worker, for the attempt that it holds."""
    name = worker_id.encode()
    return f"{WORKER_PREFIX}{_text(name)}.{_text(_mac(secret, _OF_WORKER + name))}"


def verify_worker(secret: bytes, api_key: str) -> str | None:
    """The worker of a key signed with `secret`; None for other keys."""
    if not api_key.startswith(WORKER_PREFIX):
        return None
    try:
        worker_id = _bytes(api_key.removeprefix(WORKER_PREFIX).partition(".")[0]).decode()
    except ValueError:
        return None
    genuine = hmac.compare_digest(
        api_key.encode(errors="surrogatepass"),
        sign_worker(secret, worker_id).encode(errors="surrogatepass"),
    )
    return worker_id if genuine else None


def _mac(secret: bytes, ids: bytes) -> bytes:
    return hmac.digest(secret, ids, "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
