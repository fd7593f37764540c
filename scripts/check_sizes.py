"""Fails when the package, or a file or a function of it, has grown past what one reading takes.

Usage: python scripts/check_sizes.py [DIRECTORY]
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
# Lines that each room may have, and the modules beside them ("."); lower them as the rooms shrink.
ROOM_LINES = {
    "gateway": 9_066,
    "store": 6_880,
    "algorithm": 4_915,
    "learner": 4_495,
    "cli": 4_421,
    "server": 3_838,
    "data": 3_427,
    "runner": 3_785,
    "tracing": 2_854,
    ".": 2_032,
    "dashboard": 1_536,
    "engine": 1_275,
    "datasets": 1_242,
    "v03": 406,
    "rewards": 315,
    "templates": 91,
}


def oversized(path: Path) -> Iterator[str]:
    """One complaint per file or function of `path` that is too long."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, at most {FILE_LINES}: it holds two ideas, split it"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main(directory: str = "agentlightning") -> int:
    root = Path(directory)
    complaints = [line for path in sorted(root.rglob("*.py")) for line in oversized(path)]
    rooms = Counter[str]()
    for path in (*root.rglob("*.py"), *root.rglob("*.pyi")):
        room = path.relative_to(root).parts[0] if path.parent != root else "."
        rooms[room] += path.read_text(encoding="utf-8").count("\n")
    for room, lines in rooms.items():
        if lines > (most := ROOM_LINES.get(room, 0)):
            complaints.append(f"{root / room}: {lines} lines, at most {most}: take away as much as you add")
    sys.stderr.writelines(f"{line}\n" for line in complaints)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
