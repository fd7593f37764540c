"""The errors of the package. Each message names what is wrong, what is expected and what to do."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

# What a setting may be, in words, by the type that it is annotated with.
_WORDS: Final[dict[Any, str]] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    os.PathLike: "a path",
    type(None): "None",
    Mapping: "a mapping",
    Sequence: "a list",
}
_UNCHECKED: Final[tuple[Any, ...]] = (Any, Callable, object)
_WIDE: Final[tuple[Any, ...]] = (os.PathLike, Mapping, Sequence)
_ACCEPTED: Final[dict[Any, tuple[type, ...]]] = {float: (float, int), Sequence: (list, tuple)}


class AgentLightningError(Exception):
    """Base of all errors raised on purpose. The command line prints its message without a
    traceback."""


class ConfigError(AgentLightningError):
    """A setting, path, dataset or argument is wrong."""


class InUseError(ConfigError):
    """Another process holds the store file or the run's directory."""


class NotFoundError(AgentLightningError):
    """No such id in the store (HTTP 404)."""


class ConflictError(AgentLightningError):
    """The current state does not allow the change, such as a new status for a finished rollout
    (HTTP 409)."""


class NotRecordedError(BaseException):
    """An operation must not run again, but its recorded result is not whole. Not an `Exception`,
    which agents pass to their model as the answer of a tool."""


class OutdatedError(ConflictError):
    """A process's memory of the store is outdated; it has to look again."""


class InvalidError(AgentLightningError):
    """A value is malformed, such as a reward of NaN (HTTP 422)."""


class ForbiddenError(AgentLightningError):
    """The key is missing or wrong, or may not do this (HTTP 401 or 403)."""


class UnavailableError(AgentLightningError):
    """The server, store or backend cannot be reached; try again later (HTTP 503)."""


class BackendError(AgentLightningError):
    """A model backend refused or failed a call.

    The agent gets the HTTP `status`, OpenAI's error `code` and, if set, the header Retry-After with
    `retry_after`."""

    def __init__(self, message: str, *, status: int = 502, code: str = "backend_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after: str | None = None


class TrainingError(AgentLightningError):
    """Training cannot continue: the loss is not finite, no rollout has a reward, or the engine
    failed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not in `known`: `did you mean 'group_size'? Known: …`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    # lr
    close = close or [
        other for other in known if "".join(word[:1] for word in other.split("_")) == name
    ]
    # letters swapped first: gpro is grpo, not gspo
    close.sort(key=lambda other: sorted(other) != sorted(name))
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'nothing'}"


def docs_page(name: str) -> Path:
    """The path of a documentation page, in the installed package or in the checkout."""
    package = Path(__file__).parent
    return next(
        (
            page
            for page in (package / "docs" / name, package.parent / "docs" / name)
            if page.is_file()
        ),
        Path(name),
    )


def imported(module: str, what: str, requirement: str) -> Any:
    """Import an optional module. If it is missing, ConfigError says `what` needs it and which
    `requirement` to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs a package that is missing ({error}): pip install '{requirement}'"
        ) from None


def check_settings(
    settings: object,
    *,
    least: Mapping[str, float] = {},
    above: Mapping[str, float] = {},
    choices: Mapping[str, Sequence[str]] = {},
) -> None:
    """Check fields of `settings`; None passes. ConfigError for a value below its `least`, not above
    its `above`, or not among its `choices`; of a dataclass or struct also as in `plain_values`,
    which are set."""
    if dataclasses.is_dataclass(settings):
        names = [field.name for field in dataclasses.fields(settings)]
        _set_plain(settings, names, object.__setattr__)
    elif isinstance(settings, msgspec.Struct):
        _set_plain(settings, settings.__struct_fields__, msgspec.structs.force_setattr)
    given = {
        name: value
        for name in (*least, *above, *choices)
        if (value := getattr(settings, name)) is not None
    }
    for name, value in given.items():
        if name in choices and value not in choices[name]:
            raise ConfigError(f"{name} is {value!r}; known: {', '.join(choices[name])}")
        if name not in choices and not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}; it must be a number")
        if name in least and not value >= least[name]:
            raise ConfigError(f"{name} is {value}; it must be at least {least[name]:g}")
        if name in above and not value > above[name]:
            raise ConfigError(f"{name} is {value}; it must be above {above[name]:g}")


def _set_plain(
    settings: object, names: Iterable[str], set_value: Callable[[Any, str, Any], None]
) -> None:
    for name, value in plain_values(
        type(settings), {name: getattr(settings, name) for name in names}
    ).items():
        if value is not getattr(settings, name):
            set_value(settings, name, value)


def plain_values(annotated: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by name, NumPy's scalars as Python's. `annotated` is the class or function whose
    fields or parameters they are. ConfigError for a value that is of no type of its annotation."""
    kinds = _kinds(annotated)
    plain = dict(values)
    for name, value in values.items():
        if (
            type(value).__module__ == "numpy"
            and hasattr(value, "item")
            and not getattr(value, "ndim", 0)
        ):
            plain[name] = value = value.item()
        accepted = kinds.get(name)
        if accepted is None or any(_is_of(value, kind) for kind in accepted):
            continue
        words = dict.fromkeys(
            _WORDS.get(kind, f"an instance of {kind.__name__}")
            for kind in accepted
            if kind is not type(None)
        )
        raise ConfigError(f"{name} is {value!r}; it must be {' or '.join(words)}")
    return plain


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _ACCEPTED.get(kind) or kind)


@functools.cache
def _kinds(annotated: Any) -> dict[str, tuple[Any, ...] | None]:
    """The types of each field or parameter; None where any value may do, or only a type checker
    knows."""
    homes = reversed(annotated.__mro__) if inspect.isclass(annotated) else [annotated]
    kinds: dict[str, tuple[Any, ...] | None] = {}
    for home in homes:
        names = vars(sys.modules[home.__module__])
        for name, annotation in inspect.get_annotations(home).items():
            try:
                kinds[name] = _flat(
                    eval(annotation, names) if isinstance(annotation, str) else annotation
                )
            except NameError:  # imported for type checkers only
                kinds[name] = None
    return kinds


def _flat(annotation: Any) -> tuple[Any, ...] | None:
    """`int | tuple[str, ...] | None` → `(int, Sequence, NoneType)`; None for what takes anything,
    and for functions. Classes beside a type are accepted too: `Annotated[str, Path]`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        classes = [other for other in annotation.__metadata__ if inspect.isclass(other)]
        return _any_of(annotation.__origin__, *classes)
    if origin in (Union, types.UnionType):
        return _any_of(*get_args(annotation))
    if origin is Literal:
        return tuple(dict.fromkeys(map(type, get_args(annotation))))
    kind = type(None) if annotation is None else origin or annotation
    if not inspect.isclass(kind) or kind in _UNCHECKED or getattr(kind, "_is_protocol", False):
        return None
    for wide in _WIDE:
        if kind is not str and issubclass(kind, wide):
            return (wide,)
    return (kind,)


def _any_of(*annotations: Any) -> tuple[Any, ...] | None:
    parts = [_flat(part) for part in annotations]
    return None if None in parts else tuple(kind for part in parts if part for kind in part)
