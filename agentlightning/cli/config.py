"""Reads a run file (YAML) and flags into a complete, checked `TrainConfig`, before anything starts.

`TrainConfig` is the one definition of a setting: flags, `--help` and the checks of run files follow
from it. An error names the file, the key with its path, and the nearest known key."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, cast

import click
import msgspec
import yaml

from agentlightning.cli.options import (
    INSTRUMENT_HELP,
    ISOLATION_HELP,
    Duration,
    Flag,
    Option,
    seconds_in,
    together,
)
from agentlightning.cli.place import store_file
from agentlightning.data.references import is_reference, load_reference
from agentlightning.datasets.hub import check_model_path, is_hub_name
from agentlightning.errors import ConfigError, nearest
from agentlightning.runner.command import CommandAgent, RewardSource, command
from agentlightning.runner.harnesses import harness
from agentlightning.runner.isolation import Isolation
from agentlightning.store.redaction import settings_without_secrets
from agentlightning.types import LLM, FrozenModel, PromptTemplate


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
        if self.grader is not None and _is_word(self.grader) and is_reference(self.grader):
            grader = load_reference(self.grader)
        own: dict[str, Any] = {
            "prompt": self.prompt,
            "arguments": self.arguments,
            "workspace": self.workspace,
        }
        given = {name: value for name, value in own.items() if value}
        if self.harness is not None and self.command is None and self.reward == "auto":
            return harness(self.harness, grader=grader, env=self.env, cwd=self.cwd, **given)
        if self.command is None or self.harness is not None or given:
            raise ConfigError(
                "agent: give either command, with reward, or harness, with prompt, arguments and "
                "workspace; both take grader, env and cwd"
            )
        return command(self.command, reward=self.reward, grader=grader, env=self.env, cwd=self.cwd)


def _flag(
    help_: str, metavar: str | None = None, name: str | None = None, **settings: Any
) -> msgspec.Meta:
    """The text of a key that has a flag, for `agl train --help`. `name` is the flag's unless it is
    the key's, and `settings` are those of `Flag`."""
    return msgspec.Meta(description=help_, extra={"name": name, "metavar": metavar, **settings})


def _key(description: str) -> msgspec.Meta:
    """The text of a key without a flag, for the reference."""
    return msgspec.Meta(description=description)


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
    "baseline": "Baseline",
}


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `agl train`, with the defaults and meanings of `Trainer`. The flags follow
    from it.

    `algorithm` has a `name` and that algorithm's fields (or is the name alone), `optimizer` the
    fields of AdamW, `lora` those of LoRA. `environment` has a `name`, `HUB:NAME`, and that hub's
    fields. Paths in a run file are relative to it, paths in flags to the current directory."""

    agent: Annotated[
        str | CommandConfig | None, _flag("The agent, in a file or a module.", "FILE.py:NAME")
    ] = None
    environment: Annotated[
        dict[str, Any] | None, _flag("An agent with its tasks, such as verifiers:NAME.", "HUB:NAME")
    ] = None
    model: Annotated[
        str | dict[str, str] | None, _flag("Model to train.", "ID|DIR|FILE.py:NAME")
    ] = None
    models: Annotated[
        dict[str, FrozenModel],
        _key("Models that agents call and nobody trains: the name, then where it is served."),
    ] = msgspec.field(default_factory=dict[str, FrozenModel])
    model_name: Annotated[
        str, _flag("Name by which agents call the model; default: policy.", "NAME")
    ] = "policy"
    train_dataset: Annotated[
        Any, _flag("Tasks to train on: a file, file.py:name or hf:ORG/NAME/FILE.", "DATA")
    ] = None
    val_dataset: Annotated[Any, _flag("Held-out tasks, for evaluation.", "DATA")] = None
    initial_resources: Annotated[
        dict[str, LLM | PromptTemplate],
        _key("Endpoints and prompt templates that the agent is given, by name."),
    ] = msgspec.field(default_factory=dict[str, LLM | PromptTemplate])
    algorithm: Annotated[
        dict[str, Any], _flag(f"{', '.join(ALGORITHMS)} or file.py:Class.", "NAME")
    ] = msgspec.field(default_factory=lambda: {"name": "grpo"})
    learner: Annotated[
        str | dict[str, Any] | None,
        _key("Where the model learns: `torch` (default), `{fsdp: 2}` or `{tinker: URL}`."),
    ] = None
    sampler: Annotated[
        str | dict[str, Any] | None,
        _key("What samples: `embedded`, `vllm`, `{vllm: URL}` or `{sglang: URL}`."),
    ] = None
    optimizer: Annotated[
        dict[str, Any],
        _key("Settings of AdamW, such as `learning_rate`, `warmup_steps` and `schedule`."),
    ] = msgspec.field(default_factory=dict[str, Any])
    lora: Annotated[
        dict[str, Any] | None,
        _key("Train a low-rank adapter instead of all weights: `rank`, `alpha`, `targets`."),
    ] = None
    time_limit: Annotated[
        float | None,
        _flag(
            "Stop training after this time, then evaluate and save.",
            "90s|5m|2h",
            type=Duration(bare=True),
        ),
    ] = None
    n_runners: Annotated[
        int | None,
        _flag("Number of rollouts at once in this process; 0: leave them to `agl runner`.", "N"),
    ] = None
    isolation: Annotated[Isolation, _flag(ISOLATION_HELP)] = "auto"
    instrument: Annotated[
        str | None, _flag(INSTRUMENT_HELP, "[NAMES]", is_flag=False, flag_value="all")
    ] = None
    seed: Annotated[int, _flag("Random seed.")] = 0
    run_dir: Annotated[
        str | None,
        _flag("Directory of the run; default: a new one below runs/.", "DIR", former=["--out"]),
    ] = None
    resume: Annotated[
        bool, _flag("Continue the run in --run-dir, or the newest run.", is_flag=True)
    ] = False
    store: Annotated[
        str | None, _flag("SQLite file or its folder; default: in the run's directory.", "PATH")
    ] = None
    server: Annotated[
        str | None, _flag("Use the store and gateway of this `agl server`.", "URL")
    ] = None
    api_key: Annotated[
        str | None,
        _flag("Its key.", "KEY", "--key", former=["--api-key"], envvar="AGL_KEY", show_envvar=True),
    ] = None
    port: Annotated[int, _flag("Port of this process's own server; 0: any free port.")] = 0
    max_sequence_length: Annotated[
        int | None, _flag("Limit of prompt and answer together.", "TOKENS")
    ] = None
    device: Annotated[
        str | None, _flag("cpu, cuda or mps; default: cuda if available, else cpu.", "NAME")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        _flag("Type of the weights; default: bfloat16 on a GPU, else float32."),
    ] = None
    threads: Annotated[int | None, _flag("Number of torch threads.", "N")] = None
    deterministic: Annotated[
        bool, _key("Give the same weights for the same seed, to the last bit.")
    ] = False
    trackers: Annotated[
        list[str | dict[str, Any]],
        _key("Where metrics are sent as well: `wandb`, `mlflow`, … or file.py:Class."),
    ] = msgspec.field(default_factory=list[str | dict[str, Any]])

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


FIELDS = {field.name: field for field in msgspec.structs.fields(TrainConfig)}


def key_flags(*left_out: str, only: Collection[str] = ()) -> Option:
    """The flags of all keys that have one, or `only` of these, except `left_out`; None if not
    given."""
    names = [name for name in _HINTS if name not in left_out and (name in only or not only)]
    return together(*(_option(name, _HINTS[name]) for name in names))


def _option(name: str, hint: Any) -> Option:
    type_, meta = typing.get_args(hint)
    settings: dict[str, Any] = {"help": meta.description, "default": None, **meta.extra}
    flag = settings.pop("name") or f"--{name.replace('_', '-')}"
    kinds = (
        typing.get_args(type_)
        if typing.get_origin(type_) in (UnionType, typing.Union)
        else (type_,)
    )
    if typing.get_origin(kinds[0]) is Literal:
        settings["type"] = click.Choice(typing.get_args(kinds[0]))
    elif kinds[0] in (int, float):
        settings.setdefault("type", kinds[0])
    return click.option(flag, name, cls=Flag, **settings)


_HINTS: Final = {
    name: hint
    for name, hint in typing.get_type_hints(TrainConfig, include_extras=True).items()
    if typing.get_origin(hint) is Annotated and hint.__metadata__[0].extra is not None
}
NAMED_KEYS: Final = ("algorithm", "environment")  # mappings with a name, which may stand alone
_PATHS = ("model", "train_dataset", "val_dataset", "run_dir", "store")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses repeated keys and reads `1e-3` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # pyright: ignore[reportUnknownMemberType]
            if key in seen:
                raise ConfigError(
                    f"the key {key!r} is given twice (line {key_node.start_mark.line + 1})"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_config(
    source: Path | None, assignments: Iterable[str] = (), flags: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The run file at a path, changed by `key=value` assignments (dotted keys), then by `flags`
    that are not None.

    ConfigError for a missing or malformed file, for an unknown, repeated or missing key, and for a
    wrong type."""
    values: dict[str, Any] = {} if source is None else _read_run_file(source)
    for assignment in assignments:
        _assign(values, assignment)
    flags = flags or {}
    for given, instead in (("agent", "environment"), ("environment", "agent")):
        if flags.get(given) is not None and flags.get(instead) is None:
            values.pop(instead, None)
    for key, value in flags.items():
        if value is not None and key in NAMED_KEYS:
            values[key] = {**(values.get(key) or {}), "name": value}
        elif value is not None:
            values[key] = value
    where = "the command line" if source is None else str(source)
    for key in values:
        if key not in FIELDS:
            raise ConfigError(
                f"{where}: unknown key {key!r}; {_where_it_belongs(str(key), values)}"
            )
    if isinstance(limit := values.get("time_limit"), str):
        try:
            values["time_limit"] = seconds_in(limit, bare=True)
        except ValueError as error:
            raise ConfigError(f"{where}: time_limit: {error}") from None
    if isinstance(values.get("store"), str):
        values["store"] = store_file(values["store"], create=True)
    missing = [name for name in _needed(values) if values.get(name) is None]
    if missing:
        flags_hint = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        hint = "" if source else ", or name a run file: agl train run.yaml …"
        raise ConfigError(
            f"{where} lacks: {', '.join(missing)}; add the keys or give {flags_hint}{hint}"
        )
    return _convert(values, TrainConfig, f"{where}: ")


def placed(config: TrainConfig) -> TrainConfig:
    """The same settings with absolute paths, which agents that change the working directory do not
    move."""
    names = (*_PATHS, "agent", "algorithm", "environment")
    values = {name: value for name in names if (value := getattr(config, name)) is not None}
    return msgspec.structs.replace(config, **_seen_from(Path.cwd() / "run.yaml", values))


def check_files(config: TrainConfig) -> None:
    """ConfigError for a file or a model's folder that is missing, before libraries take seconds to
    load."""
    models = config.model.values() if isinstance(config.model, dict) else [config.model]
    named = {
        "train_dataset": [config.train_dataset],
        "val_dataset": [config.val_dataset],
        "agent": [config.agent],
    }
    for key, values in {**named, "model": list(models)}.items():
        for value in values:
            if not isinstance(value, str) or is_hub_name(value):
                continue
            file = Path(value.rpartition(":")[0] if is_reference(value) else value).expanduser()
            if is_reference(value) and file.suffix == ".py" and not file.is_file():
                raise ConfigError(f"{key}: no file {file} (looked in {Path.cwd()})")
            if key.endswith("dataset") and not is_reference(value) and not file.is_file():
                raise ConfigError(f"{key}: no dataset file {file} (looked in {Path.cwd()})")
            if key == "model" and not is_reference(value):
                check_model_path(value)


def _where_it_belongs(key: str, values: Mapping[str, Any]) -> str:
    """A hint for an unknown key: `write algorithm.group_size`, or the nearest known key."""
    named = values.get("algorithm")
    kind = ALGORITHMS.get(
        str(named.get("name", "grpo")) if isinstance(named, dict) else "grpo", "GRPO"
    )
    parts = {
        "algorithm": f"algorithm:{kind}",
        "optimizer": "learner.base:AdamW",
        "lora": "learner.base:LoRA",
    }
    for owner, part in parts.items():
        with contextlib.suppress(ConfigError):  # where the packages that train are missing
            fields = dataclasses.fields(load_reference(f"agentlightning.{part}"))
            if key in [field.name for field in fields if field.init]:
                return f"write {owner}.{key}"
    return nearest(key, FIELDS)


def _needed(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The required keys; recorded rollouts replace tasks."""
    algorithm = values.get("algorithm")
    recorded = isinstance(algorithm, dict) and "traces" in algorithm
    if values.get("environment") is not None:
        if values.get("agent") is not None:
            raise ConfigError(
                "give agent or environment, not both: an environment is an agent that brings its "
                "tasks"
            )
        return ()
    return ("agent",) if recorded else ("agent", "train_dataset")


def build(kind: type[Any], fields: Mapping[str, Any], where: str, *name: str) -> Any:
    """`kind(*name, **fields)`, an instance of a dataclass, after checking the type of each
    field."""
    hints = typing.get_type_hints(kind)
    known = {
        field.name: hints[field.name]
        for field in dataclasses.fields(kind)
        if field.init and field.name != "name"
    }
    checked: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
        checked[key] = _convert(value, known[key], f"{where}.{key}")
    return kind(*name, **checked)


def _read_run_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"no run file {path} (looked in {Path.cwd()}); an agent is named by --agent"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the run file {path}: {error}") from error
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds no keys; a run file has at least agent, model and train_dataset"
        )
    return _seen_from(path, cast("dict[str, Any]", values))


def kept(config: TrainConfig) -> dict[str, Any]:
    """The run file that repeats the run: with absolute paths, without the run's directory and
    without secrets."""
    here = Path.cwd() / "run.yaml"
    own = ("run_dir", "resume")
    values: dict[str, Any] = settings_without_secrets(msgspec.to_builtins(config))
    values = _seen_from(
        here, {key: value for key, value in values.items() if key not in own and value is not None}
    )
    return values | {key: _references_from(here, values[key]) for key in ("algorithm", "trackers")}


def _references_from(path: Path, value: Any) -> Any:
    """The same value at any depth, with references to files relative to the folder of `path`."""
    if isinstance(value, dict):
        return {
            name: _references_from(path, inner)
            for name, inner in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [_references_from(path, inner) for inner in cast("list[Any]", value)]
    return _beside(path, value) if isinstance(value, str) and is_reference(value) else value


def _seen_from(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a run file at `path`, with paths relative to the current directory, or absolute
    if `path` is."""
    values |= {key: {"name": values[key]} for key in NAMED_KEYS if isinstance(values.get(key), str)}
    for key in _PATHS:
        if key in values:
            values[key] = _beside(path, values[key], must_exist=key == "model")
    if isinstance(values.get("model"), dict):
        several = cast("dict[str, Any]", values["model"])
        values["model"] = {
            name: _beside(path, model, must_exist=True) for name, model in several.items()
        }
    algorithm = values.get("algorithm")
    if isinstance(algorithm, dict):
        places = {key: algorithm[key] for key in ("traces", "teacher") if key in algorithm}
        values["algorithm"] = algorithm | {
            key: _beside(path, place, must_exist=True) for key, place in places.items()
        }
    environment = values.get("environment")
    if isinstance(environment, dict):
        hub, _, name = str(environment.get("name")).partition(":")
        file, at, task = name.partition("@")
        if file.endswith(".py") or hub == "harbor":
            values["environment"] = {
                **environment,
                "name": f"{hub}:{_beside(path, file)}{at}{task}",
            }
    agent = values.get("agent")
    if isinstance(agent, str):
        values["agent"] = _beside(path, agent)
    elif isinstance(agent, dict):
        values["agent"] = _command_beside(path, cast("dict[str, Any]", agent))
    return values


def _command_beside(path: Path, agent: dict[str, Any]) -> dict[str, Any]:
    """A command runs in the run file's folder; a grader that is a reference is looked up there."""
    seen = {**agent, "cwd": _beside(path, agent.get("cwd") or ".")}
    if "workspace" in agent:
        seen["workspace"] = _beside(path, agent["workspace"])
    grader = agent.get("grader")
    if isinstance(grader, str) and _is_word(grader) and is_reference(grader):
        seen["grader"] = _beside(path, grader)
    return seen


def _is_word(text: str) -> bool:
    return len(text.split()) == 1


def _beside(run_file: Path, value: Any, must_exist: bool = False) -> Any:
    """`value` relative to the run file's folder, if it is a path. Names of models on a hub and of
    modules stay unchanged."""
    if not isinstance(value, str) or is_hub_name(value) or "://" in value or value == ":memory:":
        return value
    location, _, attribute = value.rpartition(":") if is_reference(value) else (value, "", "")
    if attribute and not location.endswith(".py"):
        return value
    path = run_file.parent / Path(location).expanduser()
    if must_exist and not path.exists():
        return value
    return f"{path}:{attribute}" if attribute else str(path)


_ENGINES: Final = ("vllm", "sglang", "fsdp", "tinker", "verl")


def read_value(where: str, text: str) -> Any:
    """A YAML value from the command line. ConfigError, beginning with `where`, if it is
    malformed."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise ConfigError(f"{where}: {text!r} is no YAML value; quote it") from None


def _assign(values: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--set {assignment!r} is not an assignment; write it as algorithm.steps=20"
        )
    value = read_value(f"--set {key}", text)
    *parents, last = key.split(".")
    inner: dict[str, Any] = values
    for parent in parents:
        outer: Any = inner.setdefault(parent, {})
        if parent in ("sampler", "learner") and (
            isinstance(outer, str) or (last in _ENGINES and last not in outer)
        ):
            outer = inner[parent] = {}  # another one than the file names
        if not isinstance(outer, dict):
            raise ConfigError(f"--set {key}: {parent!r} is {outer!r}, which has no keys of its own")
        inner = outer
    inner[last] = {"name": value} if key in NAMED_KEYS and isinstance(value, str) else value


def _convert(value: Any, type_: Any, where: str) -> Any:
    """`value` as a `type_`. ConfigError names the innermost wrong key and what is expected
    there."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `$")[0]
        message = f"{message[0].lower()}{message[1:]}"
    known: list[str] = []
    for kind in (
        typing.get_args(type_)
        if typing.get_origin(type_) in (UnionType, typing.Union)
        else (type_,)
    ):
        origin = typing.get_origin(kind)
        inner = typing.get_args(kind)
        fields = (
            typing.get_type_hints(kind)
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
            else {}
        )
        if fields:
            known += fields
        elif origin is Literal:
            known += map(str, inner)
        elif kind in (float, str):
            known.append(kind.__name__)
        if isinstance(value, Mapping) and (fields or origin is dict):
            for key, item in cast("Mapping[Any, Any]", value).items():
                _convert(
                    item,
                    fields.get(key, Any) if fields else inner[1],
                    f"{where}.{key}".replace(": .", ": "),
                )
        elif isinstance(value, list) and origin in (list, tuple):
            for index, item in enumerate(cast("list[Any]", value)):
                _convert(item, inner[0], f"{where}[{index}]")
    if unknown := re.fullmatch("object contains unknown field `(.*)`", message):
        message = f"unknown key {unknown[1]!r}; {nearest(unknown[1], known)}"
    elif message.startswith("invalid enum value"):
        message = f"{value!r} is none of its values; {nearest(str(value), known)}"
    raise ConfigError(f"{where.removesuffix(': ')}: {message}") from None
