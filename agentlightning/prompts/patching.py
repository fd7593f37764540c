"""Changes of source files that give a program other prompts: in Python by its syntax tree, in JSON,
YAML and text files by their own quoting.

    a text that the program sends  →  the one literal of its form  →  other source in its place

What a program does with a literal is not known here: a change that several readings allow comes in
several variants, and only a run of the program says which is right."""

from __future__ import annotations

import ast
import inspect
import json
import re
import string
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from agentlightning.prompts.components import Pattern
from agentlightning.types import PromptText

Write: TypeAlias = Callable[[str], str | None]
"""A text → the source of a literal that has it; None where there is none."""

# Stand for what a program fills in.
_MARK: Final = "\ue000{}\ue001"
_MARKED: Final = re.compile("\ue000(\\d+)\ue001")
_PERCENT: Final = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[sdrifxX]|%%")


@dataclass(frozen=True)
class Literal:
    """A text in a file, with marks where the program fills something in."""

    begin: int
    end: int
    text: str
    write: Write


@dataclass(frozen=True)
class Edit:
    """Other source for a part of a file."""

    path: Path
    begin: int
    end: int
    source: str


def edits_for(files: Mapping[Path, str], prompt: PromptText) -> list[Edit] | str:
    """The variants of the one edit that puts the new text into these files, the likeliest first; or
    the reason why there is none."""
    sent = Pattern.of(prompt.sent)
    new = Pattern.of(prompt.text)
    found: dict[tuple[Path, int], list[Edit]] = {}
    for path, source in files.items():
        known = _literals(path, source)
        for number, literal in enumerate(known):
            for variant in _variants(literal, sent, new):
                edit = Edit(path, literal.begin, literal.end, variant)
                edits = found.setdefault((path, literal.begin), [])
                if edit not in edits and _is_all(known, number, applied(source, [edit]), path):
                    edits.append(edit)
    if len(found) > 1:
        return f"it stands in {len(found)} places"
    edits = next(iter(found.values()), [])
    return edits or "no file has it as one text"


def applied(source: str, edits: list[Edit]) -> str:
    """The source with these edits of one file."""
    for edit in sorted(edits, key=lambda edit: -edit.begin):
        source = source[: edit.begin] + edit.source + source[edit.end :]
    return source


def _is_all(known: list[Literal], number: int, source: str, path: Path) -> bool:
    """Whether the changed source differs in this literal alone."""
    changed = [literal.text for literal in _literals(path, source)]
    before = [literal.text for literal in known]
    return (
        len(changed) == len(before)
        and changed[:number] == before[:number]
        and changed[number + 1 :] == before[number + 1 :]
    )


# --- readings of a literal ------------------------------------------------------------------------


def _variants(literal: Literal, sent: Pattern, new: Pattern) -> Iterator[str]:
    """Sources of the literal with the new text, for each reading in which it is the sent one."""
    for laid_out, lay_out in _LAYOUTS:
        for filled, fill in _FILLS:
            text = filled(laid_out(literal.text))
            if text is None:
                continue
            core = text.strip()
            values = sent.match(text)
            around = ("", "")
            if values is None:
                values = sent.match(core)
                at = text.find(core)
                around = (text[:at], text[at + len(core) :])
            if values is None:
                continue
            changed = around[0] + new.fill(values) + around[1]
            value = lay_out(fill(changed, laid_out(literal.text)), literal.text)
            if filled(laid_out(value)) == changed and (source := literal.write(value)) is not None:
                yield source


def _plain(text: str) -> str:
    return text


def _indent(text: str, like: str) -> str:
    """The text with the indentation that all lines of `like` have."""
    lines = [line for line in like.split("\n") if line.strip()]
    first = min(lines, key=lambda line: len(line) - len(line.lstrip()), default="")
    return textwrap.indent(text, first[: len(first) - len(first.lstrip())])


def _docstring(text: str, like: str) -> str:
    """The text as a docstring: every line but the first has the indentation of those of `like`."""
    rest = like.partition("\n")[2]
    first, newline, others = text.partition("\n")
    tail = like[len(like.rstrip()) :] if rest else ""
    return first + newline + _indent(others, rest) + tail


_LAYOUTS: Final[list[tuple[Callable[[str], str], Callable[[str, str], str]]]] = [
    (_plain, lambda text, like: text),
    (textwrap.dedent, _indent),
    (inspect.cleandoc, _docstring),
]


def _without_fields(text: str) -> str | None:
    """`"{name} {{x}}"` → a mark, and `" {x}"`. None for what is no format."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError:
        return None
    filled = ""
    for number, (constant, name, _, _) in enumerate(parsed):
        filled += constant + ("" if name is None else _MARK.format(number))
    return filled


def _with_fields(text: str, like: str) -> str:
    fields = [
        f"{{{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"
        for _, name, spec, conversion in string.Formatter().parse(like)
        if name is not None
    ]
    escaped = text.replace("{", "{{").replace("}", "}}")
    return _put_back(escaped, fields)


def _without_percents(text: str) -> str | None:
    numbers = iter(range(len(text)))
    return _PERCENT.sub(
        lambda found: "%" if found[0] == "%%" else _MARK.format(next(numbers)), text
    )


def _with_percents(text: str, like: str) -> str:
    fields = [found[0] for found in _PERCENT.finditer(like) if found[0] != "%%"]
    return _put_back(text.replace("%", "%%"), fields)


def _put_back(text: str, fields: list[str]) -> str:
    """The text with the fields in place of its marks, one after the other."""
    remaining = iter(fields)
    return _MARKED.sub(lambda found: next(remaining, found[0]), text)


_FILLS: Final[list[tuple[Callable[[str], str | None], Callable[[str, str], str]]]] = [
    (_plain, lambda text, like: text),
    (_without_fields, _with_fields),
    (_without_percents, _with_percents),
]


# --- literals of a file ---------------------------------------------------------------------------


def _literals(path: Path, source: str) -> list[Literal]:
    """The literals of a file, in a fixed order; none of a file that cannot be read."""
    if "\ue000" in source:
        return []
    kind = {".py": _of_python, ".json": _of_json, ".yaml": _of_yaml, ".yml": _of_yaml}
    try:
        return list(kind.get(path.suffix, _of_text)(source))
    except (SyntaxError, ValueError, RecursionError, yaml.YAMLError):
        return []


def _of_text(source: str) -> Iterator[Literal]:
    yield Literal(0, len(source), source, _plain)


def _of_json(source: str) -> Iterator[Literal]:
    json.loads(source)
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"', source):
        ascii_only = found[0].isascii()

        def write(text: str, ascii_only: bool = ascii_only) -> str:
            return json.dumps(text, ensure_ascii=ascii_only)

        yield Literal(*found.span(), json.loads(found[0]), write)


def _of_yaml(source: str) -> Iterator[Literal]:
    waiting = [node for node in yaml.compose_all(source, yaml.SafeLoader) if node is not None]
    while waiting:
        node: Any = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            span = node.start_mark.index, node.end_mark.index
            old = source[slice(*span)]
            if node.style != ">":  # folded: the lines that it had are not known
                yield Literal(*span, node.value, _block(old) if node.style == "|" else _quoted)
        elif isinstance(node, yaml.MappingNode):
            waiting += [each for pair in node.value for each in pair]
        else:
            waiting += node.value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _block(old: str) -> Write:
    """Writes a block scalar as the old one is indented."""
    _, _, content = old.partition("\n")
    indent = content[: len(content) - len(content.lstrip(" "))]

    def write(text: str) -> str | None:
        if not text.strip() or text[0].isspace() or text.endswith("\n\n") or not indent:
            return None
        lines = textwrap.indent(text.rstrip("\n"), indent)
        end = "\n" if old.endswith("\n") else ""
        return f"|{'' if text.endswith(chr(10)) else '-'}\n{lines}{end}"

    return write


def _of_python(source: str) -> Iterator[Literal]:
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in ast.walk(tree):
        if id(node) in inside or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        span = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else _MARK.format(number)
                for number, part in enumerate(node.values)
            )
            yield Literal(*span, text, _f_string(node))
        elif isinstance(node.value, str):
            yield Literal(*span, node.value, _python_text)


def _python_text(text: str) -> str | None:
    """A Python literal, over several lines if the text has several."""
    if "\n" in text and "\r" not in text:
        body = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        if body.endswith('"'):
            body = f'{body[:-1]}\\"'
        literal = f'"""{body}"""'
        if text.replace("\n", "").isprintable() and ast.literal_eval(literal) == text:
            return literal
    if _MARKED.search(text):
        return None
    literal = repr(text)
    return literal if '"' in text else f'"{literal[1:-1]}"'.replace("\\'", "'")


def _f_string(node: ast.JoinedStr) -> Write:
    fields = [part for part in node.values if isinstance(part, ast.FormattedValue)]

    def write(text: str) -> str | None:
        constants = _MARKED.split(text)[::2]
        if len(constants) != len(fields) + 1:
            return None
        values: list[ast.expr] = [ast.Constant(constants[0])]
        for field, constant in zip(fields, constants[1:], strict=True):
            values += [field, ast.Constant(constant)]
        try:
            return ast.unparse(ast.JoinedStr(values))
        except ValueError:  # a backslash in a field, before Python 3.12
            return None

    return write
