"""A Kubernetes API on loopback that answers for Jobs as Kubernetes does, and a `kubectl` for it.

Its `faults` answer instead for as many requests as there are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

NAMESPACE = "agents"
KUBECTL = """#!%s -S
import json, sys, urllib.error, urllib.request
method = {"create": "POST", "get": "GET", "delete": "DELETE"}[sys.argv[1]]
body = sys.stdin.buffer.read() if "--filename=-" in sys.argv else None
request = urllib.request.Request("http://127.0.0.1:%d" + sys.argv[2].removeprefix("--raw="), body, method=method)
try:
    sys.stdout.buffer.write(urllib.request.urlopen(request).read())
except urllib.error.HTTPError as error:
    status = json.load(error)
    sys.exit(f"Error from server ({status['reason']}): {status['message']}")
"""


def failure(code: int, reason: str, message: str = "") -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response(
        {**status, "message": message or reason, "reason": reason, "code": code}, status=code
    )


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []
        self.faults: list[Callable[[web.Request], Awaitable[web.Response]]] = []
        self.programs = folder / "bin"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        if self.faults:
            return await self.faults.pop(0)(request)
        root = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
        if request.path == root and request.method == "POST":
            return await self.create(await request.json())
        if request.path == root and request.method == "GET":
            return self.listed(request)
        name = request.path.removeprefix(f"{root}/")
        if request.method == "DELETE" and name in self.jobs:
            self.deleted.append((name, request.query["propagationPolicy"]))
            del self.jobs[name]
            return web.json_response({"kind": "Status", "status": "Success"})
        return failure(404, "NotFound", f'jobs.batch "{name}" not found')

    def listed(self, request: web.Request) -> web.Response:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [job for job in self.jobs.values() if job["metadata"]["labels"].get(key) == value]
        return web.json_response(
            {"kind": "JobList", "apiVersion": "batch/v1", "metadata": {}, "items": found}
        )

    async def create(self, job: dict[str, Any]) -> web.Response:
        name = job["metadata"]["name"]
        if name in self.jobs:
            return failure(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        if len(name) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
            return failure(422, "Invalid", f'Job.batch "{name}" is invalid')
        self.jobs[name] = {**job, "status": {"active": 1}}
        return web.json_response(job, status=201)

    def end(self, name: str, failed: str | None = None) -> None:
        """A Job completes, or fails for a reason."""
        condition = {
            "type": "Failed" if failed else "Complete",
            "status": "True",
            "reason": failed or "",
            "lastProbeTime": None,
        }
        before = {"type": "SuccessCriteriaMet", "status": "True", "lastProbeTime": None}
        self.jobs[name]["status"] = {
            "conditions": [before, {**condition, "message": "as the pod ended"}]
        }


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[Cluster]:
    cluster = Cluster(folder)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", cluster.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster.programs.mkdir()
    kubectl = cluster.programs / "kubectl"
    kubectl.write_text(KUBECTL % (sys.executable, runner.addresses[0][1]))
    kubectl.chmod(0o755)
    try:
        yield cluster
    finally:
        await runner.cleanup()


def fault(
    code: int, reason: str, message: str = ""
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return failure(code, reason, message)

    return answer
