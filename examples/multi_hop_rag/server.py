"""Search as an MCP tool over stdio: `python server.py INDEX [--method bm25|dense] [--top 1]
[--words 20]`.

One process serves any number of conversations at once. It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from retriever import Index, answer


def make_server(index: Index, top: int, most: int | None) -> MCPServer:
    server = MCPServer("search", log_level="WARNING")

    @server.tool(description="Find the passage that fits the query best.", structured_output=False)
    def search(query: str) -> str:
        return answer(index, query, top, most)

    return server


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serve an index of passages as an MCP tool over stdio."
    )
    parser.add_argument("index", type=Path, help="a folder that retriever.py made")
    parser.add_argument("--method", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--top", type=int, default=1, help="how many passages a search returns")
    parser.add_argument("--words", type=int, help="how many words of each; all without it")
    options = parser.parse_args()
    try:
        index = Index(options.index, options.method)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"server.py: {error}")
    make_server(index, options.top, options.words).run()


if __name__ == "__main__":
    main()
