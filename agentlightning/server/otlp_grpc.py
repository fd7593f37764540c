"""OTLP over gRPC: the same as OTLP over HTTP, on a port of its own, for exporters that speak nothing else.

This module knows gRPC. Whose a span is, is decided in `server.otlp`. It needs grpcio, an extra: nothing imports it
unless the port is asked for.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.server.access import Access
from agentlightning.server.failures import failure_of
from agentlightning.server.otlp import Intake
from agentlightning.store.base import LightningStore
from agentlightning.tracing.otlp import PROTOBUF, decode_traces, encode_response

logger = logging.getLogger(__name__)

_SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
_BODY_LIMIT: Final = 64 * 1024 * 1024  # bytes, before and after decompression
_GRACE_SECONDS: Final = 5
_LONGEST_MESSAGE: Final = 1000  # characters; it travels in the trailers, whose size clients limit
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class OtlpGrpcServer:
    """Serves TraceService at `host` and `port` (0: any free port) between `start` and `stop`.

    Callers show their key as metadata, `authorization: Bearer …` or `x-api-key: …`. `tls` names the files of a
    certificate chain and its key; without them the port speaks plain text."""

    def __init__(
        self,
        store: LightningStore,
        access: Access,
        host: str = "127.0.0.1",
        port: int = 4317,
        *,
        tls: tuple[Path, Path] | None = None,
        body_limit: int = _BODY_LIMIT,
    ) -> None:
        self._intake = Intake(store, access)
        self._host = host
        self._port = port
        self._tls = tls
        self._body_limit = body_limit
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        """What to give an exporter, such as `http://127.0.0.1:4317`; the real port once the server has started."""
        return f"{'http' if self._tls is None else 'https'}://{self._address()}"

    async def start(self) -> None:
        """Listen. ConfigError if the port is taken, or the host is not one of this machine's."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._body_limit),
                ("grpc.so_reuseport", 0),  # or two servers would share the port, each with half of the spans
            ]
        )
        handler = grpc.unary_unary_rpc_method_handler(self._export)  # of bytes: malformed ones are ours to answer
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),))
        try:
            if self._tls is None:
                self._port = server.add_insecure_port(self._address())
            else:
                self._port = server.add_secure_port(self._address(), _credentials(*self._tls))
        except RuntimeError as error:
            raise ConfigError(f"cannot serve OTLP/gRPC on {self._address()}: {error}; choose another port") from None
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Take no more spans, give running requests a few seconds, then close."""
        if self._server is not None:
            await self._server.stop(_GRACE_SECONDS)
            self._server = None

    def _address(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    async def _export(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            scope = await self._intake.admit(_headers(context))
            spans = await asyncio.to_thread(decode_traces, request, PROTOBUF)
            refused = await self._intake.add(scope, spans)
        except AgentLightningError as error:
            await _abort(context, _CODES[failure_of(error).code], str(error)[:_LONGEST_MESSAGE])
        except Exception:
            logger.exception("OTLP/gRPC export failed")
            await _abort(context, grpc.StatusCode.INTERNAL, "the server failed at this request; its log says why")
        return encode_response(refused, PROTOBUF)


def _headers(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """The caller's metadata in the shape of HTTP headers. `host` is where the caller is, since without an admin key
    only this machine is trusted and gRPC does not show which name was called."""
    headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
    headers["host"] = unquote(context.peer()).partition(":")[2]  # ipv4:127.0.0.1:50123, ipv6:[::1]:50123
    return headers


async def _abort(context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort raises")


def _credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    try:
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    except OSError as error:
        raise ConfigError(f"cannot read the TLS certificate or its key: {error}") from None
