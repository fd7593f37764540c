"""API keys of attempts: signed, so that checking one needs no lookup.

A key is `agl-<ids>.<signature>`, both in URL-safe base64: it says which rollout and attempt its holder is and whether
it may write rewards, and only the store's secret could have signed it. This module does not know what that allows.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from typing import Final, NamedTuple

PREFIX: Final = "agl-"
_REWARDS: Final = "/rewards"


def new_secret() -> bytes:
    """32 random bytes to sign keys with."""
    return secrets.token_bytes(32)


class AttemptKey(NamedTuple):
    """What a key says of its holder."""

    rollout_id: str
    attempt_id: str
    rewards: bool = False


def sign(secret: bytes, rollout_id: str, attempt_id: str, *, rewards: bool = False) -> str:
    """The API key of one attempt. Ids contain no `/`."""
    ids = f"{rollout_id}/{attempt_id}{_REWARDS if rewards else ''}".encode()
    return f"{PREFIX}{_text(ids)}.{_text(_mac(secret, ids))}"


def verify(secret: bytes, api_key: str) -> AttemptKey | None:
    """What a key says that `secret` signed, else None. Takes the same time for any wrong key."""
    head, _, signature = api_key.removeprefix(PREFIX).partition(".")
    try:
        ids, given = _bytes(head), _bytes(signature)
        text = ids.decode()
        rollout_id, attempt_id = text.removesuffix(_REWARDS).split("/")
    except ValueError:
        return None
    holder = AttemptKey(rollout_id, attempt_id, text.endswith(_REWARDS))
    # The key is rebuilt, so that no second spelling of the same signature passes.
    again = sign(secret, rollout_id, attempt_id, rewards=holder.rewards)
    genuine = hmac.compare_digest(given, _mac(secret, ids)) and hmac.compare_digest(api_key.encode(), again.encode())
    return holder if genuine else None


def _mac(secret: bytes, ids: bytes) -> bytes:
    return hmac.digest(secret, ids, "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
