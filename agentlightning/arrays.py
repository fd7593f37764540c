"""Token ids and logprobs in their one form, from the choice that samples them to the transition
that trains them: arrays of int32 and of float32.

NumPy, hashes and databases read their memory as it is. An agent's environment needs no NumPy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.errors import InvalidError

if TYPE_CHECKING:
    TokenIds = array[int]
    Logprobs = array[float]
else:  # msgspec decodes what has come as lists; the nouns make arrays of these
    TokenIds = Sequence[int]
    Logprobs = Sequence[float]


def int32(values: Iterable[int] = ()) -> TokenIds:
    """Token ids as an array, which stays as it is; bytes are those of one. InvalidError for ids of
    more than 32 bits."""
    return _array("i", values)


def float32(values: Iterable[float] = ()) -> Logprobs:
    """Logprobs as an array, each the nearest number, in the same way."""
    return _array("f", values)


def plain(value: object) -> list[Any]:
    """The `enc_hook` with which msgspec encodes arrays."""
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be encoded")


def _array(kind: str, values: Iterable[Any]) -> array[Any]:
    if isinstance(values, array):
        return values
    try:
        return array(kind, values)
    except (OverflowError, TypeError) as error:
        raise InvalidError(
            f"token ids must fit 32 bits and logprobs must be numbers: {error}"
        ) from None
