"""`hf:` names: models and dataset files on the Hugging Face hub, through `huggingface_hub`.

`hf:ORG/NAME` is a model, `hf:ORG/NAME/FILE` a file of a dataset, `hf:ORG/NAME@REVISION…` either at
a revision. The hub's variables apply: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.errors import ConfigError, imported

PREFIX: Final = "hf:"
_NAME: Final = re.compile(
    r"hf:(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<file>[^@]+))?"
)

# for the hub's first answer; its own package would retry for a minute
_PATIENCE_SECONDS: Final = 5.0
# the same weights again
_OTHER_FORMATS: Final = ["original/*", "onnx/*", "*.gguf", "*.h5", "*.msgpack", "*.pth"]
# files of a checkpoint that only its own run needs
_NOT_THE_MODEL: Final = ["loop.json", "optimizer.pt"]

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
        raise ConfigError(
            f"{source!r} names nothing on the hub; write hf:ORG/NAME for a model, "
            "hf:ORG/NAME/FILE.jsonl"
        )
    return HubName(found["repository"], found["revision"], found["file"])


def check_model_path(source: str | Path) -> None:
    """ConfigError if a model's name must be a path, and there is nothing."""
    path = Path(source)
    if not path.exists() and (
        path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1
    ):
        raise ConfigError(f"model path {source} does not exist")


def fetched_model(source: T) -> T | str | Path:
    """The id or directory of the model of an `hf:` name; other names stay unchanged."""
    if not isinstance(source, str) or not is_hub_name(source):
        return source
    name = read_hub_name(source)
    if name.file is not None:
        raise ConfigError(
            f"{source!r} names a file; a model is a whole repository, {PREFIX}{name.repository}"
        )
    if name.revision is None:
        return name.repository
    with _hub(source) as hub:
        return Path(
            hub.snapshot_download(
                name.repository, revision=name.revision, ignore_patterns=_OTHER_FORMATS
            )
        )


def reachable_model(repository: str) -> str | Path:
    """The id itself if the hub answers, whatever the answer; else the model's directory in the
    local cache. ConfigError, within seconds, if there is neither."""
    hub = imported("huggingface_hub", repository, "huggingface_hub")
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
        return repository
    except Exception as error:  # noqa: BLE001 - the HTTP client depends on the hub's version
        reason = " ".join(str(error).split()).rstrip(".")
    try:
        return Path(hub.snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"there is no model {repository!r} here, neither a directory nor in the hub's cache, "
            f"and {hub.constants.ENDPOINT} does not answer: {reason}. Give a directory written by "
            "save_pretrained"
        ) from None


def fetched_file(source: str) -> Path:
    """The dataset file of an `hf:` name, in the local cache."""
    name = read_hub_name(source)
    with _hub(source) as hub:
        if name.file is None:
            files = hub.HfApi().list_repo_files(
                name.repository, repo_type="dataset", revision=name.revision
            )
            raise ConfigError(
                f"{source!r} names no file; write {source}/FILE, one of: {', '.join(files[:20])}"
            )
        return Path(
            hub.hf_hub_download(
                name.repository, name.file, repo_type="dataset", revision=name.revision
            )
        )


def push(path: Path, target: str) -> str:
    """Upload a checkpoint's directory to a model, or a file to a dataset. A missing repository is
    created, private, and so is a missing branch. Returns the commit's URL."""
    name = read_hub_name(target)
    kind = "dataset" if name.file is not None else "model"
    if path.is_dir() == (name.file is not None):
        raise ConfigError(
            f"{target!r} names a {kind}, and {path} is a {'directory' if path.is_dir() else 'file'}"
        )
    with _hub(target) as hub:
        api = hub.HfApi()
        api.create_repo(name.repository, repo_type=kind, private=True, exist_ok=True)
        if name.revision is not None:
            api.create_branch(name.repository, branch=name.revision, repo_type=kind, exist_ok=True)
        where = {"repo_id": name.repository, "repo_type": kind, "revision": name.revision}
        if name.file is None:
            return api.upload_folder(
                folder_path=path, ignore_patterns=_NOT_THE_MODEL, **where
            ).commit_url
        return api.upload_file(path_or_fileobj=path, path_in_repo=name.file, **where).commit_url


@contextlib.contextmanager
def _hub(name: str) -> Generator[Any]:
    """The hub's package; its errors become ConfigErrors."""
    hub = imported("huggingface_hub", name, "huggingface_hub")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield hub
    except (hub.errors.HTTPError, HFValidationError, OSError) as error:
        # HTTPError: that of its HTTP client
        reason = " ".join(str(error).split()).rstrip(".")
        key = (
            ". Private repositories need a token in HF_TOKEN"
            if isinstance(error, HfHubHTTPError)
            else ""
        )
        raise ConfigError(f"{name}: {reason}{key}") from None
