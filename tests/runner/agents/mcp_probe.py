"""Calls of one MCP session outside a rollout, in it, and where its record is walked again:
`mcp_probe.py LOG` prints what came of each as JSON. It runs with versions 1 and 2 of the
package `mcp`."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.semconv import OPERATION_NAME
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.mcp_calls import record_mcp_calls
from agentlightning.tracing.recorded import RecordedOperations, read_operations

SERVER = Path(__file__).with_name("mcp_server.py")
SOON: Any = timedelta(seconds=0.3) if version("mcp").startswith("1.") else 0.3


@agl.operation
async def told(session: Any) -> str:
    return (await session.call_tool("tell", {"what": "fixed"})).content[0].text


async def outcome(call: Any) -> Any:
    """The result as JSON, or the error."""
    try:
        return (await call).model_dump(mode="json")
    except Exception as error:  # noqa: BLE001 - whichever it is, it is compared
        return [type(error).__name__, str(error).partition("\n")[0]]


async def probe(log: Path) -> dict[str, Any]:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    progress: list[Any] = []

    async def on_progress(*made: Any) -> None:
        progress.append(made[:2])

    program = StdioServerParameters(command=sys.executable, args=[str(SERVER), str(log)])
    async with stdio_client(program) as streams, ClientSession(*streams) as session:
        await session.initialize()
        found: dict[str, Any] = {
            "parameters": list(inspect.signature(session.call_tool).parameters)
        }
        found["counted"] = await outcome(session.call_tool("count"))
        waiting = session.call_tool("wait", {"seconds": 0.1}, progress_callback=on_progress)
        found["waited"] = await outcome(waiting)
        found["progress"] = progress
        found["late"] = await outcome(session.call_tool("wait", {"seconds": 30}, SOON))
        task = asyncio.create_task(session.call_tool("wait", arguments={"seconds": 20}))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        found["cancelled"] = task.cancelled()
        found["unknown"] = await outcome(session.call_tool("nothing", {}))
        found["no object"] = await outcome(session.call_tool("count", [1]))
        found["counted again"] = await outcome(session.call_tool("count", {}))
        found["tools"] = len((await session.list_tools()).tools)
        found["told"] = await told(session)
        return found


def tried(tracer: AttemptTracer | None, log: Path) -> dict[str, Any]:
    """What came of the calls, what the server ran, and what was recorded."""
    log.write_text("")
    with bind(tracer) if tracer else nullcontext():
        found = asyncio.run(probe(log))
    spans = sorted(tracer.get_last_trace() if tracer else [], key=lambda span: span.start_time)
    names = [(span.attributes[OPERATION_NAME], span.status.status_code) for span in spans]
    return {"found": found, "ran": log.read_text().splitlines(), "spans": names}


def main() -> None:
    record_mcp_calls()  # before `mcp` is imported
    assert "mcp" not in sys.modules
    ended, first, again = (AttemptTracer(name, name) for name in ("ended", "first", "again"))
    ended.close()
    log = Path(sys.argv[1])
    outside = tried(None, log)
    assert outside == tried(ended, log)
    inside = tried(first, log)
    again.recorded = RecordedOperations(read_operations(first.get_last_trace(), every=True))
    print(json.dumps([outside, inside, tried(again, log)]))


if __name__ == "__main__":
    main()
