"""An OpenAI-compatible server whose answers are written beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def calling(name: str, arguments: object, number: int = 1) -> dict[str, Any]:
    """A message that calls a tool; arguments that are text are sent unchanged."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": text},
            }
        ]
    }


@contextmanager
def scripted(
    *script: dict[str, Any], conversations: bool = True
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL and the requests it gets. Each conversation gets the script's messages, or else all
    requests in turn."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            earlier = sum(message["role"] == "assistant" for message in request["messages"])
            said = script[earlier if conversations else len(asked)]
            asked.append(request)
            finish = "tool_calls" if "tool_calls" in said else "stop"
            message = {"role": "assistant", "content": None, **said}
            choice = {"index": 0, "finish_reason": finish, "message": message}
            body = {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [choice],
            }
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
