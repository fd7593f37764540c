"""The file of answered editing calls, after a person or a crash has changed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.algorithm.budget import Budget, Spending
from agentlightning.algorithm.prompt_search.editing import EditingModel
from agentlightning.errors import ConfigError
from agentlightning.types import LLM


@pytest.mark.parametrize("line", [b"{", b"{}", b'{"asked": "\xff"}'])
def test_a_line_that_is_no_call_is_named(tmp_path: Path, line: bytes) -> None:
    record = tmp_path / "editing_calls.jsonl"
    record.write_bytes(line + b"\n")
    model = LLM(endpoint="http://127.0.0.1:9/v1", model="")
    with pytest.raises(ConfigError, match=r"line 1 of .*editing_calls\.jsonl"):
        EditingModel(model, None, 1.0, 1.0, Spending(Budget()), record)
