"""Reads a run file (YAML) and flags into a complete, checked `RunConfig`, before anything starts.

An error names the file, the key with its path, and the nearest known key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import yaml

from agentlightning.cli.options import seconds_in
from agentlightning.cli.store_location import store_file
from agentlightning.config import (
    ALGORITHMS,
    FIELDS,
    RunConfig,
    convert,
    fields_of,
    is_grader_reference,
)
from agentlightning.data.references import is_reference, load_reference
from agentlightning.datasets.hub import check_model_path, is_hub_name
from agentlightning.errors import ConfigError, nearest
from agentlightning.learner.policy_config import AdamW, LoRA
from agentlightning.store.redaction import settings_without_secrets

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
) -> RunConfig:
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
            raise ConfigError(f"{where}: unknown key {key!r}; {_key_hint(str(key), values)}")
    if isinstance(limit := values.get("time_limit"), str):
        try:
            values["time_limit"] = seconds_in(limit, bare=True)
        except ValueError as error:
            raise ConfigError(f"{where}: time_limit: {error}") from None
    if isinstance(values.get("store"), str):
        values["store"] = store_file(values["store"], create=True)
    missing = [name for name in _required_keys(values) if values.get(name) is None]
    if missing:
        flags_hint = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        hint = "" if source else ", or name a run file: agl train run.yaml …"
        raise ConfigError(
            f"{where} lacks: {', '.join(missing)}; add the keys or give {flags_hint}{hint}"
        )
    return convert(values, RunConfig, f"{where}: ")


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same settings with absolute paths, which agents that change the working directory do not
    move."""
    names = (*_PATHS, "agent", "algorithm", "environment")
    values = {name: value for name in names if (value := getattr(config, name)) is not None}
    return msgspec.structs.replace(config, **_with_paths_from(Path.cwd() / "run.yaml", values))


def check_files(config: RunConfig) -> None:
    """ConfigError for a file or a model's folder that is missing, before libraries take seconds to
    load."""
    named = {
        "train_dataset": [config.train_dataset],
        "val_dataset": [config.val_dataset],
        "agent": [config.agent],
        "model": list(config.trained.values()),
    }
    for key, values in named.items():
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


def _key_hint(key: str, values: Mapping[str, Any]) -> str:
    """A hint for an unknown key: `write algorithm.group_size`, or the nearest known key."""
    named = values.get("algorithm")
    kind = ALGORITHMS.get(
        str(named.get("name", "grpo")) if isinstance(named, dict) else "grpo", "GRPO"
    )
    parts: dict[str, type[msgspec.Struct]] = {"optimizer": AdamW, "lora": LoRA}
    with contextlib.suppress(ConfigError):  # where the packages that train are missing
        parts["algorithm"] = fields_of(load_reference(f"agentlightning.algorithm:{kind}"))
    for owner, part in parts.items():
        if key in part.__struct_fields__:
            return f"write {owner}.{key}"
    return nearest(key, FIELDS)


def _required_keys(values: Mapping[str, Any]) -> tuple[str, ...]:
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
    return _with_paths_from(path, cast("dict[str, Any]", values))


def repeatable_settings(config: RunConfig) -> dict[str, Any]:
    """The run file that repeats the run: with absolute paths, without the run's directory and
    without secrets."""
    here = Path.cwd() / "run.yaml"
    own = ("run_dir", "resume")
    values: dict[str, Any] = settings_without_secrets(msgspec.to_builtins(config))
    given = [key for key in FIELDS if key not in own and values.get(key) is not None]
    values = _with_paths_from(here, {key: values[key] for key in given})
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
    return _path_from(path, value) if isinstance(value, str) and is_reference(value) else value


def _with_paths_from(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a run file at `path`, with paths relative to the current directory, or absolute
    if `path` is."""
    values |= {key: {"name": values[key]} for key in NAMED_KEYS if isinstance(values.get(key), str)}
    for key in _PATHS:
        if key in values:
            values[key] = _path_from(path, values[key], must_exist=key == "model")
    if isinstance(values.get("model"), dict):
        several = cast("dict[str, Any]", values["model"])
        values["model"] = {
            name: _path_from(path, model, must_exist=True) for name, model in several.items()
        }
    resources = values.get("initial_resources")
    if isinstance(resources, dict):
        given = cast("dict[str, Any]", resources)
        values["initial_resources"] = {name: _path_from(path, given[name]) for name in given}
    algorithm = values.get("algorithm")
    if isinstance(algorithm, dict):
        places = {key: algorithm[key] for key in ("traces", "teacher") if key in algorithm}
        values["algorithm"] = algorithm | {
            key: _path_from(path, place, must_exist=True) for key, place in places.items()
        }
    environment = values.get("environment")
    if isinstance(environment, dict):
        hub, _, name = str(environment.get("name")).partition(":")
        file, at, task = name.partition("@")
        if file.endswith(".py") or hub == "harbor":
            values["environment"] = {
                **environment,
                "name": f"{hub}:{_path_from(path, file)}{at}{task}",
            }
    agent = values.get("agent")
    if isinstance(agent, str):
        values["agent"] = _path_from(path, agent)
    elif isinstance(agent, dict):
        values["agent"] = _command_paths_from(path, cast("dict[str, Any]", agent))
    return values


def _command_paths_from(path: Path, agent: dict[str, Any]) -> dict[str, Any]:
    """A command runs in the run file's folder; a grader that is a reference is looked up there."""
    seen = {**agent, "cwd": _path_from(path, agent.get("cwd") or ".")}
    if "workspace" in agent:
        seen["workspace"] = _path_from(path, agent["workspace"])
    grader = agent.get("grader")
    if is_grader_reference(grader):
        seen["grader"] = _path_from(path, grader)
    return seen


def _path_from(run_file: Path, value: Any, must_exist: bool = False) -> Any:
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
