"""The server that answers: the one on the command line, or the one that an agent's own clients
would find.

This module knows addresses, kinds of servers and where their keys are, but not what they are used
for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec

from agentlightning.cli.options import Option, combined
from agentlightning.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from agentlightning.gateway.backend import Backend
    from agentlightning.gateway.backends.connection import BackendConnection
    from agentlightning.gateway.backends.factory import BackendKind
    from agentlightning.gateway.backends.http import HttpBackend, Kind
    from agentlightning.gateway.backends.tokens import SglangBackend

_HOSTS: dict[str, Kind] = {
    "anthropic.com": "anthropic",
    "azure.com": "azure",
    "openai.com": "openai",
}
_KEYS: dict[str, str] = {
    "openai": "OPENAI_API_KEY",
    "azure": "AZURE_OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
}
_OPENAI_URL = "https://api.openai.com/v1"
_ANTHROPIC_URL = "https://api.anthropic.com"


class Upstream(NamedTuple):
    """A server named on the command line."""

    url: str
    kind: BackendKind | None = None
    key: str | None = None
    tokenizer: str | None = None

    async def open(self) -> HttpBackend | SglangBackend:
        """The server as a backend. ConfigError as in `resolved`, and if the tokenizer cannot be
        read."""
        from agentlightning.gateway.backends.factory import make_backend

        found = await self.resolved()
        assert found.kind is not None
        return await asyncio.to_thread(
            make_backend, found.url, kind=found.kind, api_key=found.key, tokenizer=found.tokenizer
        )

    async def resolved(self) -> Upstream:
        """The same with kind, key and the `/v1` that `url` may lack; SGLang names its tokenizer.
        ConfigError if nothing answers there, or a hosted API needs a key."""
        from agentlightning.gateway.backends.factory import with_version

        hosted = _kind_by_host(self.url)
        kind = self.kind or hosted or await _kind_by_asking(self.url)
        key = self.key or os.environ.get(_KEYS.get(kind, ""))
        if hosted and not key:
            raise ConfigError(
                f"{self.url} needs a key; set {_KEYS[hosted]}, or give it with --backend-key"
            )
        url = with_version(self.url, kind)
        tokenizer = self.tokenizer
        if tokenizer is None and kind == "sglang":
            tokenizer = await _tokenizer(url, key)
        return Upstream(url, kind, key, tokenizer)

    async def only_model(self) -> str | None:
        """The name of the one model that the server lists; None if there are several, or it does
        not say."""
        try:
            async with connected(self.url, self.key) as connection:
                names = await listed_models(connection)
        except (BackendError, msgspec.DecodeError, LookupError, TypeError):
            return None
        return names[0] if len(names) == 1 else None


def with_backend(left_out: str = "as OPENAI_BASE_URL, OPENAI_API_KEY and the like say") -> Option:
    """`--backend` and its options, passed to the command as `backend`, an `Upstream` or None."""
    address = f"URL of the model server, such as http://localhost:8000/v1; default: {left_out}."
    options = combined(
        click.option("--backend", metavar="URL", help=address),
        click.option(
            "--kind",
            type=click.Choice(["vllm", "sglang", "openai", "azure", "anthropic"]),
            help=(
                "Kind of server; default: recognised by its address, or by asking "
                "whether it is vLLM."
            ),
        ),
        click.option(
            "--backend-key",
            metavar="KEY",
            envvar="AGL_BACKEND_KEY",
            show_envvar=True,
            help=("Its key; default: OPENAI_API_KEY, AZURE_OPENAI_API_KEY or ANTHROPIC_API_KEY."),
        ),
        click.option(
            "--tokenizer",
            metavar="ID|DIR",
            help=(
                "Render chats here, for a model on vLLM or SGLang; default for SGLang: "
                "the model's own."
            ),
        ),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(
            backend: str | None,
            kind: BackendKind | None,
            backend_key: str | None,
            tokenizer: str | None,
            **others: Any,
        ) -> Any:
            if backend is None and (kind or tokenizer):
                raise click.UsageError("--kind and --tokenizer need --backend URL")
            named = None if backend is None else Upstream(backend, kind, backend_key, tokenizer)
            return command(backend=named, **others)

        return options(wrapper)

    return decorate


async def backend_of_environment(environment: Mapping[str, str]) -> Backend:
    """The API that a program with these variables would call: OpenAI's, Anthropic's, or both.
    ConfigError without any."""
    from agentlightning.gateway.backends.factory import ByProtocol

    openai_url = environment.get("OPENAI_BASE_URL") or environment.get("OPENAI_API_BASE")
    anthropic_url = environment.get("ANTHROPIC_BASE_URL")
    openai = anthropic = None
    if openai_url or environment.get("OPENAI_API_KEY"):
        openai = await Upstream(
            openai_url or _OPENAI_URL, None, environment.get("OPENAI_API_KEY")
        ).open()
    if anthropic_url or environment.get("ANTHROPIC_API_KEY"):
        url = f"{(anthropic_url or _ANTHROPIC_URL).rstrip('/').removesuffix('/v1')}/v1"
        anthropic = await Upstream(url, "anthropic", environment.get("ANTHROPIC_API_KEY")).open()
    if openai is not None and anthropic is not None:
        return ByProtocol(openai, anthropic)
    found = openai or anthropic
    if found is None:
        raise ConfigError(
            "no server is known that would answer the program's calls; set OPENAI_API_KEY, "
            "OPENAI_BASE_URL or ANTHROPIC_API_KEY, or name one with --backend URL"
        )
    return found


def _kind_by_host(url: str) -> Kind | None:
    """The kind of a hosted API's address; None for other addresses. ConfigError for a malformed
    address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # a port out of range, half an IPv6 address
        host = None
    if not host:
        raise ConfigError(
            f"the server is {url!r}; it must be a URL such as http://localhost:8000/v1"
        )
    return next(
        (kind for name, kind in _HOSTS.items() if host == name or host.endswith(f".{name}")), None
    )


@contextlib.asynccontextmanager
async def connected(url: str, key: str | None = None) -> AsyncGenerator[BackendConnection]:
    """A connection for a question that is not repeated."""
    from agentlightning.gateway.backends.connection import BackendConnection

    connection = BackendConnection(url, api_key=key, timeout_seconds=10)
    connection.retries = False
    try:
        yield connection
    finally:
        await connection.close()


async def listed_models(connection: BackendConnection) -> list[str]:
    """The ids of the server's models. BackendError, DecodeError, LookupError or TypeError if it
    does not list them."""
    return [
        str(model["id"]) for model in (await _read(connection, connection.url("models")))["data"]
    ]


async def _read(connection: BackendConnection, url: str) -> Any:
    """The answer of a server to a GET. BackendError if it does not answer or refuses, DecodeError
    if it is no JSON."""
    async with connection.posted(url, None, accepted=True) as answer:
        return msgspec.json.decode(await answer.read())


async def _tokenizer(url: str, key: str | None) -> str:
    """The tokenizer of an SGLang server."""
    try:
        async with connected(url, key) as connection:
            return str(
                (await _read(connection, f"{connection.root}/get_model_info"))["tokenizer_path"]
            )
    except (BackendError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the server at {url} does not say as SGLang does which tokenizer it has: {error}"
        ) from None


async def _kind_by_asking(url: str) -> Kind:
    """`vllm` for a server that reports vLLM's version, `openai` for any other. ConfigError if
    nothing answers."""
    from agentlightning.gateway.backends.connection import BROKE_OFF, UNREACHABLE

    try:
        async with connected(url) as connection:
            answer = await _read(connection, f"{connection.root}/version")
    except (BackendError, msgspec.DecodeError) as error:
        if getattr(error, "code", None) in (UNREACHABLE, BROKE_OFF, "timeout"):
            raise ConfigError(
                f"nothing answers at {url} ({error}); start that server first, or say what it "
                "will be with --kind"
            ) from None
        return "openai"
    return "vllm" if isinstance(answer, dict) and "version" in answer else "openai"
