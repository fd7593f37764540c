"""What a person says of a rollout: a label, a note, and the answer that the agent should have given."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.types import Rollout

ANNOTATION: Final = "annotation"
"""The key of a rollout's metadata that holds it."""


class Annotation(msgspec.Struct, frozen=True, omit_defaults=True):
    """None is what nobody said. `answer` takes the place of the last answer in fine-tuning files."""

    label: str | None = None
    note: str | None = None
    answer: str | None = None


def annotation_of(rollout: Rollout) -> Annotation:
    """What was said of this rollout. InvalidError where its metadata holds something else under that key."""
    try:
        return msgspec.convert(rollout.metadata.get(ANNOTATION, {}), Annotation)
    except msgspec.ValidationError as error:
        raise InvalidError(f"the annotation of rollout {rollout.rollout_id} is malformed: {error}") from None


def annotated(rollout: Rollout, **changes: str | None) -> dict[str, Any]:
    """The rollout's metadata with these parts of its annotation changed; an empty text removes a part."""
    given = {name: text or None for name, text in changes.items() if text is not None}
    annotation = msgspec.to_builtins(msgspec.structs.replace(annotation_of(rollout), **given))
    others = {key: value for key, value in rollout.metadata.items() if key != ANNOTATION}
    return others | ({ANNOTATION: annotation} if annotation else {})
