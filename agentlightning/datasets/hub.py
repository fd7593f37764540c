"""`hf:` names: models and dataset files on the Hugging Face hub, through `huggingface_hub`.

`hf:ORG/NAME` is a model, `hf:ORG/NAME/FILE` a file of a dataset, `hf:ORG/NAME@REVISION…` either at a revision. The
hub's variables apply: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.errors import ConfigError, imported

PREFIX: Final = "hf:"
_NAME: Final = re.compile(r"hf:(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<file>[^@]+))?")

_PATIENCE_SECONDS: Final = 5.0  # for the hub's first word; its own package would try again for a minute
_NOT_THE_MODEL: Final = ["loop.json", "optimizer.pt"]  # of a checkpoint, what only the run itself goes on with

T = TypeVar("T")


class HubName(NamedTuple):
    """The parts of an `hf:` name; without a `file`, a whole repository."""

    repository: str
    revision: str | None
    file: str | None


def is_hub_name(source: object) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def read_hub_name(source: str) -> HubName:
    """Read an `hf:` name. ConfigError if it is malformed."""
    found = _NAME.fullmatch(source)
    if found is None:
        raise ConfigError(f"{source!r} names nothing on the hub; write hf:ORG/NAME for a model, hf:ORG/NAME/FILE.jsonl")
    return HubName(found["repository"], found["revision"], found["file"])


def fetched_model(source: T) -> T | str | Path:
    """The id or directory of the model of an `hf:` name; other names stay unchanged."""
    if not isinstance(source, str) or not is_hub_name(source):
        return source
    name = read_hub_name(source)
    if name.file is not None:
        raise ConfigError(f"{source!r} names a file; a model is a whole repository, {PREFIX}{name.repository}")
    if name.revision is None:
        return name.repository
    with _hub(source) as hub:
        return Path(hub.snapshot_download(name.repository, revision=name.revision))


def reachable_model(repository: str) -> str | Path:
    """The id itself where the hub answers, whatever it says of it; else the model's directory in the cache here.
    ConfigError, within seconds, where neither is there."""
    hub = imported("huggingface_hub", repository, "huggingface_hub")
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
        return repository
    except Exception as error:  # noqa: BLE001 - of the HTTP client, another one by version
        reason = " ".join(str(error).split()).rstrip(".")
    try:
        return Path(hub.snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"there is no model {repository!r} here, neither a directory nor in the hub's cache, and "
            f"{hub.constants.ENDPOINT} cannot be asked: {reason}. Give a directory written by save_pretrained"
        ) from None


def fetched_file(source: str) -> Path:
    """The dataset file of an `hf:` name, in the local cache."""
    name = read_hub_name(source)
    with _hub(source) as hub:
        if name.file is None:
            files = hub.HfApi().list_repo_files(name.repository, repo_type="dataset", revision=name.revision)
            raise ConfigError(f"{source!r} names no file; write {source}/FILE, one of: {', '.join(files[:20])}")
        return Path(hub.hf_hub_download(name.repository, name.file, repo_type="dataset", revision=name.revision))


def push(path: Path, target: str) -> str:
    """Upload a checkpoint's directory to a model, or a file to a dataset. A missing repository is created, private.
    Returns the commit's address."""
    name = read_hub_name(target)
    kind = "dataset" if name.file is not None else "model"
    if path.is_dir() == (name.file is not None):
        raise ConfigError(f"{target!r} names a {kind}, and {path} is a {'directory' if path.is_dir() else 'file'}")
    with _hub(target) as hub:
        api = hub.HfApi()
        api.create_repo(name.repository, repo_type=kind, private=True, exist_ok=True)
        where = {"repo_id": name.repository, "repo_type": kind, "revision": name.revision}
        if name.file is None:
            return str(api.upload_folder(folder_path=path, ignore_patterns=_NOT_THE_MODEL, **where))
        return str(api.upload_file(path_or_fileobj=path, path_in_repo=name.file, **where).commit_url)


@contextlib.contextmanager
def _hub(name: str) -> Generator[Any]:
    """The hub's package; its errors become ConfigErrors."""
    hub = imported("huggingface_hub", name, "huggingface_hub")
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield hub
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{name}: {reason}. HF_TOKEN is the key for what is private") from None
