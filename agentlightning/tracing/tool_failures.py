"""Tells whether a tool failed: by its span's status, the fields of its result, or its first words.

docs/tasks.md lists what counts."""

from __future__ import annotations

import re
from typing import Any, Final

from agentlightning.tracing.dialects import content_of, result_of, unwrapped
from agentlightning.types import Span

# docs/tasks.md has the list. A user's own pattern replaces the words that an answer begins with.
_READ: Final = 2000  # characters of an answer


_ENDS_AS_A_FAILURE: Final = "Fix the errors and try again."  # pydantic-ai's, before version 2


_FAILED: Final = ("error", "failed", "failure", "timeout")


_WORDS: Final = r"""
    \W{0,4} (?:
        (?: (?: an? | the | tool | call | command | query | request | connection | network | server
              | internal | runtime | execution | validation | syntax | api | http | sql | fatal
              | unexpected | unknown | [45]\d\d ) [ ] ){0,4}
        (?: (?: error | exception | failure | failed ) (?: \W{0,3} $ | [ ]?[:!(\[\]] | [ ]-
              | [ ] (?: \d | code | occurred | executing | calling | running | invoking | using
                      | while | when | during | processing | parsing | reading | opening | fetching
                      | connecting | in | to | with | after ) \b )
          | timed?[ ]?out (?: \W{0,3} $ | [ ]?: (?![ ]?\d)
              | [ ] (?: after | while | waiting | expired | exceeded ) ) )
      | (?-i: [\w.]{0,80} (?: Error | Exception | Timeout ) (?: $ | [:(] ) )
      | Traceback[ ]\(most[ ]recent[ ]call
      | HTTP (?: /[\d.]{1,3} )? [ ] (?: status[ ] )? (?: code[ ] )? [45]\d\d \b
      | [45]\d\d [ ] (?: bad[ ]request | unauthorized | forbidden | not[ ]found | too[ ]many
                        | service | bad[ ]gateway )
      | (?: unknown | no[ ]such | invalid ) [ ] (?: tool | function | command | argument ) s? \b
      | tool [ ] \S{1,80} [ ] (?: is[ ] | was[ ] )? not[ ] (?: found | available )
      | permission[ ]denied
      | I[ ]encountered[ ]an[ ]error
    )
"""


_BEGINS_AS_A_FAILURE: Final = re.compile(_WORDS, re.IGNORECASE | re.VERBOSE)


def tool_failed(span: Span, pattern: str | None = None) -> bool:
    """Whether this span says that the tool failed; UNSET is success."""
    return (
        span.status.status_code == "ERROR"
        or "error.type" in span.attributes
        or any(event.name == "exception" for event in span.events)
        or says_failure(result_of(span), pattern)
    )


def says_failure(result: object, pattern: str | None = None) -> bool:
    """Whether what a tool answered is a failure: by the fields of a JSON object, or else by its
    first words; with a `pattern`, where that is found in it instead."""
    text = (content_of(result) or "") if isinstance(result, str) else ""
    if _reports_failure(unwrapped(result)) or (
        text != result and _reports_failure(unwrapped(text))
    ):
        return True
    if pattern:
        return bool(re.search(pattern, text[:_READ]))
    return bool(_BEGINS_AS_A_FAILURE.match(text[:_READ])) or text.endswith(_ENDS_AS_A_FAILURE)


def _reports_failure(body: dict[str, Any]) -> bool:
    if True in (body.get("is_error"), body.get("isError")) or body.get("status") in _FAILED:
        return True
    if any(
        type(body.get(name)) is int and 400 <= body[name] < 600
        for name in ("status", "status_code", "statusCode")
    ):
        return True
    if any(
        type(body.get(name)) is int and body[name] != 0
        for name in ("exit_code", "exitCode", "returncode")
    ):
        return True
    if any(type(body.get(name)) is bool for name in ("success", "ok")):
        return False in (body.get("success"), body.get("ok"))
    errors = [body.get(name) for name in ("error", "errors", "exception")]
    return any(
        error is True or (isinstance(error, str | list | dict) and len(error) > 0)
        for error in errors
    )
