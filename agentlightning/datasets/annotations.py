"""A person's label, note and corrected answer for a rollout."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.types import Rollout

ANNOTATION: Final = "annotation"
"""The key of a rollout's metadata that holds it."""


class Annotation(msgspec.Struct, frozen=True, omit_defaults=True):
    """None is not given. `answer` replaces the last answer in fine-tuning files."""

    label: str | None = None
    note: str | None = None
    answer: str | None = None


def annotation_of(rollout: Rollout) -> Annotation:
    """This rollout's annotation. InvalidError if its metadata has something else under that key."""
    try:
        return msgspec.convert(rollout.metadata.get(ANNOTATION, {}), Annotation)
    except msgspec.ValidationError as error:
        raise InvalidError(f"the annotation of rollout {rollout.rollout_id} is malformed: {error}") from None


def changed_annotation(**parts: str | None) -> dict[str, Any]:
    """What `update_rollout` merges into the metadata to change these parts; an empty text removes a part."""
    return {ANNOTATION: {name: text or None for name, text in parts.items() if text is not None}}
