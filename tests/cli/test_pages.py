"""Whoever meets an error is told where to read on."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from agentlightning.cli import pages
from agentlightning.cli.main import COMMANDS, run
from agentlightning.errors import ConfigError, InUseError

DOCS = Path(__file__).parents[2] / "docs"


def headings(page: Path) -> set[str]:
    """The anchors of a page, as MkDocs makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", line.lower())).strip("-") for line in lines}


@pytest.mark.parametrize("page", sorted({*pages.OF_ERRORS.values(), *(page for _, page in COMMANDS.values())}))
def test_every_page_and_heading_there_is(page: str) -> None:
    name, _, heading = page.partition("#")
    assert (DOCS / f"{name}.md").is_file()
    assert not heading or heading in headings(DOCS / f"{name}.md")


def test_the_error_says_more_than_the_command() -> None:
    assert (pages.page_of(InUseError("x"), ["train"]) or "").endswith("docs/store.md")
    assert (pages.page_of(ConfigError("x"), ["data", "export"]) or "").endswith("datasets-from-traces.md")
    assert pages.page_of(ConfigError("x"), ["trian"]) is None


def test_a_published_documentation_is_linked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    published = metadata.metadata("agent-lightning-next")
    published["Project-URL"] = "Documentation, https://docs.example/agl/"
    monkeypatch.setattr(metadata, "metadata", lambda name: published)
    assert pages.address_of("upkeep#backup") == "https://docs.example/agl/upkeep/#backup"
    assert pages.address_of("upkeep") == "https://docs.example/agl/upkeep/"


@pytest.mark.parametrize(
    ("arguments", "page"),
    [(["store", "check", "--store", "none.db"], "docs/upkeep.md"), (["runner"], "docs/runners.md")],
)
def test_it_is_the_last_line_of_an_error(
    arguments: list[str], page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) != 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("see ") and last.endswith(page)


def test_what_a_server_wrote_into_an_error_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "show", "\x1b[31mred", "--store", "none.sqlite"]) == 1
    assert run(["store", "check", "--store", "\x1b]0;owned\x07"]) == 1
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().err)
