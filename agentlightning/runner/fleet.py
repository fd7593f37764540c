"""Runners on many machines, as many as the queue needs: one loop starts them and replaces those
that died.

Each is an `agl runner` that exits when idle: only it knows that it has not just leased a rollout.
`Machines` runs them: actors of Ray, or Kubernetes Jobs made from the user's manifest. Its list is
the truth, so a lost answer starts no runner twice."""
# ruff: noqa: UP013 - a line each

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import math
import os
import secrets
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, Protocol, TypedDict
from urllib.parse import quote

import msgspec
import yaml

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.runner.reports import patiently
from agentlightning.store.base import LightningStore
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import Condition

UNFINISHED: Final = Condition("status", "in", ["queuing", "preparing", "running", "requeuing"])
PERIOD_SECONDS: Final = 2.0
# with a server or machines that do not answer; runners go on meanwhile
PATIENCE_SECONDS: Final = 300.0
HEALTHY_SECONDS: Final = 60.0  # a runner that lived so long did not fail at its start
TURNS_TO_FAIL: Final = 6  # one after the other; the pauses between them add up to half a minute
CLEAN_UP_SECONDS: Final = 20.0
LEAVING_SECONDS: Final = 15  # beyond its drain a runner takes nine
RUNNING: Final = "running"
ENDED: Final = "ended"  # or drains


class Machines(Protocol):
    """Starts runners by name. UnavailableError for failures that may pass, after which the runner
    may exist all the same. `runners` says RUNNING, ENDED or why one failed; `close` waits for those
    that would end with this process."""

    async def start(self, name: str, arguments: Sequence[str]) -> None: ...
    async def runners(self) -> Mapping[str, str]: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class Pool:
    """Keeps runners on `machines` until `stop` is called: one per `each` rollouts, at most `most`.
    `show` gets lines to show."""

    store: LightningStore
    machines: Machines
    arguments: Sequence[str]
    most: int
    each: int
    show: Callable[[str], object]
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _ended: set[str] | None = None
    _failures: int = 0
    _not_before: float = 0.0

    def wanted(self, rollouts: int) -> int:
        """For `each` 8 and `most` 4: 0 → 0, 1 → 1, 9 → 2, 100 → 4."""
        return min(math.ceil(rollouts / self.each), self.most)

    def stop(self) -> None:
        """End the pool; runners finish their rollouts."""
        self._stopping.set()

    async def run(self) -> bool:
        """At the end, runners drain; False if that failed. AgentLightningError if runners keep
        failing."""
        drained = True
        try:
            await self._keep()
        finally:
            try:
                if self._ended is not None:  # else nothing was reached, and nothing started
                    await patiently(self.machines.drain, CLEAN_UP_SECONDS)
            except AgentLightningError as error:  # which must not hide why the pool ends
                self.show(f"runners could not be drained; they leave when they are idle: {error}")
                drained = False
            finally:
                await self.machines.close()
        return drained

    async def _keep(self) -> None:
        reached = time.monotonic()
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while not stopping.done():
                try:
                    await self._reconcile()
                    reached = time.monotonic()
                except UnavailableError as error:
                    if self._ended is None or time.monotonic() - reached > PATIENCE_SECONDS:
                        raise
                    self.show(f"tried again: {error}")
                await asyncio.wait({stopping}, timeout=PERIOD_SECONDS)
        finally:
            stopping.cancel()

    async def _reconcile(self) -> None:
        """Start and stop runners until there are as many as wanted, as far as possible now."""
        rollouts = await patiently(self._rollouts, PERIOD_SECONDS)
        running = self._running_of(await self.machines.runners())
        missing = self.wanted(rollouts) - len(running)
        if missing <= 0 or time.monotonic() < self._not_before:
            return
        self.show(f"{rollouts} rollouts, {len(running)} runners: starting {missing}")
        for _ in range(missing):
            if not self._stopping.is_set():
                await self.machines.start(f"runner-{secrets.token_hex(4)}", self.arguments)

    async def _rollouts(self) -> int:
        page = await self.store.page_rollouts(UNFINISHED, limit=1, with_total=True)
        return page.total or 0

    def _running_of(self, seen: Mapping[str, str]) -> list[str]:
        """The running runners. Those that failed since the last call delay the next start."""
        running = [name for name, state in seen.items() if state == RUNNING]
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in running}
        ended = seen.keys() - running
        # old failures are not this pool's
        fresh = set[str]() if self._ended is None else ended - self._ended
        self._ended = ended
        failed = sorted(name for name in fresh if seen[name] != ENDED)
        if left := len(fresh) - len(failed):
            self.show(f"{left} runners have left, {len(running)} run")
        if left or any(now - since > HEALTHY_SECONDS for since in self._since.values()):
            self._failures = 0
        if failed:
            what = "; ".join(f"{name} failed: {seen[name]}" for name in failed[:3])
            self._not_before = now + 2.0**self._failures
            self._failures = self._failures + 1
            if self._failures == TURNS_TO_FAIL:
                raise AgentLightningError(f"runners keep failing ({what}); their logs say why")
            self.show(what)
        return running


# --- Ray ------------------------------------------------------------------------------------------

_MAIN: Final = """import os, signal, threading
def follow():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=follow, daemon=True).start()
from agentlightning.cli.main import main; main()"""


class Keeper:
    """An actor with a runner. Only its process's environment has the key. The process has its own
    session, so that neither Ray nor Ctrl-C ends it in the middle of a rollout."""

    def __init__(self, arguments: Sequence[str], key: str | None, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, "runner", *arguments],
            env={**os.environ, "AGL_KEY": key or ""},
            # on another machine: that of Ray's working_dir
            cwd=directory if os.path.isdir(directory) else None,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def wait(self) -> int:
        return self._process.wait()

    def drain(self) -> None:
        self._process.terminate()


class RayActors:
    """`Machines` of the Ray cluster at RAY_ADDRESS, or of this machine alone."""

    def __init__(self, key: str | None, drain: float) -> None:
        self._ray: Any = importlib.import_module("ray")
        try:
            self._ray.init(logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster can be joined (RAY_ADDRESS): {error}") from None
        self._keeper = self._ray.remote(
            num_cpus=1, max_concurrency=2, scheduling_strategy="SPREAD"
        )(Keeper)
        self._key = key
        self._drain = drain
        self._actors: dict[str, tuple[Any, asyncio.Task[str]]] = {}

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        actor = self._keeper.remote(arguments, self._key, os.getcwd())
        self._actors[name] = actor, asyncio.create_task(self._outcome(actor))

    async def _outcome(self, actor: Any) -> str:
        try:
            code: int = await actor.wait.remote()
        except self._ray.exceptions.RayError as error:
            return str(error).partition("\n")[0]
        finally:
            self._ray.kill(actor)  # and gives its core back
        return ENDED if code in (0, 130) else f"exit code {code}"

    async def runners(self) -> Mapping[str, str]:
        return {
            name: task.result() if task.done() else RUNNING
            for name, (_, task) in self._actors.items()
        }

    async def drain(self) -> None:
        for actor, _ in self._actors.values():
            actor.drain.remote()

    async def close(self) -> None:
        try:
            if outcomes := [task for _, task in self._actors.values()]:
                await asyncio.wait(outcomes, timeout=self._drain + LEAVING_SECONDS)
        finally:
            self._ray.shutdown()


# --- Kubernetes -----------------------------------------------------------------------------------

POOL_LABEL: Final = "agentlightning/pool"
_KUBECTL_SECONDS: Final = 60.0
_KEPT_SECONDS: Final = 600  # of a Job that has ended, with its log
_LIFETIME_SECONDS: Final = 12 * 3600  # then Kubernetes lets it drain, pool or not
# What is read here of a manifest; the rest passes. With what is added a name has 63 characters.
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?\Z")]
_Named = TypedDict(
    "_Named", {"name": _Name, "namespace": _Name, "labels": NotRequired[dict[str, str]]}
)
_Env = TypedDict(
    "_Env", {"env": list[dict[str, Any]], "envFrom": list[Any], "args": None}, total=False
)
_Pod = TypedDict("_Pod", {"containers": Annotated[list[_Env], msgspec.Meta(min_length=1)]})
_Template = TypedDict("_Template", {"spec": _Pod})
_Spec = TypedDict("_Spec", {"template": _Template})
_Job = TypedDict(
    "_Job",
    {"apiVersion": Literal["batch/v1"], "kind": Literal["Job"], "metadata": _Named, "spec": _Spec},
)


def read_manifest(path: Path) -> dict[str, Any]:
    """A Job from a YAML or JSON file. ConfigError if it is none, sets `args`, or names no
    namespace, or no Secret for the key."""
    try:
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
        runner = msgspec.convert(manifest, _Job)["spec"]["template"]["spec"]["containers"][0]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no manifest of a Job for runners: {error}") from None
    keys = [variable for variable in runner.get("env", []) if variable.get("name") == "AGL_KEY"]
    if any("valueFrom" not in variable for variable in keys) or not (keys or "envFrom" in runner):
        needed = "env: [{name: AGL_KEY, valueFrom: {secretKeyRef: {name: agl, key: AGL_KEY}}}]"
        raise ConfigError(
            f"{path}: the first container needs the server's key from a Secret: {needed}"
        )
    return manifest


def job_of(manifest: dict[str, Any], name: str, arguments: Sequence[str], drain: float) -> Any:
    """The Job of a runner."""
    job = copy.deepcopy(manifest)
    metadata = job["metadata"]
    spec = job["spec"]
    pod = job["spec"]["template"]["spec"]
    metadata |= {
        "name": name,
        "labels": metadata.get("labels", {}) | {POOL_LABEL: metadata["name"]},
    }
    spec |= {"backoffLimit": 0, "completions": 1, "parallelism": 1}
    spec.setdefault("activeDeadlineSeconds", _LIFETIME_SECONDS)
    spec.setdefault("ttlSecondsAfterFinished", _KEPT_SECONDS)
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", int(drain) + LEAVING_SECONDS)
    pod["containers"][0].setdefault("command", ["agl"])
    # Kubernetes replaces $(NAME) in arguments by the variable, keys included; $$ is how it writes a
    # $.
    pod["containers"][0]["args"] = [
        argument.replace("$", "$$") for argument in ("runner", *arguments)
    ]
    return job


class KubernetesJobs:
    """`Machines` of the cluster that `kubectl` reaches from here: in a pod, its own, as its service
    account. UnavailableError if that fails or a quota is full."""

    def __init__(self, manifest: dict[str, Any], drain: float) -> None:
        self._manifest = manifest
        self._drain = drain
        self._pool: str = manifest["metadata"]["name"]
        self._jobs = f"/apis/batch/v1/namespaces/{manifest['metadata']['namespace']}/jobs"

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        job = job_of(self._manifest, f"{self._pool}-{name}", arguments, self._drain)
        await _kubectl("create", self._jobs, msgspec.json.encode(job))

    async def runners(self) -> Mapping[str, str]:
        listed = await _kubectl(
            "get", f"{self._jobs}?labelSelector={quote(f'{POOL_LABEL}={self._pool}')}"
        )
        try:
            return {
                job["metadata"]["name"]: _job_state(job)
                for job in msgspec.json.decode(listed)["items"]
            }
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the cluster does not answer with a list of Jobs: {error!r}"
            ) from None

    async def drain(self) -> None:
        for name, state in (await self.runners()).items():
            with contextlib.suppress(NotFoundError):
                if state == RUNNING:  # its pod drains, and ends
                    await _kubectl("delete", f"{self._jobs}/{name}?propagationPolicy=Background")

    async def close(self) -> None:
        """Nothing is open."""


async def _kubectl(verb: str, path: str, body: bytes | None = None) -> bytes:
    """The cluster's answer to a request. `kubectl` knows where it is, whom to trust and who we
    are."""
    words = (
        verb,
        f"--raw={path}",
        "--request-timeout=30s",
        *(() if body is None else ("--filename=-",)),
    )
    try:
        process = await asyncio.create_subprocess_exec(
            "kubectl", *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except FileNotFoundError:
        raise ConfigError(
            "a pool of Jobs needs `kubectl` on the PATH, which reaches the cluster"
        ) from None
    try:
        async with asyncio.timeout(_KUBECTL_SECONDS):
            answer, said = await process.communicate(body)
    except TimeoutError:
        raise UnavailableError(
            f"kubectl {verb} {path} took more than {_KUBECTL_SECONDS:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return answer
    reason = text_without_secrets(said.decode(errors="replace"))[-2000:]
    what = f"kubectl {verb} {path}: {reason.strip()}"
    if "(NotFound)" in what:
        raise NotFoundError(what)
    if "(Unauthorized)" in what or ("(Forbidden)" in what and "exceeded quota" not in what):
        raise ForbiddenError(
            f"{what}. It must be allowed to create, list and delete jobs (group batch)"
        )
    raise (ConfigError if "(Invalid)" in what or "(BadRequest)" in what else UnavailableError)(what)


def _job_state(job: Any) -> str:
    if job["metadata"].get("deletionTimestamp") is not None:
        return ENDED
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            failed = condition["type"] == "Failed" and condition.get("reason") != "DeadlineExceeded"
            return f"{condition.get('reason')}: {condition.get('message')}" if failed else ENDED
    return RUNNING
