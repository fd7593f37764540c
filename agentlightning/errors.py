"""Every error a user can meet, typed. Each message names what was wrong, what was expected and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class AgentLightningError(Exception):
    """Base of all errors raised on purpose. The command line prints its message without a traceback."""


class ConfigError(AgentLightningError):
    """A setting, path, dataset or argument cannot be used as given."""


class InUseError(ConfigError):
    """Another process holds the store file or the run's directory."""


class NotFoundError(AgentLightningError):
    """An id names nothing in the store (HTTP 404)."""


class ConflictError(AgentLightningError):
    """The change is not allowed in the present state, such as moving a terminal rollout (HTTP 409)."""


class InvalidError(AgentLightningError):
    """The value itself is malformed, such as a reward of NaN (HTTP 422)."""


class ForbiddenError(AgentLightningError):
    """The key is missing, wrong, or does not cover what was asked (HTTP 401 or 403)."""


class UnavailableError(AgentLightningError):
    """The server, store or backend cannot be reached; trying again later may help (HTTP 503)."""


class BackendError(AgentLightningError):
    """A model backend refused or failed a call.

    `status` is the HTTP status for the agent; `code` is the machine-readable OpenAI error code; `retry_after` tells
    the agent when to ask again.
    """

    def __init__(self, message: str, *, status: int = 502, code: str = "backend_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after: str | None = None


class TrainingError(AgentLightningError):
    """Training cannot go on: a loss that is not finite, no rewarded rollout, an engine that fails."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A ready-made hint: `did you mean 'group_size'? Known: …`, for a name that is not in `known`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    close.sort(key=lambda other: sorted(other) != sorted(name))  # letters swapped first: gpro is grpo, not gspo
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'nothing'}"


def docs_page(name: str) -> Path:
    """Where a page of the documentation lies: in the installed package, or in the checkout."""
    package = Path(__file__).parent
    return next(
        (page for page in (package / "docs" / name, package.parent / "docs" / name) if page.is_file()), Path(name)
    )


def imported(module: str, what: str, requirement: str) -> Any:
    """A module that need not be there. ConfigError says `what` needs it and which `requirement` of pip brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs a package that is missing ({error}): pip install '{requirement}'") from None


def check_settings(
    settings: object,
    *,
    least: Mapping[str, float] = {},
    above: Mapping[str, float] = {},
    choices: Mapping[str, Sequence[str]] = {},
) -> None:
    """ConfigError unless each setting that is named has at least, or is above, its number, or is one of its choices.
    What is None is not looked at."""
    given = {name: value for name in (*least, *above, *choices) if (value := getattr(settings, name)) is not None}
    for name, value in given.items():
        if name in choices and value not in choices[name]:
            raise ConfigError(f"{name} is {value!r}; known: {', '.join(choices[name])}")
        if name not in choices and not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}; it must be a number")
        if name in least and not value >= least[name]:
            raise ConfigError(f"{name} is {value}; it must be at least {least[name]:g}")
        if name in above and not value > above[name]:
            raise ConfigError(f"{name} is {value}; it must be above {above[name]:g}")
