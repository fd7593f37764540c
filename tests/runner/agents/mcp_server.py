"""An MCP server over stdio, or over HTTP if it is given a port: `mcp_server.py LOG [PORT]`. Each
run of a tool leaves a line in LOG. It runs with versions 1 and 2 of the package `mcp`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

try:
    from mcp.server.mcpserver import Context, MCPServer
except ImportError:
    from mcp.server.fastmcp import Context
    from mcp.server.fastmcp import FastMCP as MCPServer
from mcp.types import SamplingMessage, TextContent

LOG = Path(sys.argv[1])
SERVER: Any = MCPServer("dice", log_level="CRITICAL")
state = {"counted": 0}


def note(line: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{line}\n")


@SERVER.tool()
def roll(sides: int) -> str:
    note(f"roll {sides}")
    return f"{random.randrange(10**9)} is what the dice show."


@SERVER.tool()
def look(city: str) -> dict[str, Any]:
    note(f"look {city}")
    return {"city": city, "degrees": random.random(), "places": [None, True, "ä\u2028"]}


@SERVER.tool()
def refuse(reason: str) -> str:
    note(f"refuse {reason}")
    raise ValueError(f"{reason} {random.randrange(10**9)}")


@SERVER.tool()
def tell(what: str) -> str:
    note(f"tell {what}")
    return {"secret": "sk-" + "a1b2c3d4" * 4, "much": "x" * (1 << 20), "fixed": "so"}[what]


@SERVER.tool()
def count() -> int:
    """The state of this server's process."""
    note("count")
    state["counted"] += 1
    return state["counted"]


@SERVER.tool()
async def sample(question: str, context: Context) -> str:
    """Ask the client's model."""
    note(f"sample {question}")
    message = SamplingMessage(role="user", content=TextContent(type="text", text=question))
    answer: Any = await context.session.create_message([message], max_tokens=8)
    return answer.content.text


@SERVER.tool()
async def wait(seconds: float, context: Context) -> str:
    note(f"wait {seconds}")
    import anyio

    await context.report_progress(1, 2)
    await anyio.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        SERVER.run(transport="streamable-http", port=int(sys.argv[2]))
    else:
        SERVER.run()
