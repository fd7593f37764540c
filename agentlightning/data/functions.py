"""Functions of yours, and ours by name: found, checked by their parameters, and called with what
these name.

A function takes any of the arguments of its role by naming them, in any order. Its other parameters
are its options: they have a default, or are given by name. This module does not know what the
functions compute."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin

from agentlightning.data.references import is_reference, load_reference
from agentlightning.errors import AgentLightningError, ConfigError, nearest, plain_values

TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "returns": ("reward", "transitions", "group"),
    "baseline": ("returns", "values", "terms", "weights"),
    "loss": ("logprobs", "old_logprobs", "advantages", "transitions", "tokens"),
    "aggregation": ("tokens", "length"),
    "token_weights": ("transitions",),
    "correction": ("behaviour", "proximal", "present", "transitions"),
    "curriculum": ("tasks", "epoch"),
}
"""The arguments of each role."""


def find_function(
    role: str,
    given: Any,
    known: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Any] = {},
) -> Callable[..., Any]:
    """The function `given`, or named by it: one of `known`, or a reference. ConfigError if there is
    no such function, nothing fills one of its parameters, or it does not take these options.

    An option is checked against its annotation: a type, a `Literal`, or
    `Annotated[float, (low, high)]`."""
    function = given
    if isinstance(given, str):
        if given not in known and not is_reference(given):
            hint = nearest(given, known) if known else "give a function"
            raise ConfigError(f"{role} {given!r} is unknown; {hint}, or file.py:function")
        function = known[given] if given in known else load_reference(given)
    if not callable(function):
        names = f"one of {', '.join(known)}, or " if known else ""
        raise ConfigError(f"{role} is {given!r}; give {names}a function, or file.py:function")
    what = f"{role} {function_name(function, known)!r}"
    check_parameters(what, function, TAKES[role], options)
    if options:
        _check_values(unwrapped(function), plain_values(unwrapped(function), options))
    return function


def read_function(
    role: str, given: Any, known: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Like `find_function`; `given` may also be {name: …, option: value}."""
    if not isinstance(given, Mapping):
        return find_function(role, given, known)
    options = dict(cast("Mapping[str, Any]", given))
    function = find_function(role, options.pop("name", None), known, options)
    return functools.partial(function, **options)


def check_parameters(
    what: str,
    function: Callable[..., Any],
    filled: tuple[str, ...],
    options: Mapping[str, Any] = {},
) -> None:
    """ConfigError, which calls the function `what`, if it does not take one of the options, or has
    a parameter that is neither `filled` nor optional nor given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"{what} does not say what it takes: write it with `def`") from None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    optional = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    ]
    for name in options:
        if not takes_any and name not in optional:
            hint = nearest(name, optional) if optional else "it has none"
            raise ConfigError(f"{what} has no option {name!r}; {hint}")
    for parameter in parameters:
        given = parameter.default is not parameter.empty or parameter.name in options
        if given or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_name = parameter.kind is not parameter.POSITIONAL_ONLY
        if by_name and parameter.name in filled:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            raise ConfigError(f"{what} needs the option {parameter.name!r}")
        raise ConfigError(
            f"{what} has the parameter {parameter.name!r}, which nothing fills: "
            f"{nearest(parameter.name, filled)}"
        )


def _check_values(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """ConfigError for an option that is not one of its `Literal`, or out of its range."""
    annotations = cast("Mapping[str, Any]", inspect.get_annotations(function))
    for name, value in options.items():
        hint = annotations.get(name)
        if isinstance(hint, str):
            with suppress(NameError):  # known to type checkers alone
                hint = eval(hint, getattr(function, "__globals__", {}))
        if get_origin(hint) is Literal and value not in get_args(hint):
            known = ", ".join(map(str, get_args(hint)))
            raise ConfigError(f"{name} is {value!r}; known: {known}")
        if get_origin(hint) is Annotated and isinstance(bounds := get_args(hint)[1], tuple):
            low, high = cast("tuple[float, float]", bounds)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it lies between {low:g} and {high:g}")


def takes(function: Callable[..., Any], *names: str) -> bool:
    """Whether the function has all these parameters."""
    return set(names) <= inspect.signature(function).parameters.keys()


def call(what: str, function: Callable[..., Any], **given: Any) -> Any:
    """The result of the function with those of the arguments that its parameters name; what is
    None is left to its default. ConfigError, which calls it `what` and names the line, if a
    function of yours fails."""
    named = inspect.signature(function).parameters
    arguments = {
        name: value for name, value in given.items() if name in named and value is not None
    }
    try:
        return function(**arguments)
    except Exception as error:
        if is_ours(function) or isinstance(error, AgentLightningError):
            raise
        frame = traceback.extract_tb(error.__traceback__)[:2][-1]
        place = f"{frame.filename}:{frame.lineno}"
        raise ConfigError(f"{what} failed: {type(error).__name__}: {error} ({place})") from error


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether the function is built in."""
    return str(getattr(unwrapped(function), "__module__", "")).startswith("agentlightning.")


def unwrapped(function: Any) -> Any:
    """The function without the options that `functools.partial` gives it."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: Callable[..., Any], known: Mapping[str, Callable[..., Any]]) -> str:
    """The function's name for messages: its name in `known`, or its own."""
    function = unwrapped(function)
    named = (name for name, entry in known.items() if entry is function)
    return next(named, getattr(function, "__name__", repr(function)))
