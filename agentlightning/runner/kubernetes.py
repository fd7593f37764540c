"""Runners as Kubernetes Jobs, through its REST API: a manifest of the user's, to which arguments are added as data.

No text is rendered: the manifest is a tree, and the Job that is sent is that tree with a few leaves of ours. What the
API lists is the truth: an answer that was lost starts no Job twice, and a pool that starts again takes its Jobs up.
"""
# ruff: noqa: UP013 - a line each

from __future__ import annotations

import contextlib
import copy
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import aiohttp
import msgspec
import yaml
from yarl import URL

from agentlightning.errors import AgentLightningError, ConfigError, ForbiddenError, NotFoundError, UnavailableError
from agentlightning.runner.pool import ENDED, LEAVING_SECONDS, RUNNING

POOL_LABEL: Final = "agentlightning/pool"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in a pod
_ANSWER_SECONDS: Final = 30.0
_KEPT_SECONDS: Final = 600  # of a Job that has ended, with its log
_LIFETIME_SECONDS: Final = 12 * 3600  # then Kubernetes lets it drain, pool or not
_DELETE: Final = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
# What is read here of a manifest; the rest passes. With what is added a name has 63 characters.
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?\Z")]
_Named = TypedDict("_Named", {"name": _Name, "namespace": NotRequired[_Name], "labels": NotRequired[dict[str, str]]})
_Env = TypedDict("_Env", {"env": list[dict[str, Any]], "envFrom": list[Any], "args": None}, total=False)
_Pod = TypedDict("_Pod", {"containers": Annotated[list[_Env], msgspec.Meta(min_length=1)]})
_Template = TypedDict("_Template", {"spec": _Pod})
_Spec = TypedDict("_Spec", {"template": _Template})
_Job = TypedDict("_Job", {"apiVersion": Literal["batch/v1"], "kind": Literal["Job"], "metadata": _Named, "spec": _Spec})


def read_manifest(path: Path) -> dict[str, Any]:
    """A Job in a YAML or JSON file. ConfigError where it is none, sets `args`, or names no Secret for the key."""
    try:
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
        runner = msgspec.convert(manifest, _Job)["spec"]["template"]["spec"]["containers"][0]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no manifest of a Job for runners: {error}") from None
    keys = [one for one in runner.get("env", []) if one.get("name") == "AGL_KEY"]
    if any("valueFrom" not in one for one in keys) or not (keys or "envFrom" in runner):
        needed = "env: [{name: AGL_KEY, valueFrom: {secretKeyRef: {name: agl, key: AGL_KEY}}}]"
        raise ConfigError(f"{path}: the first container needs the server's key from a Secret: {needed}")
    return manifest


def job_of(manifest: dict[str, Any], name: str, arguments: Sequence[str], drain: float) -> Any:
    """The Job of one runner."""
    job = copy.deepcopy(manifest)
    metadata, spec, pod = job["metadata"], job["spec"], job["spec"]["template"]["spec"]
    metadata |= {"name": name, "labels": metadata.get("labels", {}) | {POOL_LABEL: metadata["name"]}}
    spec |= {"backoffLimit": 0, "completions": 1, "parallelism": 1}
    spec.setdefault("activeDeadlineSeconds", _LIFETIME_SECONDS)
    spec.setdefault("ttlSecondsAfterFinished", _KEPT_SECONDS)
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", int(drain) + LEAVING_SECONDS)
    pod["containers"][0].setdefault("command", ["agl"])
    # Kubernetes replaces $(NAME) in arguments by the variable, keys included; $$ is how it writes a $.
    pod["containers"][0]["args"] = [argument.replace("$", "$$") for argument in ("runner", *arguments)]
    return job


class KubernetesJobs:
    """`Machines` of the cluster whose API is at `api`, which asks for no token (`kubectl proxy`), or of the one whose
    pod this is, as its service account. What cannot be reached, or is over a quota, is an UnavailableError."""

    def __init__(self, manifest: dict[str, Any], api: URL | None, drain: float) -> None:
        self._manifest, self._drain = manifest, drain
        self._pool: str = manifest["metadata"]["name"]
        self._token: Path | None = None  # read for each request: it may change
        namespace, trust = "default", True
        if api is None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            self._token = ACCOUNT / "token"
            if not host or not self._token.is_file():
                raise ConfigError("no pod with a service account: run `kubectl proxy`, with --kube-api its URL")
            api = URL.build(scheme="https", host=host, port=int(port))
            namespace = (ACCOUNT / "namespace").read_text().strip()
            trust = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
        self._jobs = api / "apis/batch/v1/namespaces" / manifest["metadata"].get("namespace", namespace) / "jobs"
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        self._session = aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(ssl=trust))

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        await self._ask("POST", self._jobs, job_of(self._manifest, f"{self._pool}-{name}", arguments, self._drain))

    async def runners(self) -> Mapping[str, str]:
        listed = await self._ask("GET", self._jobs.with_query(labelSelector=f"{POOL_LABEL}={self._pool}"))
        try:
            return {job["metadata"]["name"]: _seen(job) for job in msgspec.json.decode(listed)["items"]}
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"what answers at {self._jobs} is not the Kubernetes API") from None

    async def drain(self) -> None:
        for name, state in (await self.runners()).items():
            with contextlib.suppress(NotFoundError):
                if state == RUNNING:  # its pod is told to end, and drains
                    await self._ask("DELETE", self._jobs / name, _DELETE)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, url: URL, body: Any = None) -> bytes:
        try:
            headers = {} if self._token is None else {"Authorization": f"Bearer {self._token.read_text().strip()}"}
            request = self._session.request(method, url, json=body, headers=headers, allow_redirects=False)
            async with request as response:
                said = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            what = str(error) or type(error).__name__
            raise UnavailableError(f"no answer of the Kubernetes API at {self._jobs}: {what}") from None
        if response.status >= 300:
            raise _refusal(response.status, f"the Kubernetes API answered {response.status} to {method}", said)
        return said


def _refusal(status: int, what: str, said: bytes) -> AgentLightningError:
    what += f": {said[:2000].decode(errors='replace')}"  # a Status, with a message
    if status in (408, 409, 410, 429) or status >= 500 or "exceeded quota" in what:
        return UnavailableError(what)
    if status in (401, 403):
        return ForbiddenError(f"{what}. The service account must create, list and delete jobs (group batch)")
    return (NotFoundError if status == 404 else ConfigError)(what)


def _seen(job: Any) -> str:
    if job["metadata"].get("deletionTimestamp") is not None:
        return ENDED
    for one in job.get("status", {}).get("conditions") or []:
        if one["status"] == "True" and one["type"] in ("Complete", "Failed"):
            failed = one["type"] == "Failed" and one.get("reason") != "DeadlineExceeded"
            return f"{one.get('reason')}: {one.get('message')}" if failed else ENDED
    return RUNNING
