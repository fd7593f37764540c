"""Errors that are not the backend's, in the statuses and codes that OpenAI's clients know."""

from __future__ import annotations

import openai
import pytest

from agentlightning.errors import ConfigError, InvalidError, NotFoundError, UnavailableError
from agentlightning.gateway.serving import as_backend_error
from tests.gateway.talker import user
from tests.gateway.world import World


def test_errors_of_ours_have_words_that_clients_expect_and_of_others_only_the_log_has_the_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = [ConfigError("x"), NotFoundError("x"), InvalidError("x"), UnavailableError("x"), RuntimeError("a secret")]
    answered = [as_backend_error(error) for error in ours]
    assert [(error.status, error.code) for error in answered] == [
        (400, "invalid_request"),
        (404, "not_found"),
        (422, "invalid_request"),
        (503, "service_unavailable"),
        (500, "internal"),
    ]
    assert [str(error) for error in answered[:4]] == ["x"] * 4
    assert "secret" not in str(answered[4]) and "a secret" in caplog.text


@pytest.mark.anyio
async def test_a_store_that_is_away_is_a_503_that_clients_may_retry(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    await gateway_world.store.close()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="policy", messages=user("hello"))
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
