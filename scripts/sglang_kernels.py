"""Stand-ins for packages that SGLang imports and needs on a GPU alone; scripts/environment.sh
installs this module.

Their modules answer to any attribute, so that SGLang can be imported, and raise where one is
called: nothing is computed by them. Every process of that environment imports this at its start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

ABSENT = ("sgl_kernel", "torchaudio", "torchvision")


class Absent(type):
    """A class of nothing: all its attributes are classes as empty."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} is not there: this is SGLang without its kernels"
        )


class AbsentModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}", (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of absent packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
