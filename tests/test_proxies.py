"""A company's proxy, as the environment names it: what goes through it, and what does not."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trustme

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.connection import UNREACHABLE, BackendConnection
from agentlightning.proxies import proxy_for, spare_this_machine
from agentlightning.rewards.chat_completion import complete
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import LLM

pytestmark = pytest.mark.anyio

COMPLETION = b"""{"object": "chat.completion", "id": "1", "model": "m", "created": 1, "choices": [
    {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}"""
HOST = "model.invalid"  # which nothing but a proxy can find


class Proxy:
    """Answers requests for http:// itself, and leads those for https:// to the server at `port`."""

    def __init__(self, port: int | None = None, refuses: bool = False) -> None:
        self.heads: list[bytes] = []
        self._port = port
        self._refuses = refuses

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if self._refuses:
                writer.write(b"HTTP/1.1 407 Who are you\r\ncontent-length: 0\r\n\r\n")
            elif head.startswith(b"CONNECT"):
                there = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
                await asyncio.gather(_copied(reader, there[1]), _copied(there[0], writer))
            else:
                writer.write(_answer(COMPLETION))
            await writer.drain()
        writer.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
    writer.close()


def _answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


async def ask(url: str) -> bytes:
    connection = BackendConnection(url, timeout_seconds=5)
    connection.retries = False
    try:
        async with connection.posted(connection.url("models"), b"{}", accepted=True) as response:
            return await response.read()
    finally:
        await connection.close()


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_a_hosted_model_is_asked_through_the_proxy(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy()
    async with proxy.served() as address:
        monkeypatch.setenv("HTTP_PROXY", f"{scheme}ada:p%40ss@{address}")
        assert await ask(f"http://{HOST}:8000/v1") == COMPLETION
    assert proxy.heads[0].startswith(b"POST http://model.invalid:8000/v1/models HTTP/1.1\r\n")
    assert b"\r\nproxy-authorization: basic ywrhonbac3m=\r\n" in proxy.heads[0].lower()


async def test_an_https_server_is_reached_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(_answer(COMPLETION))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        proxy = Proxy(server.sockets[0].getsockname()[1])
        async with proxy.served() as address:
            monkeypatch.setenv("HTTPS_PROXY", f"http://ada:secret@{address}")
            assert await ask(f"https://{HOST}/v1") == COMPLETION
    assert proxy.heads[0].startswith(b"CONNECT model.invalid:443 HTTP/1.1\r\n")
    assert b"\r\nproxy-authorization: basic" in proxy.heads[0].lower()
    assert b"proxy-authorization" not in heads[0].lower(), (
        "the proxy's password is for the proxy alone"
    )


async def test_a_proxy_that_refuses_or_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Proxy(refuses=True).served() as address:
        monkeypatch.setenv("HTTPS_PROXY", f"http://ada:secret@{address}")
        with pytest.raises(BackendError, match="Who are you") as told:
            await ask(f"https://{HOST}/v1")
        assert told.value.code == UNREACHABLE and "secret" not in str(told.value)
    with pytest.raises(BackendError, match=address) as told:
        await ask(f"https://{HOST}/v1")
    assert told.value.code == UNREACHABLE and "secret" not in str(told.value)


async def test_judges_and_the_store_of_a_server_go_through_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Proxy()
    async with proxy.served() as address:
        monkeypatch.setenv("HTTP_PROXY", f"http://{address}")
        answer = await complete(LLM(endpoint=f"http://{HOST}/v1", model="judge"), [], timeout=5)
        assert answer.text == "hi"
        store = LightningStoreClient(f"http://{HOST}", patience=0)
        with pytest.raises(ConfigError, match="not the server of a store"):
            await store.statistics()
        await store.close()
    assert [head.split()[1] for head in proxy.heads] == [
        b"http://model.invalid/v1/chat/completions",
        b"http://model.invalid/api/v1/statistics",
    ]


@pytest.mark.parametrize(
    ("url", "through"),
    [
        ("http://model.example.com/v1", True),
        ("https://model.example.com/v1", False),  # no HTTPS_PROXY
        ("http://127.0.0.1:8000/v1", False),
        ("http://localhost:8000/v1", False),
        ("http://[::1]:8000/v1", False),
        ("http://10.1.2.3:8000/v1", False),
        ("http://gpu.corp.internal:8000/v1", False),
    ],
)
def test_what_is_here_or_named_goes_direct(
    url: str, through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.corp:3128")
    monkeypatch.setenv("NO_PROXY", "10.1.2.3,.corp.internal")
    assert proxy_for(url) == ("http://proxy.corp:3128" if through else None)


def test_a_proxy_that_does_not_speak_http_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://ada:secret@proxy.corp:1080")
    with pytest.raises(ConfigError, match="HTTPS_PROXY names a proxy of the kind socks5") as told:
        BackendConnection("https://api.example.com/v1")
    assert "secret" not in str(told.value)


def test_libraries_and_agents_reach_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_this_machine()
    assert "NO_PROXY" not in os.environ, "where there is no proxy, nothing is set"
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.corp:3128")
    monkeypatch.setenv("NO_PROXY", ".corp.internal")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.delenv("no_proxy")  # and is removed again at the end
    spare_this_machine()
    spare_this_machine()
    for name in ("NO_PROXY", "no_proxy"):
        assert os.environ[name] == ".corp.internal,localhost,127.0.0.1,::1"
    assert proxy_for("https://gpu.corp.internal") is None


PROGRAM = """
import openai, agentlightning as agl

ASKED = {"model": "main", "messages": [{"role": "user", "content": "hi"}]}

@agl.rollout
async def agent(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(**ASKED)
    own = await agl.openai_client(llm).chat.completions.create(**ASKED)
    return float(answer.choices[0].message.content == own.choices[0].message.content == "hi")

if __name__ == "__main__":
    models = {"main": {"endpoint": "http://model.invalid/v1", "frozen": True}}
    print([task.reward for task in agl.Trainer(models=models, progress=False).dev(agent, [{}])])
"""


@pytest.mark.slow
async def test_an_agents_calls_reach_the_gateway_directly_and_the_model_through_the_proxy(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    proxy = Proxy()
    async with proxy.served() as address:
        environment = {
            **os.environ,
            "HTTP_PROXY": f"http://{address}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        program = await asyncio.create_subprocess_exec(
            sys.executable, "program.py", cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE
        )
        out, err = await asyncio.wait_for(program.communicate(), 120)
    assert out.decode().endswith("[1.0]\n"), (out + err).decode()
    assert {head.split()[1] for head in proxy.heads} == {
        b"http://model.invalid/v1/chat/completions"
    }


@pytest.mark.parametrize(
    "proxy", ["http://me:gehe#im@proxy:3128", "me:geheim@proxy:99999", "http://"]
)
def test_a_proxy_that_cannot_be_read_is_told_without_its_password(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(ConfigError, match="HTTP_PROXY names no proxy") as told:
        BackendConnection("http://model.example.org/v1")
    assert "gehe" not in str(told.value)
