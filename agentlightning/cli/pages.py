"""Which page of the documentation helps with which error, and where that page is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from agentlightning.cli.main import COMMANDS
from agentlightning.errors import (
    BackendError,
    ForbiddenError,
    InUseError,
    TrainingError,
    UnavailableError,
)

# What went wrong, or else the command that it went wrong in, in as many words as tell it apart → page, without `.md`.
OF_ERRORS: Final[dict[type[Exception], str]] = {
    InUseError: "store",
    ForbiddenError: "security",
    UnavailableError: "deploying",
    BackendError: "backends",
    TrainingError: "tracking#when-training-comes-apart",
    ModuleNotFoundError: "install",
}


def page_of(error: Exception, command: Sequence[str]) -> str | None:
    """Where a person reads on about an error of `command`, such as `("store", "delete")`, or None."""
    by_error = (OF_ERRORS[kind] for kind in type(error).__mro__ if kind in OF_ERRORS)
    page = next(by_error, None) or COMMANDS.get(next(iter(command), ""), ("", None))[1]
    return None if page is None else address_of(page)


def address_of(page: str) -> str:
    """`upkeep#backup` → its URL where the project has published its documentation, else the file."""
    name, _, heading = page.partition("#")
    try:
        urls = metadata.metadata("agent-lightning-next").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    published = next((url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")), None)
    if published:
        return f"{published.rstrip('/')}/{name}/{heading and f'#{heading}'}"
    source = Path(__file__).parents[2] / "docs" / f"{name}.md"
    return f"{source if source.is_file() else f'docs/{name}.md'}{heading and f'#{heading}'}"
