"""Makes the travel desk importable the way its own scripts see it: from its own directory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flight"))
