"""Starting and stopping a server, and what a client makes of one that is not there."""

from __future__ import annotations

import asyncio
import resource
import ssl

import aiohttp
import pytest
import trustme

from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.server import serve
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio

WHOLE = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"
# Of nothing in the world; its password is "secret".
LOCKED_KEY = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGbMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAj3ZBP+FFsQ1wICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEKIdosBI2dBAqqwqkTvBYAwEQP3U
vrl1/WL9I0YBCi12HwIBL9d/aPPSqe7BxC+FQoriV1lcaDZaPudQP+ebwML/Evum
EUgDe6uJC9vWWPUh0tU=
-----END ENCRYPTED PRIVATE KEY-----
"""


async def test_a_taken_port_is_explained(store):
    async with HttpServer(create_app(store)) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"port {port} .* --port 0"):
            await HttpServer(create_app(store), port=port).start()


async def test_other_machines_are_only_served_with_an_admin_key(store):
    with pytest.raises(ConfigError, match="admin key"):
        HttpServer(create_app(store), host="0.0.0.0")
    async with HttpServer(create_app(store, admin_key=ADMIN_KEY), host="0.0.0.0"):
        pass
    with pytest.raises(ConfigError, match="8 characters"):
        create_app(store, admin_key="short")


async def test_with_a_certificate_the_server_speaks_https_alone(store, tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(certificate, append=number > 0)
    issued.private_key_pem.write_to_path(key)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with HttpServer(create_app(store), tls_cert=certificate, tls_key=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession(server.url) as http:
            answer = await http.get("/api/v1/statistics", ssl=trusting)
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get("/health")
        async with aiohttp.ClientSession(server.url.replace("https", "http")) as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get("/health")


async def test_unusable_certificates_are_explained(store, tmp_path):
    issued = trustme.CA().issue_cert("127.0.0.1")
    certificate, key, other, locked = (
        tmp_path / name for name in ("cert", "key", "other", "locked")
    )
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    locked.write_text(LOCKED_KEY)
    for cert_file, key_file, complaint in (
        (certificate, None, "both"),
        (tmp_path / "none", key, "none"),
        (certificate, other, "cannot be used"),
        (key, certificate, "cannot be used"),
        (certificate, locked, "unencrypted"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            HttpServer(create_app(store), tls_cert=cert_file, tls_key=key_file)


@pytest.mark.parametrize(
    "head", [b"GET /", b"GET /health HTTP/1.1\r\nx: ", b"GET /health HTTP/1.1\r\n"]
)
async def test_a_head_that_does_not_end_is_refused(store, head):
    line = b"a: b\r\n" if head.endswith(b"\n") else b"aaaaaa"
    async with HttpServer(create_app(store)) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        )
        with pytest.raises(OSError):
            writer.write(head)
            for _ in range(200):
                writer.write(line * 20_000)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        )
        for size in (100_000, 100_000, 100_000):  # each for itself
            writer.write(b"GET /health?%s HTTP/1.1\r\nhost: here\r\n\r\n" % (b"a" * (size // 2)))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status":"ok"}'))
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nx: ", WHOLE + b"GET"])
async def test_a_connection_without_a_whole_head_is_closed(store, monkeypatch, sent):
    monkeypatch.setattr(serve, "_IDLE_SECONDS", 0.2)
    async with HttpServer(create_app(store)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(60):
            assert (await reader.read()).startswith(b"HTTP/1.1 200" if WHOLE in sent else b"")
        writer.close()


async def test_what_comes_after_a_body_is_no_header(store):
    async with HttpServer(create_app(store, admin_key=ADMIN_KEY)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /api/v1/rollouts/query HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(b"2\r\n{}\r\n0\r\nauthorization: Bearer %b\r\n\r\n" % ADMIN_KEY.encode())
        assert b" 401 " in await reader.readline()
        writer.close()


async def test_many_connections_are_allowed_as_far_as_the_system_does(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(500, hard), hard))
    try:
        async with HttpServer(create_app(store)):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_stopping_server_does_not_wait_for_long_polls(store):
    server = HttpServer(create_app(store))
    await server.start()
    client = LightningStoreClient(server.url, patience=0.1)
    waiting = asyncio.create_task(client.dequeue_rollout(timeout=20))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(server.stop(), 3)
    with pytest.raises(UnavailableError):
        await waiting
    await client.close()
    queued = await store.enqueue_rollout("not lost")
    assert (await store.dequeue_rollout()).rollout_id == queued.rollout_id
