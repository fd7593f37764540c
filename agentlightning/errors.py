"""The errors of the package. Each message names what is wrong, what is expected and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class AgentLightningError(Exception):
    """Base of all errors raised on purpose. The command line prints its message without a traceback."""


class ConfigError(AgentLightningError):
    """A setting, path, dataset or argument is wrong."""


class InUseError(ConfigError):
    """Another process holds the store file or the run's directory."""


class NotFoundError(AgentLightningError):
    """No such id in the store (HTTP 404)."""


class ConflictError(AgentLightningError):
    """The current state does not allow the change, such as a new status for a finished rollout (HTTP 409)."""


class OutdatedError(ConflictError):
    """What a process remembers of the store is no longer so; it has to look again."""


class InvalidError(AgentLightningError):
    """A value is malformed, such as a reward of NaN (HTTP 422)."""


class ForbiddenError(AgentLightningError):
    """The key is missing or wrong, or may not do this (HTTP 401 or 403)."""


class UnavailableError(AgentLightningError):
    """The server, store or backend cannot be reached; try again later (HTTP 503)."""


class BackendError(AgentLightningError):
    """A model backend refused or failed a call.

    The agent gets the HTTP `status`, OpenAI's error `code` and, if set, the header Retry-After with `retry_after`.
    """

    def __init__(self, message: str, *, status: int = 502, code: str = "backend_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after: str | None = None


class TrainingError(AgentLightningError):
    """Training cannot continue: the loss is not finite, no rollout has a reward, or the engine failed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not in `known`: `did you mean 'group_size'? Known: …`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    close = close or [other for other in known if "".join(word[:1] for word in other.split("_")) == name]  # lr
    close.sort(key=lambda other: sorted(other) != sorted(name))  # letters swapped first: gpro is grpo, not gspo
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'nothing'}"


def docs_page(name: str) -> Path:
    """The path of a documentation page, in the installed package or in the checkout."""
    package = Path(__file__).parent
    return next(
        (page for page in (package / "docs" / name, package.parent / "docs" / name) if page.is_file()), Path(name)
    )


def imported(module: str, what: str, requirement: str) -> Any:
    """Import an optional module. If it is missing, ConfigError says `what` needs it and which `requirement` to
    install."""
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
    """Check fields of `settings`; None passes. ConfigError for a value below its `least`, not above its `above`, or not
    among its `choices`."""
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
