"""Runners as Kubernetes Jobs, through its REST API: a manifest of the user's, to which arguments are added as data.

No text is rendered: the manifest is a tree, and the Job that is sent is that tree with a few leaves of ours. What the
API lists is the truth: an answer that was lost starts no Job twice, and a pool that starts again takes its Jobs up.
"""

from __future__ import annotations

import contextlib
import copy
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import aiohttp
import msgspec
import yaml
from yarl import URL

from agentlightning.errors import AgentLightningError, ConfigError, ForbiddenError, NotFoundError, UnavailableError
from agentlightning.runner.pool import Seen

POOL_LABEL: Final = "agentlightning/pool"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in a pod
_ANSWER_SECONDS: Final = 30.0
_KEPT_SECONDS: Final = 600  # of a Job that has ended, with its log
_GRACE_SECONDS: Final = 15  # beyond its drain a runner takes nine
_NAME: Final = r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?\Z"  # and what is added makes at most 63 characters


# The fields that are read here, of a manifest and of the API's answers; others pass.
class _Named(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    namespace: Annotated[str, msgspec.Meta(pattern=_NAME)] | None = None
    labels: dict[str, str] = {}


class _Container(msgspec.Struct):
    image: str
    args: None = None
    env: list[dict[str, Any]] = []
    envFrom: list[Any] = []


class _Pod(msgspec.Struct):
    containers: Annotated[list[_Container], msgspec.Meta(min_length=1)]


class _PodTemplate(msgspec.Struct):
    spec: _Pod


class _Spec(msgspec.Struct):
    template: _PodTemplate


class _Manifest(msgspec.Struct):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: _Named
    spec: _Spec


class _Status(msgspec.Struct):
    conditions: list[dict[str, str]] | None = None


class _Started(msgspec.Struct):
    name: str
    deletionTimestamp: str | None = None


class _Job(msgspec.Struct):
    metadata: _Started
    status: _Status = msgspec.field(default_factory=_Status)


class _Jobs(msgspec.Struct):
    items: list[_Job]


@dataclass(frozen=True)
class Template:
    """A Job to be started many times over."""

    manifest: dict[str, Any]
    pool: str
    namespace: str | None

    @staticmethod
    def read(path: Path) -> Template:
        """The manifest in a YAML or JSON file. ConfigError where it is none, sets `args`, or holds the key."""
        try:
            manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
            job = msgspec.convert(manifest, _Manifest)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path} is no manifest of a Job for runners: {error}") from None
        runner = job.spec.template.spec.containers[0]
        keys = [one for one in runner.env if one.get("name") == "AGL_KEY"]
        if any("valueFrom" not in one for one in keys) or not (keys or runner.envFrom):
            raise ConfigError(
                f"{path}: the first container needs the server's key from a Secret: "
                "env: [{name: AGL_KEY, valueFrom: {secretKeyRef: {name: agl, key: AGL_KEY}}}]"
            )
        return Template(manifest, job.metadata.name, job.metadata.namespace)

    def job(self, name: str, arguments: Sequence[str], lifetime: float, drain: float) -> dict[str, Any]:
        """The Job of one runner. `lifetime` is when the pool ends it; Kubernetes does a little later, pool or not."""
        job = copy.deepcopy(self.manifest)
        metadata, spec = job["metadata"], job["spec"]
        metadata["name"] = name
        metadata["labels"] = {**(metadata.get("labels") or {}), POOL_LABEL: self.pool}
        spec |= {"backoffLimit": 0, "completions": 1, "parallelism": 1}
        spec.setdefault("activeDeadlineSeconds", int(lifetime + drain) + 60)
        spec.setdefault("ttlSecondsAfterFinished", _KEPT_SECONDS)
        pod = spec["template"]["spec"]
        pod["restartPolicy"] = "Never"
        pod.setdefault("terminationGracePeriodSeconds", int(drain) + _GRACE_SECONDS)
        runner = pod["containers"][0]
        runner.setdefault("command", ["agl"])
        # Kubernetes replaces $(NAME) in arguments by the variable, keys included; $$ is how it writes a $.
        runner["args"] = [argument.replace("$", "$$") for argument in ("runner", *arguments)]
        return job


@dataclass(frozen=True)
class Api:
    """Where the Kubernetes API is, and what it is shown: a file with a token, which is read for every request since it
    may be replaced. ConfigError for a token that would be sent in the clear."""

    url: URL
    token: Path | None = None
    authority: Path | None = None
    namespace: str = "default"

    def __post_init__(self) -> None:
        if not self.url.host or self.url.scheme not in ("https", "http"):
            raise ConfigError(
                f"the Kubernetes API's URL is {str(self.url)!r}; expected one such as https://10.0.0.1:6443"
            )
        if self.token is not None and self.url.scheme != "https":
            raise ConfigError("a token goes to an https:// URL alone; `kubectl proxy` needs none")

    @staticmethod
    def of_pod() -> Api:
        """That of the cluster whose pod this is, as its service account. ConfigError elsewhere."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "this is no pod of a cluster: run `kubectl proxy` and give --kube-api http://127.0.0.1:8001"
            )
        url = URL.build(scheme="https", host=host, port=int(port))
        return Api(url, ACCOUNT / "token", ACCOUNT / "ca.crt", (ACCOUNT / "namespace").read_text().strip())

    def headers(self) -> dict[str, str]:
        try:
            return {} if self.token is None else {"Authorization": f"Bearer {self.token.read_text().strip()}"}
        except OSError as error:
            raise ConfigError(f"the token for Kubernetes cannot be read: {error}") from None


class KubernetesJobs:
    """`Machines` of a cluster. What cannot be reached for a moment, or is over a quota, is an UnavailableError."""

    def __init__(self, template: Template, api: Api, lifetime: float, drain: float) -> None:
        self._template, self._api, self._lifetime, self._drain = template, api, lifetime, drain
        namespace = quote(template.namespace or api.namespace, safe="")
        self._jobs = api.url.joinpath("apis/batch/v1/namespaces", namespace, "jobs")
        self._session: aiohttp.ClientSession | None = None

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        full_name = f"{self._template.pool}-{name}"
        await self._ask("POST", self._jobs, self._template.job(full_name, arguments, self._lifetime, self._drain))

    async def runners(self) -> Mapping[str, Seen]:
        said = await self._ask("GET", self._jobs.with_query(labelSelector=f"{POOL_LABEL}={self._template.pool}"))
        try:
            return {job.metadata.name: _seen(job) for job in msgspec.json.decode(said, type=_Jobs).items}
        except msgspec.MsgspecError as error:
            raise ConfigError(f"what answers at {self._api.url} is not the Kubernetes API: {error}") from None

    async def stop(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):  # its pod is told to end, and drains
            await self._ask("DELETE", self._jobs / name, {"propagationPolicy": "Background"})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, url: URL, body: Any = None) -> bytes:
        if self._session is None:
            trust = None if self._api.authority is None else ssl.create_default_context(cafile=self._api.authority)
            limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
            self._session = aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(ssl=trust or True))
        try:
            response = await self._session.request(
                method, url, json=body, headers=self._api.headers(), allow_redirects=False
            )
            async with response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"no answer of the Kubernetes API at {self._api.url}: {error!r}") from None
        if response.status >= 300:
            raise _refusal(response.status, f"the Kubernetes API answered {response.status} to {method}", said)
        return said


def _refusal(status: int, what: str, said: bytes) -> AgentLightningError:
    try:
        message = str(msgspec.json.decode(said)["message"])[:500]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = said[:200].decode(errors="replace")
    if status in (408, 409, 410, 429) or status >= 500 or "exceeded quota" in message:
        return UnavailableError(f"{what}: {message}")
    if status in (401, 403):
        return ForbiddenError(f"{what}: {message}. The service account must create, list and delete jobs (group batch)")
    return (NotFoundError if status == 404 else ConfigError)(f"{what}: {message}")


def _seen(job: _Job) -> Seen:
    if job.metadata.deletionTimestamp is not None:
        return Seen("ended")
    for condition in job.status.conditions or []:
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            reason = condition.get("reason", "")
            failed = condition["type"] == "Failed" and reason != "DeadlineExceeded"
            return Seen("failed", f"{reason}: {condition.get('message', '')}") if failed else Seen("ended")
    return Seen("running")
