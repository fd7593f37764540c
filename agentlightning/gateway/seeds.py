"""Seeds of calls and choices: pure functions of names, so that sampling noise never depends on timing."""

from __future__ import annotations

import hashlib


def call_seed(run_seed: int, sample: str, call_index: int) -> int:
    """The seed of call `call_index` of the rollout known as `sample` in its run, a 63-bit integer."""
    return _hashed("call", run_seed, sample, call_index)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a call's `n` choices; the first samples with the call's own seed."""
    return seed if choice == 0 else _hashed("choice", seed, choice)


def _hashed(*parts: str | int) -> int:
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
