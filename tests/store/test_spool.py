"""Posted spans: sent in the background, in order, through restarts; bounded; refused ones reported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

import msgspec
import pytest
from aiohttp import web

from agentlightning.errors import AgentLightningError, ConfigError, InvalidError, NotFoundError, UnavailableError
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.journal import Journal
from agentlightning.store.spool import SpanSpool
from agentlightning.store.sql import SqlStore
from tests.store.away import (
    ADMIN_KEY,
    ServerProcess,
    cutting,
    free_port,
    numbered_span,
    numbers,
    strange,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sql(tmp_path, anyio_backend):
    opened = await SqlStore.open(tmp_path / "store.db")
    yield opened
    await opened.close()


@pytest.fixture
async def served(sql):
    async with HttpServer(create_app(sql, admin_key=ADMIN_KEY), port=free_port()) as server:
        yield server


@contextlib.asynccontextmanager
async def client_of(url, **options):
    client = LightningStoreClient(url, ADMIN_KEY, **{"patience": 60, **options})
    try:
        yield client
    finally:
        await client.close()


async def stored_numbers(store, leased):
    return numbers(await store.query_spans(leased.rollout_id))


def port_of(url):
    return int(url.rsplit(":", 1)[1])


# --- the ordinary way --------------------------------------------------------------------------------------------


async def test_posted_spans_arrive_in_the_order_posted(sql, served):
    leased = [await sql.start_rollout(index) for index in range(3)]
    async with client_of(served.url) as client:
        for number in range(700):
            await client.post_spans([numbered_span(one, number) for one in leased])
        await client.flush()
        for one in leased:
            assert await stored_numbers(sql, one) == list(range(700))
        assert client.refused == []


async def test_posted_spans_are_sent_without_a_flush(sql, served):
    leased = await sql.start_rollout(1)
    async with client_of(served.url) as client:
        with sql.events() as changes:
            await client.post_spans([numbered_span(leased, 1)])
            assert (await asyncio.wait_for(changes.get(), 30)).spans == [leased.rollout_id]


async def test_closing_delivers_what_was_posted(sql, served):
    leased = await sql.start_rollout(1)
    async with client_of(served.url) as client:
        await client.post_spans([numbered_span(leased, number) for number in range(3)])
    assert await stored_numbers(sql, leased) == [0, 1, 2]


async def test_a_flush_with_nothing_posted_needs_no_server():
    async with client_of("http://127.0.0.1:1") as client:
        await client.flush()


async def test_a_long_batch_is_sent_in_parts():
    batches: list[int] = []

    async def send(encoded):
        batches.append(len(encoded))

    spool = SpanSpool(send, batch_spans=10, batch_bytes=10**6)
    leased = await _some_rollout()
    await spool.post([numbered_span(leased, number) for number in range(25)])
    await spool.flush()
    assert batches == [10, 10, 5]
    await spool.close()

    batches.clear()
    spool = SpanSpool(send, batch_bytes=1000)
    await spool.post([numbered_span(leased, number, text="x" * 400) for number in range(3)])
    await spool.close()
    assert batches == [1, 1, 1]


async def _some_rollout():
    store = await SqlStore.open(":memory:")
    leased = await store.start_rollout(1)
    await store.close()
    return leased


# --- a server that goes away -------------------------------------------------------------------------------------


async def post_through_a_restart(tmp_path, seconds: float, **options) -> None:
    async with ServerProcess(tmp_path / "store.db") as server, client_of(server.url, **options) as client:
        leased = await client.start_rollout("task")
        half = asyncio.Event()

        async def post() -> None:
            for number in range(0, 4000, 4):
                await client.post_spans([numbered_span(leased, n, text="x" * 500) for n in range(number, number + 4)])
                if number == 2000:
                    half.set()
                await asyncio.sleep(0)

        posting = asyncio.create_task(post())
        await half.wait()
        await server.kill()
        await asyncio.sleep(seconds)
        await server.start()
        await posting
        await client.flush()
        assert await stored_numbers(client, leased) == list(range(4000))


async def test_no_span_is_lost_or_doubled_when_the_server_is_killed(tmp_path):
    await post_through_a_restart(tmp_path, 1)


async def test_no_span_is_lost_when_the_spool_fills_up_meanwhile(tmp_path):
    await post_through_a_restart(tmp_path, 1, spool_bytes=200_000)


@pytest.mark.slow
async def test_no_span_is_lost_when_the_server_is_away_for_half_a_minute(tmp_path):
    await post_through_a_restart(tmp_path, 30)


async def test_spans_whose_acknowledgement_was_lost_are_not_stored_twice(sql, served):
    leased = await sql.start_rollout(1)
    async with cutting(served.url) as proxy, client_of(proxy.url) as client:
        proxy.cuts = 2
        await client.post_spans([numbered_span(leased, number) for number in range(5)])
        await client.flush()
        assert proxy.cut == 2
        assert await stored_numbers(sql, leased) == [0, 1, 2, 3, 4]


async def test_a_flush_says_how_many_spans_remain_and_they_are_sent_later(sql):
    leased = await sql.start_rollout(1)
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}") as client:
        await client.post_spans([numbered_span(leased, number) for number in range(3)])
        with pytest.raises(UnavailableError, match=rf"3 spans were not acknowledged within 0\.5 s: .*{client.url}"):
            await client.flush(0.5)
        async with HttpServer(create_app(sql, admin_key=ADMIN_KEY), port=port):
            await client.flush()
            assert await stored_numbers(sql, leased) == [0, 1, 2]


async def test_closing_says_how_many_spans_could_not_be_delivered(caplog):
    leased = await _some_rollout()
    client = LightningStoreClient(f"http://127.0.0.1:{free_port()}", patience=0.3)
    await client.post_spans([numbered_span(leased, number) for number in range(3)])
    with caplog.at_level(logging.ERROR), pytest.raises(UnavailableError, match=r"3 spans .* are lost"):
        await client.close()
    assert "3 spans could not be delivered" in caplog.text
    await client.close()  # nothing is left to be said


# --- a full spool ------------------------------------------------------------------------------------------------


async def test_a_full_spool_holds_posters_back_until_there_is_room(sql):
    leased = await sql.start_rollout(1)
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}", spool_bytes=5000) as client:
        first = asyncio.create_task(client.post_spans([numbered_span(leased, n) for n in range(40)]))
        second = asyncio.create_task(client.post_spans([numbered_span(leased, n) for n in range(40, 80)]))
        done, _ = await asyncio.wait([first, second], timeout=0.3)
        assert not done
        async with HttpServer(create_app(sql, admin_key=ADMIN_KEY), port=port):
            await asyncio.gather(first, second)
            await client.flush()
        assert await stored_numbers(sql, leased) == list(range(80))


async def test_a_spool_that_stays_full_names_its_limit():
    leased = await _some_rollout()
    client = LightningStoreClient(f"http://127.0.0.1:{free_port()}", patience=0.3, spool_bytes=5000)
    with pytest.raises(UnavailableError, match=r"of 100 spans were not taken in 0\.3 s.* limit is 5000 bytes"):
        await client.post_spans([numbered_span(leased, number) for number in range(100)])
    with pytest.raises(UnavailableError, match="could not be delivered"):
        await client.close()


async def test_a_span_that_could_never_be_sent_is_refused_at_once():
    leased = await _some_rollout()
    async with client_of("http://127.0.0.1:1", spool_bytes=5000) as client:
        with pytest.raises(InvalidError, match="the spool takes 5000"):
            await client.post_spans([numbered_span(leased, 1), numbered_span(leased, 2, text="x" * 6000)])
        with pytest.raises(InvalidError, match=r"'step' .* cannot be sent"):
            await client.post_spans([numbered_span(leased, 1), numbered_span(leased, 2, odd=object())])
        await client.flush()  # the good ones of those were not taken either


# --- refused spans -----------------------------------------------------------------------------------------------


async def test_refused_spans_are_found_and_reported_and_the_others_stored(sql, served):
    told = []
    leased = await sql.start_rollout(1)
    gone = await _some_rollout()
    spans = [numbered_span(leased, number) for number in range(40)]
    spans[7] = numbered_span(leased, 7, value=float("nan"))
    spans[23] = numbered_span(gone, 23)

    def on_refused(refused):
        told.append(refused)
        raise RuntimeError("a defect of the caller")

    async with client_of(served.url, on_refused=on_refused) as client:
        await client.post_spans(spans)
        await client.flush()
        assert await stored_numbers(sql, leased) == [n for n in range(40) if n not in (7, 23)]
        assert [(one.span.span_id, type(one.error)) for one in client.refused] == [
            (spans[7].span_id, InvalidError),
            (spans[23].span_id, NotFoundError),
        ]
        assert told == client.refused


async def test_a_span_at_which_the_server_fails_does_not_hold_up_the_others():
    sent: list[str] = []

    async def send(encoded):
        names = [span.split(b"span_id")[1][1:17].decode() for span in encoded]
        if f"{3:016x}" in names:
            raise AgentLightningError("the server failed at this request; its log says why")
        sent.extend(names)

    leased = await _some_rollout()
    spool = SpanSpool(send)
    await spool.post([numbered_span(leased, number) for number in range(6)])
    await spool.flush()
    assert sent == [f"{number:016x}" for number in (0, 1, 2, 4, 5)]
    assert [one.span.attributes["number"] for one in spool.refused] == [3]
    await spool.close()


async def test_a_proxy_that_takes_only_short_requests_gets_short_requests(sql, served):
    leased = await sql.start_rollout(1)
    narrow = HttpServer(create_app(sql, admin_key=ADMIN_KEY, body_limit=4000))
    async with narrow, client_of(narrow.url) as client:
        await client.post_spans([numbered_span(leased, number, text="x" * 500) for number in range(30)])
        await client.flush()
        assert client.refused == []
    assert await stored_numbers(sql, leased) == list(range(30))


async def test_spans_wait_behind_a_page_that_stands_in_for_the_server(sql, served):
    """What a proxy shows during maintenance is no verdict on the spans."""
    leased = await sql.start_rollout(1)
    page = web.Response(status=404, body=b"<title>maintenance</title>", headers={"Content-Type": "text/html"})
    done = web.Response(body=b"\x91\x01", headers={"Content-Type": "application/msgpack"})
    async with strange(page, done) as proxy, client_of(proxy.url) as client:
        await client.post_spans([numbered_span(leased, 1)])
        await client.flush()
        assert (len(proxy.asked), client.refused) == (2, [])


async def test_spans_wait_for_a_server_that_takes_their_key(sql, caplog):
    """One that was restarted with another key, say."""
    leased, port = await sql.start_rollout(1), free_port()
    async with client_of(f"http://127.0.0.1:{port}") as client:
        async with HttpServer(create_app(sql, admin_key="another key"), port=port):
            await client.post_spans([numbered_span(leased, number) for number in range(3)])
            with pytest.raises(UnavailableError, match=r"3 spans were not acknowledged .*the key is not valid"):
                await client.flush(1.5)
        assert "the spool holds 3 spans" in caplog.text and "the key is not valid" in caplog.text
        async with HttpServer(create_app(sql, admin_key=ADMIN_KEY), port=port):
            await client.flush()
            assert client.refused == []
            assert await stored_numbers(sql, leased) == [0, 1, 2]


# --- spans on the disk -------------------------------------------------------------------------------------------

POSTER = """
import asyncio, sys
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import Span
import msgspec

async def main():
    client = LightningStoreClient(sys.argv[1], patience=60, spool_directory=sys.argv[2])
    await client.post_spans(msgspec.json.decode(sys.stdin.buffer.read(), type=list[Span]))
    print("posted", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def killed_poster(url, directory, spans) -> None:
    """Post spans from a process that is killed as soon as they are posted."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", POSTER, url, str(directory)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(spans))
    process.stdin.close()
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"posted\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def test_the_spans_of_a_killed_process_are_delivered_by_the_next(sql, served, tmp_path):
    leased = await sql.start_rollout(1)
    nowhere = f"http://127.0.0.1:{free_port()}"
    await killed_poster(nowhere, tmp_path / "spool", [numbered_span(leased, number) for number in range(1000)])
    assert await stored_numbers(sql, leased) == []
    async with client_of(served.url, spool_directory=tmp_path / "spool") as client:
        await client.post_spans([numbered_span(leased, 1000)])
        await client.flush()
        assert await stored_numbers(sql, leased) == list(range(1001))
    assert os.listdir(tmp_path / "spool") == []


async def test_they_are_delivered_by_a_client_that_posts_none_itself(sql, served, tmp_path):
    leased = await sql.start_rollout(1)
    left = Journal(tmp_path)
    left.append([msgspec.msgpack.encode(numbered_span(leased, 1))])
    left.close()
    async with client_of(served.url, spool_directory=tmp_path) as client:
        await client.flush()
    assert await stored_numbers(sql, leased) == [1]


async def test_what_could_not_be_delivered_is_kept_for_the_next_client(sql, served, tmp_path):
    leased = await sql.start_rollout(1)
    directory = tmp_path / "spool"
    away = LightningStoreClient(f"http://127.0.0.1:{free_port()}", patience=0.3, spool_directory=directory)
    await away.post_spans([numbered_span(leased, number) for number in range(3)])
    with pytest.raises(UnavailableError, match=f"3 spans .* kept in {directory}"):
        await away.close()
    async with client_of(served.url, spool_directory=directory) as client:
        await client.flush()
    assert await stored_numbers(sql, leased) == [0, 1, 2]


@pytest.mark.parametrize("status", [401, 403])
async def test_what_a_page_that_asks_for_a_login_was_sent_stays_on_the_disk(sql, served, tmp_path, status):
    leased = await sql.start_rollout(1)
    left = Journal(tmp_path)
    left.append([msgspec.msgpack.encode(numbered_span(leased, number)) for number in range(2)])
    left.close()
    page = web.Response(status=status, body=b"<title>log in</title>", headers={"Content-Type": "text/html"})
    async with strange(page) as proxy:
        client = LightningStoreClient(proxy.url, ADMIN_KEY, patience=0.5, spool_directory=tmp_path)
        await client.post_spans([numbered_span(leased, 2)])
        with pytest.raises(UnavailableError, match=r"log in.*check the key"):
            await client.close()
        assert proxy.asked and client.refused == []
    async with client_of(served.url, spool_directory=tmp_path) as client:
        await client.flush()
    assert await stored_numbers(sql, leased) == [0, 1, 2]


def test_a_record_that_was_cut_short_is_left_out_and_the_others_kept(tmp_path):
    journal = Journal(tmp_path)
    journal.append([b"one", b"two"])
    journal.append([b"three"])
    journal.close()
    (segment,) = tmp_path.iterdir()
    for cut in (1, 4, 8, 12):
        whole = segment.read_bytes()
        segment.write_bytes(whole[: len(whole) - cut] if cut < 12 else whole[:-2] + b"xx")
        assert [list(orphan.spans) for orphan in Journal(tmp_path).orphans()] == [[b"one", b"two"]]
        segment.write_bytes(whole)


def test_the_spans_of_a_living_process_are_left_alone(tmp_path):
    living = Journal(tmp_path)
    living.append([b"mine"])
    assert list(Journal(tmp_path).orphans()) == []
    living.close()
    assert [list(orphan.spans) for orphan in Journal(tmp_path).orphans()] == [[b"mine"]]


def test_settled_spans_leave_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("agentlightning.store.journal.SEGMENT_BYTES", 100)
    journal = Journal(tmp_path)
    for number in range(100):
        journal.append([b"x" * 20, b"y" * 20])
        assert len(list(tmp_path.iterdir())) <= number + 1
    journal.settled(150)
    assert 0 < len(list(tmp_path.iterdir())) <= 30
    journal.settled(50)
    (last,) = tmp_path.iterdir()
    assert last.stat().st_size == 0
    journal.append([b"again"])
    journal.close()
    assert [list(orphan.spans) for orphan in Journal(tmp_path).orphans()] == [[b"again"]]


def test_a_directory_that_cannot_be_used_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="spool_directory"):
        Journal(tmp_path / "file")
