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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import aiohttp
import msgspec
import yaml
from yarl import URL

from agentlightning.errors import AgentLightningError, ConfigError, ForbiddenError, NotFoundError, UnavailableError
from agentlightning.runner.pool import ENDED, RUNNING

POOL_LABEL: Final = "agentlightning/pool"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in a pod
_ANSWER_SECONDS: Final = 30.0
_KEPT_SECONDS: Final = 600  # of a Job that has ended, with its log
_DELETE: Final = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
_GRACE_SECONDS: Final = 15  # beyond its drain a runner takes nine

# What is read here of a manifest, and of a list of Jobs; the rest passes. With what is added a name has 63 characters.
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?\Z")]
_Named = TypedDict("_Named", {"name": _Name, "namespace": NotRequired[_Name], "labels": NotRequired[dict[str, str]]})
_Env = TypedDict("_Env", {"env": list[dict[str, Any]], "envFrom": list[Any], "args": None}, total=False)
_Pod = TypedDict("_Pod", {"containers": Annotated[list[_Env], msgspec.Meta(min_length=1)]})
_Template = TypedDict("_Template", {"spec": _Pod})
_Spec = TypedDict("_Spec", {"template": _Template})
_Kind = TypedDict("_Kind", {"apiVersion": Literal["batch/v1"], "kind": Literal["Job"]})


class _Manifest(_Kind):
    metadata: _Named
    spec: _Spec


_Metadata = TypedDict("_Metadata", {"name": str, "deletionTimestamp": NotRequired[str | None]})
_Status = TypedDict("_Status", {"conditions": NotRequired[list[dict[str, Any]] | None]})
_Job = TypedDict("_Job", {"metadata": _Metadata, "status": NotRequired[_Status]})
_Jobs = TypedDict("_Jobs", {"items": list[_Job]})


def read_manifest(path: Path) -> dict[str, Any]:
    """A Job in a YAML or JSON file. ConfigError where it is none, sets `args`, or names no Secret for the key."""
    try:
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
        runner = msgspec.convert(manifest, _Manifest)["spec"]["template"]["spec"]["containers"][0]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no manifest of a Job for runners: {error}") from None
    keys = [one for one in runner.get("env", []) if one.get("name") == "AGL_KEY"]
    if any("valueFrom" not in one for one in keys) or not (keys or "envFrom" in runner):
        needed = "env: [{name: AGL_KEY, valueFrom: {secretKeyRef: {name: agl, key: AGL_KEY}}}]"
        raise ConfigError(f"{path}: the first container needs the server's key from a Secret: {needed}")
    return manifest


def job_of(manifest: dict[str, Any], name: str, arguments: Sequence[str], lifetime: float, drain: float) -> Any:
    """The Job of one runner. `lifetime` is when the pool ends it; Kubernetes does a little later, pool or not."""
    job = copy.deepcopy(manifest)
    metadata, spec, pod = job["metadata"], job["spec"], job["spec"]["template"]["spec"]
    metadata |= {"name": name, "labels": metadata.get("labels", {}) | {POOL_LABEL: metadata["name"]}}
    spec |= {"backoffLimit": 0, "completions": 1, "parallelism": 1}
    spec.setdefault("activeDeadlineSeconds", int(lifetime + drain) + 60)
    spec.setdefault("ttlSecondsAfterFinished", _KEPT_SECONDS)
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", int(drain) + _GRACE_SECONDS)
    pod["containers"][0].setdefault("command", ["agl"])
    # Kubernetes replaces $(NAME) in arguments by the variable, keys included; $$ is how it writes a $.
    pod["containers"][0]["args"] = [argument.replace("$", "$$") for argument in ("runner", *arguments)]
    return job


@dataclass(frozen=True)
class Api:
    """Where the Kubernetes API is, whom to trust, and a file with the token, read for each request: it may change."""

    url: URL
    token: Path | None = None
    authority: Path | None = None
    namespace: str = "default"

    @staticmethod
    def of_pod() -> Api:
        """That of the cluster whose pod this is, as its service account. ConfigError elsewhere."""
        if not (host := os.environ.get("KUBERNETES_SERVICE_HOST")) or not (ACCOUNT / "token").is_file():
            raise ConfigError(
                "no pod with a service account: run `kubectl proxy`, give --kube-api http://127.0.0.1:8001"
            )
        url = URL.build(scheme="https", host=host, port=int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")))
        return Api(url, ACCOUNT / "token", ACCOUNT / "ca.crt", (ACCOUNT / "namespace").read_text().strip())


class KubernetesJobs:
    """`Machines` of a cluster. What cannot be reached for a moment, or is over a quota, is an UnavailableError."""

    def __init__(self, manifest: dict[str, Any], api: Api, lifetime: float, drain: float) -> None:
        if not api.url.host or (api.token is not None and api.url.scheme != "https"):
            raise ConfigError(f"{api.url} is no URL of a Kubernetes API, or no https:// one, which a token needs")
        self._manifest, self._api, self._lifetime, self._drain = manifest, api, lifetime, drain
        self._pool: str = manifest["metadata"]["name"]
        namespace = manifest["metadata"].get("namespace", api.namespace)
        self._jobs = api.url / "apis/batch/v1/namespaces" / namespace / "jobs"
        trust = True if api.authority is None else ssl.create_default_context(cafile=api.authority)
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        self._session = aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(ssl=trust))

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        name = f"{self._pool}-{name}"
        await self._ask("POST", self._jobs, job_of(self._manifest, name, arguments, self._lifetime, self._drain))

    async def runners(self) -> Mapping[str, str]:
        said = await self._ask("GET", self._jobs.with_query(labelSelector=f"{POOL_LABEL}={self._pool}"))
        try:
            return {job["metadata"]["name"]: _seen(job) for job in msgspec.json.decode(said, type=_Jobs)["items"]}
        except msgspec.MsgspecError as error:
            raise ConfigError(f"what answers at {self._api.url} is not the Kubernetes API: {error}") from None

    async def stop(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):  # its pod is told to end, and drains
            await self._ask("DELETE", self._jobs / name, _DELETE)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, url: URL, body: Any = None) -> bytes:
        try:
            token = None if self._api.token is None else self._api.token.read_text().strip()
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            request = self._session.request(method, url, json=body, headers=headers, allow_redirects=False)
            async with request as response:
                said = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise UnavailableError(
                f"no answer of the Kubernetes API at {self._api.url}: {str(error) or type(error).__name__}"
            ) from None
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


def _seen(job: _Job) -> str:
    if job["metadata"].get("deletionTimestamp") is not None:
        return ENDED
    for one in job.get("status", _Status()).get("conditions") or []:
        if one["status"] == "True" and one["type"] in ("Complete", "Failed"):
            failed = one["type"] == "Failed" and one.get("reason") != "DeadlineExceeded"
            return f"{one.get('reason')}: {one.get('message')}" if failed else ENDED
    return RUNNING
