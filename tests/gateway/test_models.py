"""Which model answers which name, and which errors are told to clients."""

from __future__ import annotations

import logging

import pytest

from agentlightning.errors import (
    BackendError,
    ConfigError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.serving import as_backend_error


def entry(name: str, *, trainable: bool = True) -> ModelEntry:
    return ModelEntry(name, HttpBackend("http://127.0.0.1:9/v1"), trainable=trainable)


def test_an_unknown_name_reaches_the_only_trainable_model_with_one_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = ModelTable([entry("policy"), entry("judge", trainable=False)])
    assert table.resolve("judge").name == "judge"
    with caplog.at_level(logging.WARNING):
        assert [table.resolve("gpt-4o").name for _ in range(2)] == ["policy", "policy"]
        assert len(caplog.records) == 1
        assert [table.resolve("x" * 100_000 + end).name for end in "ab"] == ["policy", "policy"]
    assert len(caplog.records) == 2 and len(caplog.text) < 1000  # what is kept is short


@pytest.mark.parametrize(
    "table", [ModelTable([entry("a"), entry("b")]), ModelTable([entry("a", trainable=False)])]
)
def test_an_unknown_name_is_refused_with_the_known_ones_where_the_choice_is_not_clear(
    table: ModelTable,
) -> None:
    with pytest.raises(BackendError, match="the models here are: a") as caught:
        table.resolve("gpt-4o")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_two_models_of_one_name_and_no_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models"):
        ModelTable([entry("a"), entry("a")])
    with pytest.raises(ConfigError, match="http://"):
        HttpBackend("localhost:8000")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("x"), 400, "invalid_request"),
        (NotFoundError("x"), 404, "not_found"),
        (InvalidError("x"), 422, "invalid_request"),
        (UnavailableError("x"), 503, "service_unavailable"),
        (RuntimeError("a secret"), 500, "internal"),
    ],
)
def test_errors_have_codes_that_clients_know_and_unexpected_ones_no_details(
    error: Exception, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    answered = as_backend_error(error)
    assert (answered.status, answered.code) == (status, code)
    assert (str(answered) == "x") == (status < 500 or status == 503)
    assert ("a secret" in caplog.text) == (status == 500)
