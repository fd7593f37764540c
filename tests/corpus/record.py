"""Records what an agent sends, for `add.py`: a server that passes everything on.

    python tests/corpus/record.py http://127.0.0.1:8000 DIRECTORY    # listens at http://127.0.0.1:8001

Point the agent at it instead of the server behind it, which may be an `agl server` or a provider. Each request becomes
a file.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from aiohttp import ClientSession, web

_HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding", "accept-encoding"}


def recorder(upstream: str, directory: Path) -> web.Application:
    directory.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count()

    async def passed_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        recorded = {"method": request.method, "path": request.path_qs, "headers": dict(request.headers)}
        recorded["body"] = json.loads(body) if body else None
        (directory / f"{next(numbers):03d}.json").write_text(json.dumps(recorded, indent=1), encoding="utf-8")
        headers = {name: text for name, text in request.headers.items() if name.lower() not in _HOP}
        async with (
            ClientSession() as session,
            session.request(request.method, upstream + request.path_qs, data=body, headers=headers) as answer,
        ):
            kept = {name: text for name, text in answer.headers.items() if name.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{tail:.*}", passed_on)
    return app


if __name__ == "__main__":
    web.run_app(recorder(sys.argv[1].rstrip("/"), Path(sys.argv[2])), host="127.0.0.1", port=8001)
