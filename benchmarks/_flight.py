"""The modules of examples/flight, which import each other by their plain names as its own scripts
do."""

from __future__ import annotations

import sys
from pathlib import Path

FLIGHT = Path(__file__).parent.parent / "examples" / "flight"
sys.path.insert(0, str(FLIGHT))

import demonstrations as demonstrations  # noqa: E402
import recipe as recipe  # noqa: E402
import tasks as tasks  # noqa: E402
import train as train  # noqa: E402
