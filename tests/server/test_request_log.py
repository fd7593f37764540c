"""The server's log: readable by people or by machines, and without a key in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import aiohttp
import pytest

from agentlightning.server.app import create_app
from agentlightning.server.request_log import ACCESS, Formatter
from agentlightning.server.serve import HttpServer
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What Agent Lightning logs."""
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = kept.append
    logger = logging.getLogger("agentlightning")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(handler)
    logger.setLevel(level)


def shown(records: list[logging.LogRecord]) -> str:
    return "\n".join(
        form.format(record) for form in (Formatter("text"), Formatter("json")) for record in records
    )


async def test_each_request_leaves_a_line_with_who_and_what_but_no_secret(store, records):
    issued = await store.issue_key(name="reader", scopes=["read"])
    attempt = await store.start_rollout(1)
    async with (
        HttpServer(create_app(store, admin_key=ADMIN_KEY, access_log=True)) as server,
        aiohttp.ClientSession(server.url) as http,
    ):
        for key in (ADMIN_KEY, issued.api_key, attempt.api_key, "sk-not-a-key-of-this-server"):
            await http.get("/api/v1/keys?limit=7", headers={"Authorization": f"Bearer {key}"})
        await http.get(f"/api/v1/rollouts/{issued.api_key}", headers={"x-api-key": ADMIN_KEY})
    lines = [
        json.loads(Formatter("json").format(record)) for record in records if record.name == ACCESS
    ]
    assert [(line["route"], line["status"], line["caller"]) for line in lines] == [
        ("/api/v1/keys", 422, "the admin key"),
        ("/api/v1/keys", 403, issued.key_id),
        ("/api/v1/keys", 403, f"attempt {attempt.attempt.attempt_id}"),
        ("/api/v1/keys", 401, None),
        ("/api/v1/rollouts/{rollout_id}", 404, "the admin key"),
    ]
    assert all(
        line["ms"] > 0 and line["level"] == "INFO" and line["time"].endswith("Z") for line in lines
    )
    for secret in (ADMIN_KEY, issued.api_key, attempt.api_key, "sk-not", "limit=7"):
        assert secret not in shown(records)


def test_what_looks_like_a_key_is_not_written_wherever_it_comes_from(records):
    logger = logging.getLogger("agentlightning.test")
    secret = "aglk-" + "x9" * 20
    try:
        raise ValueError(f"Authorization: Bearer {secret}")
    except ValueError:
        logger.exception(
            "cannot connect to %s with %s", "postgresql://agl:hunter2@db:5432/agl", secret
        )
    text = shown(records)
    assert secret not in text
    assert "hunter2" not in text
    assert "db:5432/agl" in text
    line = json.loads(Formatter("json").format(records[0]))
    assert line["level"] == "ERROR"
    assert "Traceback" in line["traceback"]


async def test_a_defect_is_logged_with_its_traceback_and_not_shown_to_the_caller(
    store, records, monkeypatch
):
    async def broken(call: object) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr(store, "perform", broken)
    async with HttpServer(create_app(store)) as server, aiohttp.ClientSession(server.url) as http:
        answer = await http.get("/api/v1/statistics")
        assert answer.status == 500
        assert "a defect" not in await answer.text()
    assert "LookupError: a defect" in shown(records)
