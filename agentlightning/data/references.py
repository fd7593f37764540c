"""References: `module:attribute` and `file.py:attribute`, which name a Python object on a command
line or in a run file.

This module does not know what the objects are for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agentlightning.errors import ConfigError, nearest


def is_reference(text: str) -> bool:
    """Whether `text` looks like a reference, `something:attribute`, and not like a URL or a Windows
    path."""
    module, colon, attribute = text.rpartition(":")
    return (
        bool(colon)
        and len(module) > 1
        and all(part.isidentifier() for part in attribute.split("."))
    )


def load_reference(reference: str) -> Any:
    """The object named by `package.module:attribute` or `path/to/file.py:attribute`.

    The current directory is on the import path. ConfigError if the reference is malformed, the
    module cannot be found or fails to import, or the attribute is missing."""
    if not is_reference(reference):
        raise ConfigError(
            f"{reference!r} is not a reference; write module:attribute or path/to/file.py:attribute"
        )
    module_name, _, attributes = reference.rpartition(":")
    module = (
        _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    )
    found: Any = module
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            public = (
                [name for name in vars(found) if not name.startswith("_")]
                if hasattr(found, "__dict__")
                else []
            )
            raise ConfigError(
                f"{module_name} has no attribute {attribute!r}; {nearest(attribute, public)}"
            )
        found = getattr(found, attribute)
    return found


def _load_file(path: Path) -> ModuleType:
    """Import a file under its stem, with its folder last on the import path so that it can import
    its neighbours."""
    if not path.is_file():
        raise ConfigError(f"no file {path} (looked in {Path.cwd()})")
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and loaded.__spec__ is not None and loaded.__spec__.origin == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # `json.py` must not become everyone's json
    taken = loaded is not None or path.stem in sys.stdlib_module_names
    name = f"{path.parent.name}_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"importing {path} failed: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {name!r} in {directory} or among the installed packages"
            ) from None
        raise ConfigError(f"importing {name} failed: {error}; install what it needs") from error
    except Exception as error:
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error
