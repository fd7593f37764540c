"""What commands import from a test's folder is forgotten behind it: other tests have an `agent`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def modules_of_the_test_are_forgotten(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(folder):
            del sys.modules[name]
