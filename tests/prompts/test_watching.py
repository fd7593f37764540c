"""The share of calls that a candidate in production is met by."""

from __future__ import annotations

import pytest

from agentlightning.prompts.watching import MetShare


def test_a_fall_is_one_warning_until_the_share_is_back(caplog: pytest.LogCaptureFixture) -> None:
    share = MetShare()
    for _ in range(150):
        share.add(True)
    assert (share.share, caplog.records) == (1.0, [])
    for _ in range(150):
        share.add(False)
    (warning,) = caplog.records
    assert "49 % of the latest 100 calls" in warning.message and "100 % before" in warning.message
    for _ in range(100):
        share.add(True)
    for _ in range(60):
        share.add(False)
    assert len(caplog.records) == 2
    assert share.calls == {"yes": 250, "no": 210}


def test_a_candidate_that_is_never_met_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    share = MetShare()
    for _ in range(99):
        share.add(False)
    assert not caplog.records
    share.add(False)
    assert "only 0 %" in caplog.text
