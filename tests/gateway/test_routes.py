"""What an agent is told of errors that are not the backend's: statuses and codes as a client of OpenAI's knows them."""

from __future__ import annotations

import openai
import pytest

from agentlightning.errors import AgentLightningError, ConfigError, InvalidError, NotFoundError, UnavailableError
from agentlightning.gateway.serving import as_backend_error
from tests.gateway.talker import user
from tests.gateway.world import World


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("x"), 400, "invalid_request"),
        (NotFoundError("x"), 404, "not_found"),
        (InvalidError("x"), 422, "invalid_request"),
        (UnavailableError("x"), 503, "service_unavailable"),
    ],
)
def test_errors_of_ours_are_told_in_words_that_clients_expect(
    error: AgentLightningError, status: int, code: str
) -> None:
    told = as_backend_error(error)
    assert (told.status, told.code, str(told)) == (status, code, "x")


def test_of_other_errors_only_the_log_has_the_details(caplog: pytest.LogCaptureFixture) -> None:
    told = as_backend_error(RuntimeError("a secret"))
    assert (told.status, told.code) == (500, "internal")
    assert "secret" not in str(told) and "a secret" in caplog.text


@pytest.mark.anyio
async def test_a_store_that_is_away_is_a_503_that_clients_may_retry(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    await gateway_world.store.close()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="policy", messages=user("hello"))
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
