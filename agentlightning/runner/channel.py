"""Messages between a runner and an agent's process, and how the agent gets there.

Messages are msgpack after their length, over a socket pair.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing.spawn
import os
import pickle
import socket
import struct
import sys
import threading
from typing import Any, Final, cast

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.runner.agent import LitAgent
from agentlightning.types import AttemptedRollout, Attributes, NamedResources, Span

_LENGTH: Final = struct.Struct("!I")
_MAIN: Final = "__main__"
FAREWELL_SECONDS: Final = 2.0  # for what the agent's libraries do at the end of a process
_loading: list[str] = []  # of this process: the module whose import is under way


class Boot(msgspec.Struct, tag=True):
    """The first message to a process: the agent, as made by `packed`. If it is defined in the runner's main module,
    `main` is what `multiprocessing` needs to import that; `file` is the path of its module."""

    agent: bytes
    module: str
    file: str | None
    main: dict[str, str]


class Start(msgspec.Struct, tag=True):
    """Run the agent once, with these environment variables."""

    rollout: AttemptedRollout
    resources: NamedResources
    environment: dict[str, str]


class Cancel(msgspec.Struct, tag=True):
    """Cancel the running agent, if it lets itself be cancelled."""


class Recorded(msgspec.Struct, tag=True):
    """The attempt recorded a span."""

    span: Span


class NotLoaded(msgspec.Struct, tag=True):
    """The agent cannot be imported; none of it has run."""

    reason: str


class Ended(msgspec.Struct, tag=True):
    """The agent ended. `result` is what it returned, as spans; `failure` the exception it raised; `left` whether it
    left something running that could be taken for the next attempt."""

    result: list[Span]
    failure: Attributes | None = None
    left: bool = False


_ORDERS: Final = msgspec.msgpack.Decoder(Boot | Start | Cancel)
_REPORTS: Final = msgspec.msgpack.Decoder(Recorded | NotLoaded | Ended)


def framed(message: msgspec.Struct) -> bytes:
    """A message after its length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_report(reader: asyncio.StreamReader) -> Recorded | NotLoaded | Ended:
    """The next message of the agent's process. EOFError or ConnectionError at the end of the connection,
    `msgspec.MsgspecError` for a malformed message."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _REPORTS.decode(await reader.readexactly(size))


class Connection:
    """The agent's end of the socket pair. Any thread may send; a process that the agent has forked sends nothing."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._file = self._socket.makefile("rb")

    def receive(self) -> Boot | Start | Cancel | None:
        """Wait for the runner's next message; None if it has closed its end."""
        try:
            (size,) = _LENGTH.unpack(self._file.read(_LENGTH.size))
            return _ORDERS.decode(self._file.read(size))
        except (OSError, struct.error, msgspec.MsgspecError):  # the last two of what was cut off
            return None

    def send(self, message: msgspec.Struct) -> None:
        if os.getpid() == self._process:
            with self._lock:
                self._socket.sendall(framed(message))


def packed(agent: LitAgent[Any]) -> Boot:
    """An agent for another process: its name, if it is defined at the top of a module, or else its pickled state.
    ConfigError if it has neither."""
    module = str(agent.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    how = (
        "Define it at the top level of a module, or name it: 'module:agent', 'file.py:agent'. Or let it "
        "take `llm` and make its client from that; or take isolation='none' if it calls no model"
    )
    try:
        pickled = pickle.dumps(agent)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        raise ConfigError(f"the agent cannot be brought into another process: {error}. {how}") from None
    main: dict[str, str] = {}
    if module == _MAIN:
        given = multiprocessing.spawn.get_preparation_data("agent")
        main = {name: value for name, value in given.items() if name.startswith("init_main") and value}
        if not main:
            raise ConfigError(
                f"the agent is defined in an interactive session, where another process cannot import it. {how}"
            )
    return Boot(pickled, module, file, main)


def unpacked(boot: Boot) -> LitAgent[Any]:
    """The agent; its module is imported here. Raises what the import raises."""
    _loading.append(boot.module)
    try:
        if boot.main:
            multiprocessing.spawn.prepare(boot.main)
        elif boot.file is not None and boot.module not in sys.modules:
            found = importlib.util.find_spec(boot.module)
            if found is None or found.origin != boot.file:  # a file that was loaded under a name of its own
                spec = importlib.util.spec_from_file_location(boot.module, boot.file)
                assert spec is not None and spec.loader is not None
                sys.modules[boot.module] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
        agent = cast("LitAgent[Any]", pickle.loads(boot.agent))
    finally:
        _loading.clear()
    agent.check()
    return agent


def is_being_loaded() -> bool:
    """Whether this is an agent's process that is importing the agent, and must not start a run."""
    return bool(_loading)
