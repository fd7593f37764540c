"""Agents: a decorated function, or a subclass of `LitAgent`, that takes a task and resources and
returns a reward."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

from agentlightning.data.references import load_reference
from agentlightning.errors import ConfigError, nearest
from agentlightning.tracing.context import AttemptTracer, require_binding
from agentlightning.types import LLM, AttemptedRollout, Mode, NamedResources, PromptTemplate, Span

TaskT = TypeVar("TaskT")
P = ParamSpec("P")
R = TypeVar("R")
ResourceT = TypeVar("ResourceT", LLM, PromptTemplate)

# A reward, alone or named ones; nothing (the reward was emitted, or there is none); or spans made
# by hand.
RolloutRawResult: TypeAlias = float | Mapping[str, Any] | list[Span] | None
EntryPoint: TypeAlias = Callable[[Any, NamedResources, AttemptedRollout], Any]

_PICKED: dict[str, type[Any]] = {"llm": LLM, "prompt_template": PromptTemplate}
INJECTED = (*_PICKED, "resources", "rollout")
_METHODS = tuple(
    f"{name}{way}"
    for name in ("rollout", "training_rollout", "validation_rollout")
    for way in ("_async", "")
)


# bytes of an attribute when pickled; a larger one is shared by rollouts
LARGEST_COPIED: Final = 1 << 20


class LitAgent(Generic[TaskT]):
    """Base class of agents. Override `rollout` or `rollout_async`, or the pair of methods for
    training and validation.

    Train mode calls the first of `training_rollout_async`, `training_rollout`, `rollout_async` and
    `rollout` that your class defines; val and test mode look for the `validation_` methods first.
    Sync methods run in a thread of their own, async ones in the runner's event loop. Each rollout
    runs on a copy of the agent."""

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            warnings.warn(
                "trained_agents selects nothing; give the algorithm agents=…", DeprecationWarning, 2
            )

    @property
    def tracer(self) -> AttemptTracer:
        """The tracer of the attempt that the running code belongs to. ConfigError outside a
        rollout."""
        return require_binding("the agent's tracer").tracer

    def rollout(
        self, task: TaskT, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run the agent on one task and return its reward. `resources` belong to this attempt: give
        an OpenAI client `resources["llm"].endpoint` and `.api_key`."""
        raise _undefined(self, "rollout")

    async def rollout_async(
        self, task: TaskT, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Like `rollout`, in the runner's event loop."""
        raise _undefined(self, "rollout_async")

    def training_rollout(
        self, task: TaskT, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Like `rollout`, for train mode only."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: TaskT, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Like `rollout_async`, for train mode only."""
        return await self.rollout_async(task, resources, rollout)

    def validation_rollout(
        self, task: TaskT, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Like `rollout`, for val and test mode."""
        return self.rollout(task, resources, rollout)

    async def validation_rollout_async(
        self, task: TaskT, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Like `rollout_async`, for val and test mode."""
        return await self.rollout_async(task, resources, rollout)

    def check(self) -> None:
        """ConfigError if the agent defines no rollout method."""
        if not any(map(self._defines, _METHODS)):
            raise _undefined(self, " or ".join(_METHODS))

    def reads_environment(self) -> bool:
        """Whether the agent can only find its model in the environment, because it takes neither
        `llm` nor `resources`."""
        return False

    def takes_prompts(self) -> bool:
        """Whether it is given prompt templates."""
        return True

    def own_copy(self) -> LitAgent[Any]:
        """The agent for one rollout: what it keeps on `self` (a client, a history) belongs to that
        rollout alone.

        Attributes are copied by `copy.deepcopy`. Those that cannot be pickled (a lock, an open
        connection) or are larger than `LARGEST_COPIED` are shared by all rollouts, and so is what
        limits several tasks (asyncio's)."""
        own = copy.copy(self)
        memo: dict[int, Any] = {id(self): own}
        vars(own).update({name: _own(value, memo) for name, value in vars(self).items()})
        return own

    def entry_point(self, mode: Mode) -> EntryPoint:
        """The method that runs a rollout of `mode`. ConfigError if there is none."""
        special = "training_rollout" if mode == "train" else "validation_rollout"
        for name in (f"{special}_async", special, "rollout_async", "rollout"):
            if self._defines(name):
                return cast(EntryPoint, getattr(self, name))
        raise _undefined(self, f"rollout, rollout_async, {special} or {special}_async")

    def _defines(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(LitAgent, name)


class FunctionAgent(LitAgent[Any], Generic[P, R]):
    """A decorated function: an agent for the runner, and still the plain function for everyone
    else."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self._injected = _injected_parameters(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Call the function with the parameters it names; an async function's result is its
        awaitable."""
        values: dict[str, Any] = {"resources": resources, "rollout": rollout}
        for name in self._injected:
            if name in _PICKED:
                values[name] = pick_resource(resources, name, _PICKED[name])
        return cast("Callable[..., Any]", self.function)(
            task, **{name: values[name] for name in self._injected}
        )

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> Any:
        return await cast("Awaitable[Any]", self.rollout(task, resources, rollout))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by name where it stands in its module under the function's; else made anew of the
        function, which may stand there itself."""
        found: Any = sys.modules.get(self.__module__)
        for name in getattr(self.function, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return self.function.__qualname__ if found is self else (FunctionAgent, (self.function,))

    def own_copy(self) -> LitAgent[Any]:
        function = _own(self.function, {})
        return self if function is self.function else FunctionAgent(function)

    def reads_environment(self) -> bool:
        return not {"llm", "resources"}.intersection(self._injected)

    def takes_prompts(self) -> bool:
        return bool({"prompt_template", "resources"}.intersection(self._injected))

    def entry_point(self, mode: Mode) -> EntryPoint:
        return self.rollout_async if is_async(self.function) else self.rollout


class NamedAgent(LitAgent[Any]):
    """An agent given as `module:name` or `file.py:name`, which is imported where it runs."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._agent: LitAgent[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedAgent, (self.reference,)

    def check(self) -> None:
        """Import it; of a class make one. ConfigError if there is nothing of that name, or no
        agent."""
        found = load_reference(self.reference)
        if inspect.isclass(found) and issubclass(found, LitAgent):
            try:
                found = cast("LitAgent[Any]", found())
            except TypeError as error:
                raise ConfigError(
                    f"{self.reference} cannot be made: {error}; name an instance of it"
                ) from None
        self._agent = as_agent(found)
        self._agent.check()

    def reads_environment(self) -> bool:
        """As above. An import that fails by what it raises itself may need what only a process of
        its own is given, such as a key for a client. ConfigError for any other that fails."""
        try:
            return self.loaded().reads_environment()
        except ConfigError as error:
            if error.__cause__ is None or isinstance(
                error.__cause__, SyntaxError | ImportError | NameError
            ):
                raise
        except SystemExit:
            pass
        return True

    def takes_prompts(self) -> bool:
        return self.loaded().takes_prompts()

    def loaded(self) -> LitAgent[Any]:
        """The agent of that name. ConfigError as above."""
        if self._agent is None:
            self.check()
        return cast("LitAgent[Any]", self._agent)

    def own_copy(self) -> LitAgent[Any]:
        return self.loaded().own_copy()

    def entry_point(self, mode: Mode) -> EntryPoint:
        return self.loaded().entry_point(mode)


def rollout(function: Callable[P, R]) -> FunctionAgent[P, R]:
    """Make a function an agent, sync or async.

    Its first parameter is the task. `llm`, `prompt_template`, `resources` and `rollout` are filled
    in by name, in any order. It returns a number, named rewards
    (`{"correct": 1, "short": 0.2, "primary_key": "correct"}`), a list of spans, or None.
    ConfigError for any other signature."""
    return FunctionAgent(function)


@overload
def llm_rollout(function: Callable[P, R]) -> FunctionAgent[P, R]: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[Callable[P, R]], FunctionAgent[P, R]]: ...
def llm_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """Like `rollout`, for a function that must take `llm`; with or without parentheses. `llm`
    belongs to the attempt, whatever `strip_proxy` says."""
    return _requiring("llm", function)


@overload
def prompt_rollout(function: Callable[P, R]) -> FunctionAgent[P, R]: ...
@overload
def prompt_rollout() -> Callable[[Callable[P, R]], FunctionAgent[P, R]]: ...
def prompt_rollout(function: Callable[..., Any] | None = None) -> Any:
    """Like `rollout`, for a function that must take `prompt_template`; with or without
    parentheses."""
    return _requiring("prompt_template", function)


AnyAgent: TypeAlias = LitAgent[Any] | Callable[..., Any] | str


def as_agent(agent: AnyAgent) -> LitAgent[Any]:
    """Turn a plain function or a name (`module:name`, `file.py:name`) into an agent; a `LitAgent`
    stays as it is. A name is not imported yet. ConfigError for anything else, and for a class
    instead of its instance."""
    if isinstance(agent, LitAgent):
        return cast("LitAgent[Any]", agent)
    if isinstance(agent, str):
        return NamedAgent(agent)
    if inspect.isclass(agent):
        raise ConfigError(f"{agent.__name__} is a class; pass an instance: {agent.__name__}()")
    if callable(agent):
        return FunctionAgent(agent)
    raise ConfigError(
        f"the agent is a {type(agent).__name__}; expected a LitAgent or a function decorated by "
        "rollout"
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` returns a coroutine. Partials and objects with an async `__call__`
    count."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - the attribute itself is wanted, not callability
    )


def pick_resource(resources: NamedResources, name: str, kind: type[ResourceT]) -> ResourceT:
    """The resource `name` of this `kind`, or the only one of that kind. ConfigError if there is
    none, or several."""
    named = resources.get(name)
    if isinstance(named, kind):
        return named
    candidates = {key: value for key, value in resources.items() if isinstance(value, kind)}
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if kind is LLM and not candidates:
        raise ConfigError(
            "the rollout has no model, and the agent takes `llm`: start the server with --model "
            "or --backend, so that rollouts without resources get its model, or add resources "
            "with an LLM called llm (POST /api/v1/resources)"
        )
    have = (
        ", ".join(sorted(candidates))
        or f"none (resources: {', '.join(sorted(resources)) or 'empty'})"
    )
    raise ConfigError(
        f"the agent takes {name!r}, which needs one {kind.__name__} among the rollout's "
        f"resources; there are: {have}. Name one of them {name!r}, or take `resources` and choose"
    )


def _requiring(name: str, function: Callable[..., Any] | None) -> Any:
    if function is None:
        return functools.partial(_requiring, name)
    if name not in _signature(function).parameters:
        raise ConfigError(
            f"{_described(function)} has no parameter {name!r}, which this decorator is for; "
            f"add it, or use agentlightning.rollout"
        )
    return FunctionAgent(function)


def _injected_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of INJECTED that the function takes. ConfigError if the runner cannot call it."""
    expected = f"expected (task[, {'][, '.join(INJECTED)}])"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{_described(function)} is a generator; an agent returns its reward instead of "
            "yielding"
        )
    parameters = list(_signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional or parameters[0].name in INJECTED:
        raise ConfigError(
            f"{_described(function)} does not take the task as its first parameter; {expected}"
        )
    if parameters[0].name == "self":
        raise ConfigError(
            f"{_described(function)} is a method; subclass LitAgent for an agent with state"
        )
    injected: list[str] = []
    for parameter in parameters[1:]:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.name in INJECTED and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            injected.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{_described(function)} has the parameter {parameter.name!r}, which nothing "
                f"fills: {nearest(parameter.name, INJECTED)}; {expected}, or give it a default"
            )
    return tuple(injected)


def agent_name(agent: LitAgent[Any]) -> str:
    """The name of an agent in lists: its reference, its function's name or its class's."""
    if isinstance(agent, NamedAgent):
        return agent.reference
    function = agent.function if isinstance(agent, FunctionAgent) else type(agent)
    return str(getattr(function, "__name__", type(agent).__name__))


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{function!r} cannot be an agent: {error}; decorate a function of your own"
        ) from None


def _described(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}{_signature(function)}"


def _undefined(agent: LitAgent[Any], what: str) -> ConfigError:
    return ConfigError(
        f"{type(agent).__name__} does not define {what}; override one of the rollout methods"
    )


# --- an agent of its own for each rollout ---------------------------------------------------------


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, with `memo` as for `deepcopy`; where that cannot be had, the value itself."""
    try:
        _Measuring(memo).dump(value)
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - of a stranger's object
        return value


class _Measuring(pickle.Pickler):
    """Fails for what is too large to copy, or cannot be; notes in `memo` what is shared."""

    def __init__(self, memo: dict[int, Any]) -> None:
        super().__init__(_Limited(), pickle.HIGHEST_PROTOCOL)
        self._memo = memo

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj).__module__.partition(".")[0] == "asyncio":
            self._memo[id(obj)] = obj
        atomic = isinstance(
            obj, type | types.FunctionType | types.BuiltinFunctionType | weakref.ref
        )
        return id(obj) if atomic or id(obj) in self._memo else None


class _Limited(io.RawIOBase):
    _written = 0

    def write(self, data: Any) -> int:
        self._written += len(data)
        if self._written > LARGEST_COPIED:
            raise ValueError("too large to copy")
        return len(data)
