"""The modules of an example, which have plain names (`agent`, `tasks`) as its own scripts import
them, beside those of other examples."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(folder: str, *names: str) -> SimpleNamespace:
    """`load_example("flight", "tasks").tasks`: these modules and what they import of the example's
    own, made anew."""
    directory = EXAMPLES / folder
    own = [file.stem for file in directory.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(directory))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(directory))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(others)
