"""Which model answers which name."""

from __future__ import annotations

import logging

import pytest

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable


def entry(name: str, *, trainable: bool = True) -> ModelEntry:
    return ModelEntry(name, HttpBackend("http://127.0.0.1:9/v1"), trainable=trainable)


def test_an_unknown_name_reaches_the_only_trainable_model_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    table = ModelTable([entry("policy"), entry("judge", trainable=False)])
    assert table.resolve("judge").name == "judge"
    with caplog.at_level(logging.WARNING):
        assert [table.resolve("gpt-4o").name for _ in range(2)] == ["policy", "policy"]
        assert len(caplog.records) == 1
        assert [table.resolve("x" * 100_000 + end).name for end in "ab"] == ["policy", "policy"]
    assert len(caplog.records) == 2 and len(caplog.text) < 1000  # what is kept is short


@pytest.mark.parametrize("table", [ModelTable([entry("a"), entry("b")]), ModelTable([entry("a", trainable=False)])])
def test_an_unknown_name_is_refused_with_the_known_ones_where_the_choice_is_not_clear(table: ModelTable) -> None:
    with pytest.raises(BackendError, match="the models here are: a") as caught:
        table.resolve("gpt-4o")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_two_models_of_one_name_and_no_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models"):
        ModelTable([entry("a"), entry("a")])
    with pytest.raises(ConfigError, match="http://"):
        HttpBackend("localhost:8000")
