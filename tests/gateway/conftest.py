from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.talker import make_talker
from tests.gateway.world import World, world


@pytest.fixture
async def gateway_world(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as built:
        yield built


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The talker's, in a directory."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_talker().tokenizer.save_pretrained(path)
    return str(path)
