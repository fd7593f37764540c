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


def annotated(rollout: Rollout, **changes: str | None) -> dict[str, Any]:
    """The rollout's metadata with these parts of the annotation changed; an empty text removes a part."""
    given = {name: text or None for name, text in changes.items() if text is not None}
    annotation = msgspec.to_builtins(msgspec.structs.replace(annotation_of(rollout), **given))
    others = {key: value for key, value in rollout.metadata.items() if key != ANNOTATION}
    return others | ({ANNOTATION: annotation} if annotation else {})
