"""The notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

SOURCE = Path(__file__).parents[2] / "examples" / "notebook" / "first_training.py"


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = jupytext.read(SOURCE)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = notebook.cells[-1].outputs
    assert output.text.startswith("reward 0.")
