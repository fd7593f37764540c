"""What the documentation shows exists: commands and their flags, keys of run files, names of the
package, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from agentlightning.cli.main import agl as command_line
from agentlightning.cli.run_file import load_config
from agentlightning.config import FIELDS, make_algorithm
from scripts.reference import keys
from tests.docs_pages import ROOT, SHELLS, read_blocks

PAGES = [
    *ROOT.glob("*.md"),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(*languages: str) -> Iterator[Any]:
    for page in PAGES:
        for block in read_blocks(page):
            if block.language in languages:
                yield pytest.param(block.body, id=block.place)


def commands(body: str) -> Iterator[list[str]]:
    """The words of each `agl …` in a shell's block, or of lines that begin so after a prompt."""
    for line in body.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;|\||&(?= |$)|<|>", line.split(" #")[0]):
            if found := re.search(r"(?:^|\s|\$ |/)agl (?P<rest>\S.*)", part):
                try:
                    words = shlex.split(found["rest"])
                except ValueError:
                    continue
                if re.fullmatch(r"[a-z][a-z-]*", words[0]) or words[0].startswith("--"):
                    yield words


@pytest.mark.parametrize("body", blocks(*SHELLS))
def test_a_command_and_its_flags_exist(body: str) -> None:
    for words in commands(body):
        context = click.Context(command_line, info_name="agl")
        command: click.Command = command_line
        rest = list(words)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(context, rest[0])
            if found is None and command is not command_line:
                break  # a group that takes what follows for its default command
            assert found is not None, f"agl {' '.join(words)}: no command {rest[0]!r}"
            command, rest = found, rest[1:]
        own = rest[: rest.index("--")] if "--" in rest else rest
        known = {
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        if isinstance(command, click.Group):
            continue
        for word in own:
            if word.startswith("--") and "{" not in word:
                flag = word.partition("=")[0]
                assert flag in {*known, "--help", "--version"}, (
                    f"agl {' '.join(words)}: no flag {flag}"
                )
        for key in (own[at + 1] for at, word in enumerate(own) if word == "--set"):
            assert re.split(r"[.=]", key)[0] in FIELDS, f"agl {' '.join(words)}: no key {key!r}"


@pytest.mark.parametrize("body", blocks("yaml"))
def test_a_run_file_has_keys_and_fields_that_exist(body: str, tmp_path: Path) -> None:
    values = yaml.safe_load(body)
    if not isinstance(values, dict) or not {*values} <= {*FIELDS}:
        pytest.skip("no run file")
    complete = {"agent": "agent.py:agent", "train_dataset": "tasks.jsonl"}
    if "environment" in values:
        complete = {}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(complete | values))
    algorithm = load_config(run_file).algorithm
    # these are opened when the algorithm is made
    if "traces" not in algorithm and "teacher" not in algorithm:
        make_algorithm(algorithm)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]
)
def test_links_to_files_and_scripts_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    for script in re.findall(r"(?:python |`)((?:scripts|benchmarks|examples)/[\w./]*\w)", text):
        assert (ROOT / script).exists(), script


def test_the_reference_says_what_every_key_of_a_run_file_means() -> None:
    rows = [row.split(" | ") for row in keys().splitlines()[2:]]
    assert {name.strip("| `") for name, *_ in rows} == {*FIELDS}
    assert [name for name, *_, meaning in rows if not meaning.strip(" |")] == []
