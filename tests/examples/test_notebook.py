"""The notebook runs from top to bottom; the stop button saves."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

SOURCE = Path(__file__).parents[2] / "examples" / "notebook" / "first_training.py"

# The stop button sends the signal, here at the second step.
STOPPED = """
import os, signal
from dataclasses import replace
from agentlightning.algorithm import NoProgress

class PressingStop(NoProgress):
    def step(self, step, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

trainer.progress, trainer.algorithm = PressingStop(), agl.GRPO(steps=10_000, tasks_per_step=2, max_tokens=8)
stopped = trainer.fit(agent, tasks)
print(stopped.stopped_because, len(stopped.metrics) >= 2, stopped.checkpoint.is_dir())
"""


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom_and_can_be_stopped(tmp_path: Path) -> None:
    notebook = jupytext.read(SOURCE)
    notebook.cells.append(nbformat.v4.new_code_cell(STOPPED))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, resources=where, coalesce_streams=True).execute()
    *_, training, _, result, stopped = notebook.cells
    assert len(training.outputs) == 1, training.outputs  # not one a line
    (shown,) = training.outputs
    assert "step 1/12" in shown.text and "step 12/12" in shown.text
    assert result.outputs[0].text.startswith("reward 0.")
    assert stopped.outputs[0].text == "stopped by the user True True\n"
