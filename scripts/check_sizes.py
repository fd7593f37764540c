"""Fails when the package, or a file or a function of it, has grown past what one reading takes.

Usage: python scripts/check_sizes.py [DIRECTORY] [--lower]

Rooms are measured in syntax nodes, which no formatting changes. `--lower` writes the present sizes
into this file where they are below the ceilings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 70
# Syntax nodes that each room may have, and the modules beside them ("."). They may only be lowered.
ROOM_NODES = {
    "gateway": 76_840,
    "store": 50_457,
    "algorithm": 46_608,
    "cli": 45_807,
    "learner": 33_884,
    "data": 27_779,
    "tracing": 27_880,
    "runner": 25_935,
    "server": 23_627,
    ".": 18_390,
    "dashboard": 11_746,
    "engine": 10_349,
    "datasets": 9_840,
    "rewards": 3_625,
    "v03": 2_299,
    "prompts": 10_413,
    "templates": 506,
}


def complaints_of(path: Path) -> Iterator[str]:
    """What is wrong with one file: its length, its functions' lengths, and lines that hide several
    statements in one."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, at most {FILE_LINES}: it holds two ideas, split it"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                where = f"{path}:{node.lineno}: {node.name}"
                yield f"{where} has {length} lines, at most {FUNCTION_LINES}"
        elif isinstance(node, ast.Assign) and is_parallel(node):
            yield f"{path}:{node.lineno}: several assignments in one; one statement a line"
        elif isinstance(node, ast.IfExp) and has_conditional(node):
            yield f"{path}:{node.lineno}: a conditional inside a conditional; use if statements"


def is_parallel(node: ast.Assign) -> bool:
    """Whether this assigns several values at once that do not depend on each other:
    `a, b = 1, 2`, but not `a, b = b, a`."""
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    if any(isinstance(element, ast.Starred) for element in [*target.elts, *node.value.elts]):
        return False
    read = {ast.unparse(inner) for inner in ast.walk(node.value) if isinstance(inner, ast.expr)}
    return not any(ast.unparse(element) in read for element in target.elts)


def has_conditional(node: ast.IfExp) -> bool:
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def nodes_by_room(root: Path) -> Counter[str]:
    rooms = Counter[str]()
    for path in (*root.rglob("*.py"), *root.rglob("*.pyi")):
        room = path.relative_to(root).parts[0] if path.parent != root else "."
        tree = ast.parse(path.read_text(encoding="utf-8"))
        rooms[room] += sum(1 for _ in ast.walk(tree))
    return rooms


def lower(rooms: Counter[str]) -> None:
    """Write the present sizes into this file where they are below the ceilings."""
    path = Path(__file__)
    kept = {room: min(nodes, ROOM_NODES.get(room, nodes)) for room, nodes in rooms.most_common()}
    table = "".join(f'    "{room}": {nodes:_},\n' for room, nodes in kept.items())
    source = path.read_text(encoding="utf-8")
    pattern = r"(?<=^ROOM_NODES = \{\n).*?(?=^\})"
    path.write_text(re.sub(pattern, table, source, flags=re.MULTILINE | re.DOTALL), "utf-8")


def main(*arguments: str) -> int:
    root = Path(next((word for word in arguments if word != "--lower"), "agentlightning"))
    complaints = [line for path in sorted(root.rglob("*.py")) for line in complaints_of(path)]
    rooms = nodes_by_room(root)
    if "--lower" in arguments:
        lower(rooms)
        return 0
    for room, nodes in rooms.items():
        most = ROOM_NODES.get(room, 0)
        if nodes > most:
            complaints.append(f"{root / room}: {nodes:_} syntax nodes, at most {most:_}")
    sys.stderr.writelines(f"{line}\n" for line in complaints)
    print(f"{sum(rooms.values()):,} syntax nodes")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
