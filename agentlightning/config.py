"""`RunConfig`, the one definition of a run's settings: run file, flags, schema, manifest, `Trainer`
and learner read it.

Imports no algorithm, no torch and no NumPy, because `agl runner` reads run files too."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
)

import msgspec
from msgspec import Meta

from agentlightning.data.references import is_reference, load_reference
from agentlightning.errors import ConfigError, nearest
from agentlightning.learner.policy_config import PolicyConfig, flag
from agentlightning.prompts.components import PROMPTS, read_candidate
from agentlightning.runner.command import CommandAgent, RewardSource, command
from agentlightning.runner.execution import Hook
from agentlightning.runner.harnesses import harness
from agentlightning.runner.isolation import Isolation
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, FrozenModel, NamedResources, PromptCandidate, PromptTemplate

P = ParamSpec("P")
C = TypeVar("C", bound="RunConfig")


def is_grader_reference(grader: object) -> bool:
    """Whether a grader is a reference to a function, not a command."""
    return isinstance(grader, str) and len(grader.split()) == 1 and is_reference(grader)


class CommandConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent that is a program. The fields are those of `agentlightning.command`, or with
    `harness` (its name) those of `agentlightning.harness`. `grader` is a command, or a reference to
    a function. In a run file, `cwd` is by default the file's folder."""

    command: str | None = None
    harness: str | None = None
    prompt: str | None = None
    arguments: list[str] = []
    workspace: str | None = None
    reward: RewardSource = "auto"
    grader: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    cwd: str | None = None

    def load(self) -> CommandAgent:
        """The agent. ConfigError if it is not valid, for example if its grader cannot be loaded."""
        grader: Any = self.grader
        if self.grader is not None and is_grader_reference(self.grader):
            grader = load_reference(self.grader)
        names = ("prompt", "arguments", "workspace")
        given: dict[str, Any] = {name: own for name in names if (own := getattr(self, name))}
        if self.harness is not None and self.command is None and self.reward == "auto":
            return harness(self.harness, grader=grader, env=self.env, cwd=self.cwd, **given)
        if self.command is None or self.harness is not None or given:
            raise ConfigError(
                "agent: give either command, with reward, or harness, with prompt, arguments and "
                "workspace; both take grader, env and cwd"
            )
        return command(self.command, reward=self.reward, grader=grader, env=self.env, cwd=self.cwd)


# Algorithms by the name a run file gives them; any other is named by a reference, `file.py:Class`.
ALGORITHMS: Final = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "dr_grpo": "DrGRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "ppo": "PPO",
    "reinforce++": "REINFORCEPlusPlus",
    "reinforce++_baseline": "REINFORCEPlusPlusBaseline",
    "sft": "SFT",
    "opd": "OPD",
    "apo": "APO",
    "gepa": "GEPA",
    "baseline": "Baseline",
}

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Algorithm, Progress
    from agentlightning.algorithm.tracking import Tracker
    from agentlightning.learner.policy import Policy
    from agentlightning.runner.agent import AnyAgent

    GivenAgent: TypeAlias = AnyAgent | CommandConfig
    GivenAlgorithm: TypeAlias = Algorithm | Mapping[str, Any]
    Source: TypeAlias = str | Path | Policy
    GivenModel: TypeAlias = Source | Mapping[str, Source]
    GivenFrozen: TypeAlias = FrozenModel | Mapping[str, Any]
    GivenTrackers: TypeAlias = str | Sequence[str | Mapping[str, Any] | Tracker]
    GivenStore: TypeAlias = str | Path | LightningStore
    GivenPath: TypeAlias = str | Path
    GivenProgress: TypeAlias = Progress | bool | None
else:  # the forms in a run file, and beside them the classes that Python may give as well
    GivenAgent = Annotated[str | CommandConfig, object]
    GivenAlgorithm = Annotated[dict[str, Any], object]
    GivenModel = Annotated[str | dict[str, str], object]
    GivenFrozen = FrozenModel
    GivenTrackers = Annotated[list[str | dict[str, Any]], str]
    GivenStore = Annotated[str, Path, LightningStore]
    GivenPath = Annotated[str, Path]
    GivenProgress = Annotated[bool, object]


class RunConfig(PolicyConfig, frozen=True, kw_only=True):
    """The settings of a run: what a run file and the flags of `agl train` set, and what `Trainer`
    takes.

    `algorithm` has a `name` and that algorithm's fields, `environment` a `name`, `HUB:NAME`, and
    that hub's fields. Paths in a run file are relative to it, paths in flags to the current
    directory."""

    agent: Annotated[
        GivenAgent | None, flag("The agent, in a file or a module.", "FILE.py:NAME")
    ] = None
    environment: Annotated[
        Mapping[str, Any] | None,
        flag("An agent with its tasks, such as verifiers:NAME.", "HUB:NAME"),
    ] = None
    model: Annotated[
        GivenModel | None,
        flag(
            "Model to train: a directory, a Hugging Face id, or the function that makes it.",
            "ID|DIR|FILE.py:NAME",
        ),
    ] = None
    models: Annotated[
        Mapping[str, GivenFrozen],
        Meta(
            description="Models that agents call and nobody trains: the name, then where it is "
            "served."
        ),
    ] = msgspec.field(default_factory=dict[str, FrozenModel])
    model_name: Annotated[
        str, flag("Name by which agents call the model; default: policy.", "NAME")
    ] = "policy"
    train_dataset: Annotated[
        Any, flag("Tasks to train on: a file, file.py:name or hf:ORG/NAME/FILE.", "DATA")
    ] = None
    val_dataset: Annotated[Any, flag("Held-out tasks, for evaluation.", "DATA")] = None
    initial_resources: Annotated[
        Mapping[str, LLM | PromptTemplate | PromptCandidate | str],
        Meta(
            description="Endpoints and prompt templates that the agent is given, by name; as "
            "`prompts` the run, or the file, whose prompts take the place of the program's."
        ),
    ] = msgspec.field(default_factory=dict[str, LLM | PromptTemplate | PromptCandidate | str])
    algorithm: Annotated[
        GivenAlgorithm, flag(f"{', '.join(ALGORITHMS)} or file.py:Class.", "NAME")
    ] = msgspec.field(default_factory=lambda: {"name": "grpo"})
    time_limit: Annotated[
        float | None,
        flag(
            "Stop training after this time, then evaluate and save.",
            "90s|5m|2h",
            bounds={"exclusiveMinimum": 0},
            duration=True,
        ),
    ] = None
    n_runners: Annotated[
        int | None,
        flag(
            "Number of rollouts at once in this process; default: 64, with processes one per "
            "core; 0: leave them to `agl runner`.",
            "N",
            bounds={"minimum": 0},
        ),
    ] = None
    isolation: Annotated[
        Isolation,
        flag(
            "process: run each rollout in its own process. auto: do so if the agent takes neither "
            "`llm` nor `resources`."
        ),
    ] = "auto"
    instrument: Annotated[
        str | None,
        flag(
            "Trace tools and agents of Python frameworks: langchain,crewai,…; without NAMES, all "
            "that are installed.",
            "[NAMES]",
            is_flag=False,
            flag_value="all",
        ),
    ] = None
    run_dir: Annotated[
        GivenPath | None,
        flag("Directory of the run; default: a new one below runs/.", "DIR", former=["--out"]),
    ] = None
    resume: Annotated[
        bool, flag("Continue the run in --run-dir, or the newest run.", is_flag=True)
    ] = False
    store: Annotated[
        GivenStore | None,
        flag("SQLite file or its folder; default: in the run's directory.", "PATH"),
    ] = None
    server: Annotated[
        str | None, flag("Use the store and gateway of this `agl server`.", "URL")
    ] = None
    api_key: Annotated[
        str | None,
        flag(
            "Key of the server; without a server, the admin key of this process's own.",
            "KEY",
            "--key",
            former=["--api-key"],
            envvar="AGL_KEY",
            show_envvar=True,
        ),
    ] = None
    port: Annotated[
        int,
        flag(
            "Port of this process's own server; 0: any free port.",
            bounds={"minimum": 0, "maximum": 2**16 - 1},
        ),
    ] = 0
    trackers: Annotated[
        GivenTrackers,
        Meta(
            description="Where metrics are sent as well: `tensorboard`, `wandb`, `mlflow`, or "
            "file.py:Class."
        ),
    ] = msgspec.field(default_factory=list[str | dict[str, Any]])

    @property
    def trained(self) -> dict[str, Source]:
        """The models to train, by the names that agents use."""
        if isinstance(self.model, Mapping):
            return dict(self.model)
        return {} if self.model is None else {self.model_name: self.model}

    @property
    def resources(self) -> NamedResources:
        """`initial_resources`; the `main_llm` of Agent Lightning 0.3 is `llm`. ConfigError for
        prompts that cannot be read."""
        return {
            "llm" if name == "main_llm" else name: read_candidate(given)
            if isinstance(given, str)
            else given
            for name, given in self.initial_resources.items()
        }

    @property
    def candidate(self) -> PromptCandidate | None:
        """The prompts that take the place of an unchanged program's."""
        given = self.resources.values()
        return next((one for one in given if isinstance(one, PromptCandidate)), None)

    @property
    def endpoint(self) -> LLM | None:
        """The endpoint that agents are given as `llm`."""
        given = self.resources.get("llm")
        return given if isinstance(given, LLM) else None

    def check(self) -> None:
        """ConfigError for settings that do not go together."""
        if self.n_runners == 0 and self.server is None and self.port == 0:
            raise ConfigError(
                "n_runners=0 leaves rollouts to `agl runner` processes: give a port, or a server"
            )
        if self.server is not None and self.store is not None:
            raise ConfigError(
                "server and store exclude each other: with a server, the store is the server's"
            )
        for name, given in self.resources.items():
            if isinstance(given, PromptCandidate) and name != PROMPTS:
                raise ConfigError(f"initial_resources: call the prompts {PROMPTS!r}, not {name!r}")
        if self.trained and self.endpoint is not None:
            raise ConfigError(
                f"agents get the trained model as `llm`: remove {self.endpoint.endpoint} from "
                "initial_resources. A server of vLLM samples with sampler={'vllm': URL}, and "
                "other models that agents call go into `models`"
            )

    @property
    def algorithm_fields(self) -> Mapping[str, Any]:
        """The name and the fields of the algorithm; empty if it is an instance."""
        return self.algorithm if isinstance(self.algorithm, Mapping) else {}

    def load_agent(self) -> Any:
        """The agent, its name, or the environment. ConfigError if there is no such hub, or it has
        no such field."""
        if self.environment is None:
            return self.agent.load() if isinstance(self.agent, CommandConfig) else self.agent
        from agentlightning.environments import HUBS

        fields = dict(self.environment)
        written = str(fields.pop("name", ""))
        hub, _, name = written.partition(":")
        if hub not in HUBS or not name:
            raise ConfigError(
                f"{written!r} names no environment; write HUB:NAME. {nearest(hub, HUBS)}"
            )
        return build(HUBS[hub], fields, "environment", name)


class TrainerConfig(RunConfig, frozen=True, kw_only=True):
    """The settings of a run, and what only Python can give."""

    hooks: Annotated[
        Sequence[Hook], Meta(description="Called before and after every rollout (see `Hook`).")
    ] = ()
    progress: Annotated[
        GivenProgress,
        Meta(description="Shows progress; default, and True: on stderr; False shows nothing."),
    ] = None
    n_workers: Annotated[int | None, Meta(description="The same as `n_runners`.")] = None
    adapter: Annotated[
        Any, Meta(description="The `adapter` of functions decorated with `agl.algo`, as in 0.3.")
    ] = None
    run_file: Annotated[
        Mapping[str, Any] | None,
        Meta(description="Written to `run_dir` as `run.yaml`, which repeats the run."),
    ] = None


def with_settings_of(
    config: Callable[P, C],
) -> Callable[[Callable[[Any, C], None]], Callable[Concatenate[Any, P], None]]:
    """Make an `__init__` that takes a `config` take its keyword arguments; None is the default."""

    def decorate(initialise: Callable[[Any, C], None]) -> Callable[Concatenate[Any, P], None]:
        def initialised(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            given: Any = {name: value for name, value in kwargs.items() if value is not None}
            initialise(self, cast(Any, config)(*args, **given))

        own, *_ = inspect.signature(initialise).parameters.values()
        keywords = inspect.signature(config).parameters.values()
        plain = [keyword.replace(annotation=keyword.empty) for keyword in keywords]
        vars(initialised)["__signature__"] = inspect.Signature([own, *plain])
        return initialised

    return decorate


_OF_POLICY: Final = PolicyConfig.__struct_fields__
FIELDS: Final = (*RunConfig.__struct_fields__[len(_OF_POLICY) :], *_OF_POLICY)
"""The names of all settings, in the order in which they are listed."""


def make_algorithm(given: Any) -> Any:
    """The algorithm of `{"name": …, field: value}`, after checking the name and type of every
    field; an instance is returned unchanged."""
    if not isinstance(given, Mapping):
        return given
    fields = dict(cast("Mapping[str, Any]", given))
    name = fields.pop("name", "grpo")
    if not isinstance(name, str) or (name not in ALGORITHMS and not is_reference(name)):
        raise ConfigError(
            f"algorithm.name: no algorithm {name!r}; {nearest(str(name), ALGORITHMS)} or "
            "file.py:Class"
        )
    maker = load_reference(
        f"agentlightning.algorithm:{ALGORITHMS[name]}" if name in ALGORITHMS else name
    )
    if not isinstance(maker, type) or not dataclasses.is_dataclass(maker):
        raise ConfigError(
            f"algorithm.name: {name} is no dataclass; an algorithm declares its fields as one"
        )
    return build(maker, fields, "algorithm")


def build(kind: type[Any], fields: Mapping[str, Any], where: str, *name: str) -> Any:
    """`kind(*name, **fields)`, an instance of a dataclass, after checking the type of each field.
    Keys that a mapping leaves out are those of the field's default."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields = {
        name: {**msgspec.structs.asdict(default), **value}
        if isinstance(value, Mapping) and isinstance(default := defaults.get(name), msgspec.Struct)
        else value
        for name, value in fields.items()
    }
    checked = convert(fields, fields_of(kind), where)
    return kind(*name, **{field: getattr(checked, field) for field in fields})


def fields_of(kind: type[Any]) -> type[msgspec.Struct]:
    """The fields of a dataclass that a run file can set."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    fields = [(name, hints[name], msgspec.UNSET) for name in names if name != "name"]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True)


def convert(value: Any, type_: Any, where: str) -> Any:
    """`value` as a `type_`. ConfigError names the innermost wrong key and what is expected
    there."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `$")[0]
        message = f"{message[0].lower()}{message[1:]}"
    known: list[str] = []
    union = typing.get_origin(type_) in (UnionType, typing.Union)
    for kind in typing.get_args(type_) if union else (type_,):
        origin = typing.get_origin(kind)
        inner = typing.get_args(kind)
        fields = typing.get_type_hints(kind) if hasattr(kind, "__struct_fields__") else {}
        known += fields
        if origin is Literal:
            known += map(str, inner)
        elif kind in (float, str):
            known.append(kind.__name__)
        if isinstance(value, Mapping) and (fields or origin in (dict, Mapping)):
            for key, item in cast("Mapping[Any, Any]", value).items():
                type_of_item = fields.get(key, Any) if fields else inner[1]
                convert(item, type_of_item, f"{where}.{key}".replace(": .", ": "))
        elif isinstance(value, list) and origin in (list, tuple):
            for index, item in enumerate(cast("list[Any]", value)):
                convert(item, inner[0], f"{where}[{index}]")
    if unknown := re.fullmatch("object contains unknown field `(.*)`", message):
        message = f"unknown key {unknown[1]!r}; {nearest(unknown[1], known)}"
    elif message.startswith("invalid enum value"):
        message = f"{value!r} is none of its values; {nearest(str(value), known)}"
    raise ConfigError(f"{where.removesuffix(': ')}: {message}") from None
