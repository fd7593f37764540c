from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.world import World, world


@pytest.fixture
async def gateway_world(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as built:
        yield built
