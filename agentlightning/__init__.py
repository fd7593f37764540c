"""Agent Lightning: train any AI agent with reinforcement learning, without changing the agent.

    import agentlightning as agl

Every public name is here and is loaded when it is first used, so that importing the package costs
neither torch, nor a web framework, nor a database."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import warnings
from typing import Any

__version__ = "0.1.0"

# Name → the module that it is loaded from, by the lines `from MODULE import NAME as NAME` of the
# stub.
_stub = pkgutil.get_data(__name__, "__init__.pyi") or b""  # from a zip file too
_lines = map(str.split, _stub.decode().splitlines())
_HOME_OF = {words[3]: words[1] for words in _lines if words[2:3] == ["import"] and len(words) == 6}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if _HOME_OF.get(name) == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        value = _of_0_3(name)
    globals()[name] = value
    return value


def _of_0_3(name: str) -> Any:
    """The object that serves for a name of Agent Lightning 0.3."""
    if not name.startswith("_"):  # tools ask every module for names with underscores
        with contextlib.suppress(AttributeError):
            return importlib.import_module("agentlightning.v03").find(name)
    raise AttributeError(
        f"module 'agentlightning' has no attribute {name!r}; public names: {', '.join(__all__)}"
    )


class _ModulesOf03:
    """Finds the modules of Agent Lightning 0.3 that this package lacks. Python asks it last."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        ours = name.startswith(f"{__name__}.")
        return importlib.import_module("agentlightning.v03").find_spec(name) if ours else None


sys.meta_path.append(_ModulesOf03)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def clash_with_namesake() -> str | None:
    """Advice if Microsoft's `agentlightning` distribution is installed beside this one, else None.

    Both install a package of this name into one folder, so whichever was installed last has
    overwritten parts of the other. The folders on the path are listed here because
    `importlib.metadata` would be most of the package's import time."""
    ours = _installed("agent_lightning_next-")
    other = _installed("agentlightning-")
    if ours is None or other is None:
        return None
    return (
        "two distributions provide the package 'agentlightning' here: agent-lightning-next "
        f"{ours} and Microsoft's agentlightning {other}; they overwrite each other's files. Keep "
        "one: pip uninstall -y agentlightning agent-lightning-next && pip install "
        "agent-lightning-next"
    )


def _installed(prefix: str) -> str | None:
    """The version in the name of the `<prefix><version>.dist-info` folder on the path, if there is
    one."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue  # an entry of the path need not exist, nor be a folder
        for name in names:
            if name.startswith(prefix) and name.endswith(".dist-info"):
                return name.removeprefix(prefix).removesuffix(".dist-info")
    return None


if (_clash := clash_with_namesake()) is not None:
    warnings.warn(_clash, RuntimeWarning, stacklevel=2)
