"""`harness`: coding agents (Claude Code, Codex, opencode, …) as agents, unchanged.

A preset says how to point one of them at an attempt's model: by variables, flags, and files in a
home made for the attempt, so that your own configuration is neither read nor changed.
`harnesses.yaml` has the presets. `command` runs and grades them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from agentlightning.errors import ConfigError, nearest
from agentlightning.runner.command import (
    CommandAgent,
    CommandFailedError,
    CommandOutput,
    Grader,
    Program,
)
from agentlightning.runner.environment import inherited_environment

# Variables that a harness does not inherit: credentials, and what configures it, or leads to a
# user's own files.
_OWN: Final = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|SSH_AUTH|_PAT$|DATABASE_URL|KUBECONFIG|^(AIDER|ANTHROPIC|AWS|AZURE|CLAUDE|CODEX|GEMINI|GOOGLE|LITELLM|MSWEA"
    r"|OPENAI|OPENCODE|OTEL|QWEN|XDG)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Preset:
    """The way to run a harness; `harnesses.yaml` explains the fields."""

    program: str
    least: str
    install: str
    flags: tuple[str, ...]
    prompt: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])

    def check(self, path: str | None = None) -> None:
        """ConfigError where it is not installed (on `path`, default PATH)."""
        if shutil.which(self.program, path=path) is None:
            raise ConfigError(
                f"{self.program!r} is not on the PATH; install {self.least} or newer: "
                f"{self.install}"
            )

    def environment(self, variables: Mapping[str, str], home: Path) -> dict[str, str]:
        """Write its files below `home`; the variables of a process that calls the model which
        `variables` name (`agent_environment`). ConfigError where they name none."""
        if "OPENAI_MODEL" not in variables:
            raise ConfigError(
                "a harness needs a model: train or serve one, or give an endpoint and the model's "
                "name"
            )
        named = {
            "endpoint": "OPENAI_BASE_URL",
            "root": "ANTHROPIC_BASE_URL",
            "key": "OPENAI_API_KEY",
        }
        values = {place: variables[name] for place, name in named.items()}
        values |= {"model": variables["OPENAI_MODEL"], "home": str(home)}
        for name, text in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                _filled(text, {place: json.dumps(value)[1:-1] for place, value in values.items()}),
                encoding="utf-8",
            )
        # Its own spans are many, and say less than the calls that the gateway records.
        given = {name: value for name, value in variables.items() if not name.startswith("OTEL_")}
        return (
            _cleared(home)
            | given
            | {name: _filled(text, values) for name, text in self.env.items()}
        )


def _cleared(home: Path) -> dict[str, str]:
    """This process's variables without credentials and configuration, with `home` as home."""
    inherited = inherited_environment()
    return {name: value for name, value in inherited.items() if not _OWN.search(name)} | {
        "HOME": str(home)
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(endpoint|root|key|model|home)\}", lambda found: values[found[1]], text)


PRESETS: Final = msgspec.convert(
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")),
    dict[str, Preset],
)


def find_preset(name: str) -> Preset:
    """The preset of this name. ConfigError if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"there is no harness {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def harness(
    name: str,
    *,
    prompt: str = "{task}",
    arguments: Sequence[str] = (),
    workspace: str | os.PathLike[str] | None = None,
    grader: Grader | str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> CommandAgent:
    """An agent that runs an installed coding agent:
    `harness("codex", prompt="{task[prompt]}", grader=grade)`.

    `name` is one of `PRESETS`. `prompt` and further `arguments` may contain `{task}` and its
    fields, as in `command`. Each attempt works in its own directory, which begins as a copy of
    `workspace` (default: empty), with its own home and without this process's credentials; `env`
    adds variables. The agent runs whatever its model says without asking, so use a machine or
    container that you can lose.

    The `grader` gives the reward, as in `command`; `directory` of its output is the attempt's. A
    grader command runs in `cwd`. ConfigError for an unknown name."""
    preset = find_preset(name)
    words = (
        preset.program,
        *preset.flags,
        *arguments,
        *(word.replace("{prompt}", prompt) for word in preset.prompt),
    )
    place = Path(cwd or ".").absolute()
    copied = None if workspace is None else Path(workspace).absolute()
    program = HarnessProgram(shlex.join(words), dict(env or {}), place, preset, copied)
    graded = _Grading(grader, dict(env or {}), place) if isinstance(grader, str) else grader
    return CommandAgent(program, "auto", graded or _no_reward)


def _no_reward(task: Any, output: CommandOutput) -> None:
    """No reward: a harness prints what its model says, which must not grade itself."""


class _Grading(Program):
    """A command without credentials, since it may run what the harness wrote, such as tests."""

    def setting(
        self, variables: Mapping[str, str], own: Path
    ) -> tuple[dict[str, str], Path | None]:
        return {**_cleared(Path.home()), **variables}, self.cwd


@dataclass
class HarnessProgram(Program):
    """A harness with its preset, and the folder that its working directory is copied from."""

    preset: Preset
    workspace: Path | None

    def check(self) -> None:
        if self.workspace is not None and not self.workspace.is_dir():
            raise ConfigError(f"workspace is {str(self.workspace)!r}, which is no directory")
        self.preset.check(self.env.get("PATH"))

    async def run(
        self, task: Any, stdin: str, variables: Mapping[str, str], what: str, own: Path
    ) -> CommandOutput:
        # stdin would be part of the prompt
        output = await super().run(task, "", variables, self.preset.program, own)
        if output.directory.is_symlink():
            raise CommandFailedError(
                f"{self.preset.program} put a link in the place of the directory it works in"
            )
        return output

    def setting(
        self, variables: Mapping[str, str], own: Path
    ) -> tuple[dict[str, str], Path | None]:
        home = own / "home"
        directory = own / "workspace"
        for made in (home, directory):
            made.mkdir()
        if self.workspace is not None:
            shutil.copytree(self.workspace, directory, symlinks=True, dirs_exist_ok=True)
        return self.preset.environment(variables, home), directory
