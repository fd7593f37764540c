"""Fails when the package, or a file or a function of it, has grown past what one reading takes.

Usage: python scripts/check_sizes.py [DIRECTORY]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
PACKAGE_LINES = 47_970  # 46,670 and 1,300 for engines elsewhere; lower it when the package shrinks


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
    paths = sorted(Path(directory).rglob("*.py"))
    complaints = [line for path in paths for line in oversized(path)]
    stubs = Path(directory).rglob("*.pyi")
    total = sum(path.read_text(encoding="utf-8").count("\n") for path in (*paths, *stubs))
    if total > PACKAGE_LINES:
        complaints.append(f"{directory}: {total} lines, at most {PACKAGE_LINES}: take away as much as you add")
    sys.stderr.writelines(f"{line}\n" for line in complaints)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
