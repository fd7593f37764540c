"""`agl prompts diff`: better prompts as a patch of the program's own files.

A patch is shown where a run of the patched copy has sent the new texts; other texts are printed."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import yaml

from agentlightning.cli.options import json_option, note, print_json
from agentlightning.cli.run_file import load_config, repeatable_settings
from agentlightning.errors import ConfigError
from agentlightning.prompts.components import (
    FILE,
    PROMPTS,
    Pattern,
    changed_components,
    read_candidate,
)
from agentlightning.prompts.patching import Edit, applied, edits_for
from agentlightning.tracing.tree import printable
from agentlightning.types import PromptText

_SUFFIXES: Final = (".py", ".json", ".yaml", ".yml", ".md", ".txt")
_LEFT_OUT: Final = ("runs", "node_modules", "__pycache__", "site-packages")
_LARGEST: Final = 2**18  # bytes of a file that is searched
_MOST_FILES: Final = 2_000


@click.command()
@click.argument("candidate", metavar="RUN|FILE")
@click.argument(
    "run_file",
    metavar="[RUN.yaml]",
    required=False,
    type=click.Path(dir_okay=False, path_type=Path),
)
@click.option("--write", is_flag=True, help="Change the files.")
@json_option
def diff(candidate: str, run_file: Path | None, write: bool, as_json: bool) -> None:
    """Show better prompts as a patch of the files.

    The texts are those of a search's run, or of a file that `agl prompts --write` has written;
    RUN.yaml names the agent and its tasks (default: that of the run). Searched are Python, JSON,
    YAML, Markdown and text files in the agent's folder. A patch is shown if a run of the patched
    copy sends the new text; all other new texts are printed, with the reason."""
    prompts = read_candidate(candidate)
    wanted = {name: prompts.components[name] for name in sorted(changed_components(prompts))}
    program = Program.of(run_file or Path(candidate) / "run.yaml")
    found = {name: edits_for(program.files, text) for name, text in wanted.items()}
    edits = {name: variants for name, variants in found.items() if not isinstance(variants, str)}
    proved = program.proved(edits, wanted) if edits else {}
    changed = program.patched(proved)
    shown = "".join(
        line
        for path in sorted(changed)
        for line in _diff(program.files[path], changed[path], os.path.relpath(path))
    )
    left = {
        name: found[name] if name not in edits else "no patched copy sent the new text"
        for name in wanted
        if name not in proved
    }
    if write:
        program.write(changed)
    if as_json:
        texts = {name: {"reason": why, "text": wanted[name].text} for name, why in left.items()}
        print_json({"diff": shown, "patched": sorted(proved), "not_patched": texts})
        return
    click.echo(printable(shown), nl=False)
    for name, why in left.items():
        click.echo(
            printable(f"\n{name} is not patched: {why}. Its new text:\n\n{wanted[name].text}")
        )
    done = "written" if write else "shown; --write changes the files"
    note(f"{len(proved)} of {len(wanted)} texts are patched: {done}" if wanted else "no new text")


@dataclass
class Program:
    """The program of a run file: the settings of the run, the folder of the agent, and the files
    there that may hold prompts."""

    settings: dict[str, Any]
    folder: Path
    files: dict[Path, str]

    @classmethod
    def of(cls, run_file: Path) -> Program:
        """ConfigError if the agent is not in a file."""
        settings = repeatable_settings(load_config(run_file, (), {}))
        agent = settings.get("agent")
        place = agent.get("cwd") if isinstance(agent, dict) else str(agent).rpartition(":")[0]
        folder = Path(str(place))
        if not isinstance(agent, dict):
            folder = folder.parent
        if not folder.is_absolute() or not folder.is_dir():
            raise ConfigError(f"{run_file}: a patch needs an agent in a file, as agent.py:agent")
        folder = folder.resolve()
        return cls(settings, folder, _sources(folder))

    def proved(
        self, edits: Mapping[str, list[Edit]], wanted: Mapping[str, PromptText]
    ) -> dict[str, Edit]:
        """The edits with which a copy sent the new texts: all together, or else one by one, each
        beside those that are proved."""
        first = {name: variants[0] for name, variants in edits.items()}
        sent = self._sent(first, wanted)
        if sent == first.keys():
            return first
        proved: dict[str, Edit] = {}
        for name, variants in edits.items():
            for edit in variants:
                tried = {**proved, name: edit}
                if self._sent(tried, wanted) == tried.keys():
                    proved = tried
                    break
        return proved

    def patched(self, edits: Mapping[str, Edit]) -> dict[Path, str]:
        """The changed files."""
        by_path: dict[Path, list[Edit]] = {}
        for edit in edits.values():
            by_path.setdefault(edit.path, []).append(edit)
        return {path: applied(self.files[path], some) for path, some in by_path.items()}

    def write(self, changed: Mapping[Path, str]) -> None:
        """ConfigError if one of the files has changed since it was read; then none is written."""
        for path in changed:
            if _read(path) != self.files[path]:
                raise ConfigError(f"{path} has changed meanwhile: nothing is written; try again")
        for path, source in changed.items():
            path.write_bytes(source.encode())

    def _sent(self, edits: Mapping[str, Edit], wanted: Mapping[str, PromptText]) -> set[str]:
        """The components whose new text a patched copy sends, and the old one no more."""
        note(f"running a copy with {', '.join(edits)} patched …")
        with tempfile.TemporaryDirectory(prefix="agl-patched-") as directory:
            copy = Path(directory).resolve() / self.folder.name
            _mirror(self.folder, copy, self.patched(edits))
            moved = json.loads(
                json.dumps(self.settings["agent"]).replace(
                    json.dumps(str(self.folder))[1:-1], json.dumps(str(copy))[1:-1]
                )
            )
            resources = {**self.settings.get("initial_resources", {})}
            resources.pop(PROMPTS, None)
            run_file = Path(directory) / "run.yaml"
            run_file.write_text(
                yaml.safe_dump({**self.settings, "agent": moved, "initial_resources": resources})
            )
            command = [sys.executable, "-m", "agentlightning.cli.main", "prompts", "show"]
            done = subprocess.run(
                [*command, str(run_file), "--json", "-q"],
                cwd=directory,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            note(
                f"the copy failed: {done.stderr.strip().rpartition(chr(10))[2] or done.returncode}"
            )
            return set()
        components = json.loads(done.stdout.splitlines()[-1])["components"]
        return {name for name in edits if _is_sent(wanted[name], components)}


def _is_sent(prompt: PromptText, components: list[dict[str, Any]]) -> bool:
    """Whether the new text is among those that were sent, and the old one is not."""
    sent = [
        Pattern.of(each["sent"]).fill([values[0] for values in each["holes"]])
        for each in components
        if each["place"] == prompt.place
    ]
    new = Pattern.of(prompt.text)
    old = Pattern.of(prompt.sent)
    others = [text for text in sent if new.match(text) is None]
    return len(others) < len(sent) and all(old.match(text) is None for text in others)


def _sources(folder: Path) -> dict[Path, str]:
    """The files below a folder that may hold prompts. ConfigError if there are too many."""
    found: dict[Path, str] = {}
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and name[0] != ".")
        for name in sorted(names):
            path = Path(directory) / name
            if path.suffix not in _SUFFIXES or name == FILE or path.is_symlink():
                continue
            if len(found) == _MOST_FILES:
                raise ConfigError(
                    f"{folder} has more than {_MOST_FILES:,} files that may hold prompts: give the "
                    "agent a folder of its own"
                )
            source = _read(path)
            if source is not None:
                found[path] = source
    return found


def _read(path: Path) -> str | None:
    """The text of a file, with its line ends; None of one that is large, or no text."""
    try:
        return path.read_bytes().decode() if path.stat().st_size <= _LARGEST else None
    except (OSError, UnicodeDecodeError):
        return None


def _mirror(folder: Path, copy: Path, changed: Mapping[Path, str]) -> None:
    """Make a copy of a folder that shares all files but the changed ones."""
    copy.mkdir()
    for entry in folder.iterdir():
        target = copy / entry.name
        inner = {path: source for path, source in changed.items() if entry in path.parents}
        if entry in changed:
            target.write_bytes(changed[entry].encode())
            shutil.copymode(entry, target)
        elif inner:
            _mirror(entry, target, inner)
        elif entry.name != "__pycache__":
            target.symlink_to(entry)


def _diff(before: str, after: str, name: str) -> list[str]:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    ended: list[str] = []
    for line in lines:
        ended.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return ended
