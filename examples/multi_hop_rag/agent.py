"""A multi-hop question answerer: an agent of the OpenAI Agents SDK that does not know whether it is
being trained.

The model issues searches, through an MCP tool over stdio, and decides when it knows the answer. It
works against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python agent.py "kind of group of
    word: lion"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    RunItem,
    Runner,
    ToolCallOutputItem,
    UserError,
    default_tool_error_function,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI
from retriever import cached_index
from wordnet import passages

SERVER = Path(__file__).with_name("server.py")
INSTRUCTIONS = "Search fact by fact, then reply: answer, kind in parentheses, colon, name."
MAX_TURNS = 6
ANSWER_SECONDS = 60


class SearchLost(ConnectionError):
    """The MCP server died, or hung, while this agent needed it."""


class Search:
    """The MCP server of this process. All agents share it: it starts when one first needs it, in a
    second or so, and again when one needs it after it was lost."""

    def __init__(self, index: Path, *options: str) -> None:
        self.arguments = [str(SERVER), str(index), *options]
        self.server: MCPServerStdio | None = None
        self.starting = asyncio.Lock()

    async def connected(self) -> MCPServerStdio:
        """The running server. SearchLost where it cannot be started; its own words are on
        stderr."""
        async with self.starting:
            if self.server is None:
                server = MCPServerStdio(
                    {"command": sys.executable, "args": self.arguments},
                    cache_tools_list=True,
                    client_session_timeout_seconds=ANSWER_SECONDS,
                    failure_error_function=lambda context, error: self.explain(
                        server, context, error
                    ),
                )
                try:
                    await server.connect()
                except Exception as error:
                    raise SearchLost(f"the search server did not start: {error}") from error
                self.server = server
            return self.server

    async def explain(
        self, server: MCPServerStdio, context: RunContextWrapper[Any], error: Exception
    ) -> str:
        """What the model is told of a search that failed because of what it asked for. SearchLost
        if it was not: the rollout ends there, and the next that begins gets a new server."""
        if self.server is server:
            if isinstance(error, (ModelBehaviorError, UserError)):
                return default_tool_error_function(context, error)
            await self.close()
        raise SearchLost(f"the search server was lost: {error}") from error

    async def close(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.cleanup()


async def run(
    question: str, search: Search, *, client: AsyncOpenAI | None = None, model: str = "policy"
) -> tuple[str, list[RunItem]]:
    """Work on one question. Return the last message, and all items of the conversation; an empty
    text if the model asks for what does not exist, or for too much. SearchLost names the reason
    where the server is at fault."""
    if client is None:
        async with AsyncOpenAI() as own:
            return await run(question, search, client=own, model=model)
    server = await search.connected()
    agent = Agent(
        "researcher",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel(model, client),
        mcp_servers=[server],
    )
    try:
        # The SDK sends its traces to api.openai.com, wherever the model is.
        result = await Runner.run(
            agent, question, max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True)
        )
        return str(result.final_output), result.new_items
    except (MaxTurnsExceeded, ModelBehaviorError) as error:
        return "", error.run_data.new_items if error.run_data else []
    except UserError as error:  # what the SDK makes of an exception in a tool
        if isinstance(error.__cause__, SearchLost):
            raise error.__cause__ from None
        if search.server is not server:
            raise SearchLost(f"the search server was lost to another agent: {error}") from error
        raise


def read(items: list[RunItem]) -> list[str]:
    """The results of all searches."""
    outputs = [item.output for item in items if isinstance(item, ToolCallOutputItem)]
    return [output["text"] if isinstance(output, dict) else str(output) for output in outputs]


async def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a question by searching an index.")
    parser.add_argument("question")
    parser.add_argument("--model", default="policy", help="the model name to ask the endpoint for")
    options = parser.parse_args()
    search = Search(cached_index(passages()), "--top", "3", "--words", "40")
    try:
        text, items = await run(options.question, search, model=options.model)
        print(*read(items), text or "no answer", sep="\n\n")
    finally:
        await search.close()


if __name__ == "__main__":
    asyncio.run(main())
