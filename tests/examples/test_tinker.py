"""The run files of examples/tinker: for a laptop and for a server, one line apart."""

from __future__ import annotations

import pytest

from agentlightning.cli.run_file import load_config
from tests.examples.loading import EXAMPLES


@pytest.mark.parametrize("name", ["hello", "guess", "twenty"])
def test_a_run_file_for_a_server_has_one_line_more(name: str) -> None:
    here, there = EXAMPLES / "tinker" / f"{name}.yaml", EXAMPLES / "tinker" / f"{name}-tinker.yaml"
    *same, own = there.read_text().splitlines()
    assert same == here.read_text().splitlines() and own.startswith("learner: ")
    assert load_config(here).learner is None and load_config(there).learner is not None
