"""Questions about the databases of `databases.py`, in any number.

A task is a plain JSON object: `id`, `kind`, `question`, the right query `gold`, the `schema` as
text, and `databases`, paths of several SQLite files with the same tables and different rows. The
agent sees the first, all are graded.

A question has three parts: a relation (its tables), a filter, and a frame (what is asked of the
rows). A pattern is a choice of these and of the tables. One pattern in five is held out: its
questions are never trained on, only those of other patterns, which have the same parts."""

from __future__ import annotations

import json
import random
import sqlite3
import zlib
from calendar import month_name
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import NamedTuple

from databases import DATABASES, Database, Link, Table, schema_of, write_instances

HELD_OUT_SHARE = 5
MOST_VALUES = 8  # of a column of words, in questions
FUNCTIONS = {
    "avg": ("Average", "Mean"),
    "sum": ("Total", "Summed"),
    "max": ("Highest", "Largest"),
    "min": ("Lowest", "Smallest"),
}


class Sense(NamedTuple):
    """One meaning that a part of a question may have: its wordings, and its part of the query."""

    wordings: list[str]
    sql: str


def senses(*texts: str) -> list[Sense]:
    """The meanings of a part, each from `wording | wording -> part of the query`."""
    pairs = [text.split("->") for text in texts]
    return [Sense([one.strip() for one in said.split("|")], sql.strip()) for said, sql in pairs]


def functions(text: str) -> list[Sense]:
    """A meaning for each of FUNCTIONS: {F} and {G} are its words, {f} is its name."""
    return senses(
        *(
            text.replace("{f}", name).replace("{F}", word).replace("{G}", other)
            for name, (word, other) in FUNCTIONS.items()
        )
    )


# {t} is the table, {o} another, linked to it; {c} a column of the filter, {n} a number, {g} a word.
RELATIONS = {
    "one": senses("{t} -> {t} {where}"),
    "join": senses("{t} {phrase} {o} -> {t} join {o} on {on} {where}"),
    "nested": senses(
        "{t} having {o} -> {t} where {key} in (select {column} from {o} {where})",
        "{t} having no {o} -> {t} where {key} not in (select {column} from {o} {where})",
    ),
}
FILTERS = {
    "all": senses("->"),
    "number": senses(
        "with {c} above {v} | whose {c} is over {v} -> where {c} > {v}",
        "with {c} below {v} | whose {c} is under {v} -> where {c} < {v}",
    ),
    "word": senses(
        "with {c} {v} | of {c} {v} -> where {c} = '{v}'",
        "without {c} {v} | not of {c} {v} -> where {c} != '{v}'",
    ),
    "average": senses(
        "with {c} above average | whose {c} is over the average"
        " -> where {c} > (select avg({c}) from {o})",
        "with {c} below average | whose {c} is under the average"
        " -> where {c} < (select avg({c}) from {o})",
    ),
    "date": senses(
        "since {v} | from {v} on -> where {c} >= '{v}'",
        "before {v} | earlier than {v} -> where {c} < '{v}'",
    ),
    "month": senses(
        "in {month} | during {month} -> where strftime('%m', {c}) = '{m}'",
        "outside {month} | except in {month} -> where strftime('%m', {c}) != '{m}'",
    ),
    "weekend": senses(
        "on weekends | on Saturdays or Sundays -> where strftime('%w', {c}) in ('0', '6')",
        "on weekdays | from Monday to Friday -> where strftime('%w', {c}) not in ('0', '6')",
    ),
}
FRAMES = {
    "count": senses("How many {rows} | Count {rows} -> select count(*) from {source}"),
    "distinct": senses(
        "How many different {g} of {rows} | Count different {g} of {rows}"
        " -> select count(distinct {g}) from {source}"
    ),
    "list": senses(
        "List {label} of {rows} | Show {label} of {rows} -> select {label} from {source}"
    ),
    "function": functions("{F} {n} of {rows} | {G} {n} of {rows} -> select {f}({n}) from {source}"),
    "counts": senses(
        "How many {rows} per {g} | Count {rows} for each {g}"
        " -> select {g}, count(*) from {source} group by {g}"
    ),
    "functions": functions(
        "{F} {n} of {rows} per {g} | {G} {n} of {rows} for each {g}"
        " -> select {g}, {f}({n}) from {source} group by {g}"
    ),
    "best": functions(
        "{F} {n} of {rows}: top {g} | {G} {n} of {rows}: first {g}"
        " -> select {g} from {source} group by {g} order by {f}({n}) desc limit 1"
    ),
    "most": senses(
        "Which {g} has the most {rows} | The {g} of most {rows}"
        " -> select {g} from {source} group by {g} order by count(*) desc limit 1",
        "Which {g} has the fewest {rows} | The {g} of fewest {rows}"
        " -> select {g} from {source} group by {g} order by count(*) asc limit 1",
    ),
    "having": senses(
        "Which {g} has more than {k} {rows} | Each {g} of over {k} {rows}"
        " -> select {g} from {source} group by {g} having count(*) > {k}",
        "Which {g} has fewer than {k} {rows} | Each {g} of under {k} {rows}"
        " -> select {g} from {source} group by {g} having count(*) < {k}",
    ),
    "order": senses(
        "Top {k} {label} by {n} of {rows} | The {k} {label} of highest {n} of {rows}"
        " -> select {label} from {source} order by {n} desc limit {k}",
        "Bottom {k} {label} by {n} of {rows} | The {k} {label} of lowest {n} of {rows}"
        " -> select {label} from {source} order by {n} asc limit {k}",
    ),
}
PARTS = {"relation": RELATIONS, "filter": FILTERS, "frame": FRAMES}


@dataclass(frozen=True)
class Pattern:
    """The filter is about the table `other`, which is `table` itself where there is no `link`."""

    database: Database
    relation: str
    filter: str
    frame: str
    table: Table
    other: Table
    link: Link | None = None

    @property
    def name(self) -> str:
        return f"{self.table.name} {self.relation} {self.other.name}/{self.filter}/{self.frame}"

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % HELD_OUT_SHARE == 0

    @property
    def columns(self) -> list[str]:
        """What the filter may be about; empty where the pattern makes no sense."""
        dates = (self.other.date,) if self.other.date else ()
        chosen = {
            "all": ("",) if self.relation == "nested" or self.frame != "list" else (),
            "number": self.other.numbers,
            "average": self.other.numbers,
            "word": self.other.words,
        }.get(self.filter, dates)
        frame = FRAMES[self.frame][0].sql
        return [
            column
            for column in chosen
            if ("{g}" not in frame or self.groups(column))
            and ("{n}" not in frame or self.numbers(column))
            and ("{g}" in frame or self.relation != "join" or column)
        ]

    def groups(self, column: str) -> list[str]:
        """The columns that rows may be counted by. A join without a filter is there for them."""
        words = self.table.words if column or self.relation != "join" else ()
        others = self.other.words if self.relation == "join" else ()
        return [one for one in (*words, *others) if one not in (column, self.table.label)]

    def numbers(self, column: str) -> list[str]:
        return [one for one in self.table.numbers if one != column]


@dataclass(frozen=True)
class Question:
    pattern: Pattern
    text: str
    slots: dict[str, str]
    relation: Sense
    filter: Sense
    frame: Sense

    @property
    def sql(self) -> str:
        where = self.filter.sql.format(**self.slots)
        source = self.relation.sql.format(where=where, **self.slots).strip()
        return self.frame.sql.format(source=source, **self.slots).replace(" )", ")")


def patterns(*, held_out: bool) -> list[Pattern]:
    """All patterns of one side of the split."""
    found: list[Pattern] = []
    for database in DATABASES:
        related = [("one", table, table, None) for table in database.tables]
        for link in database.links:
            child = database.table(link.child)
            parent = database.table(link.parent)
            related.append(("join", child, parent, link))
            if len(link.on) == 1:
                related.append(("nested", parent, child, link))
        found += [
            Pattern(database, relation, filter_, frame, table, other, link)
            for (relation, table, other, link), filter_, frame in product(related, FILTERS, FRAMES)
        ]
    return [one for one in found if one.columns and one.held_out == held_out]


def make_question(
    pattern: Pattern, values: dict[str, list[str]], generator: random.Random
) -> Question:
    """A question whose columns, values and wordings are drawn by chance."""
    relation, filter_, frame = (
        generator.choice(known[getattr(pattern, part)]) for part, known in PARTS.items()
    )
    column = generator.choice(pattern.columns)
    month = generator.randrange(1, 13)
    slots = {
        "t": pattern.table.name,
        "o": pattern.other.name,
        "label": pattern.table.label,
        "c": column,
        "v": generator.choice(values.get(column, [""])),
        "g": generator.choice(pattern.groups(column) or [""]),
        "n": generator.choice(pattern.numbers(column) or [""]),
        "k": str(generator.randrange(2, 6)),
        "m": f"{month:02}",
        "month": month_name[month],
    }
    if pattern.link:
        slots["phrase"] = pattern.link.phrase
        slots["on"] = " and ".join(f"{one} = {key}" for one, key in pattern.link.on.items())
        slots["column"], slots["key"] = next(iter(pattern.link.on.items()))
    said = (generator.choice(sense.wordings).format for sense in (relation, filter_))
    rows = " ".join(one(**slots) for one in said).strip()
    text = generator.choice(frame.wordings).format(rows=rows, **slots)
    return Question(pattern, f"{text}?", slots, relation, filter_, frame)


def values_of(database: Database, path: str) -> dict[str, list[str]]:
    """By column, what a filter may compare it with: frequent words, and every tenth part of the
    numbers and dates."""
    found: dict[str, list[str]] = {}
    with closing(sqlite3.connect(path)) as connection:
        for table in database.tables:
            select = f"select {{0}} from {table.name} where {{0}} is not null".format
            for word in table.words:
                rows = connection.execute(f"{select(word)} group by 1 order by count(*) desc")
                found[word] = [value for (value,) in rows if value.isalpha()][:MOST_VALUES]
            for column in filter(None, (*table.numbers, table.date)):
                rows = connection.execute(f"{select(column)} order by 1").fetchall()
                tenths = (str(rows[len(rows) * tenth // 10][0]) for tenth in range(1, 10))
                found[column] = list(dict.fromkeys(one for one in tenths if one > "0"))
    return found


def is_certain(sql: str, paths: list[str]) -> bool:
    """Whether a query of ours finds anything but nothing and 0 in the first of these databases, and
    has one answer in all of them."""
    for path in paths:
        with closing(sqlite3.connect(path)) as connection:
            # rows that are equal in what they are ordered by come in two orders
            rows, others = (
                connection.execute(sql.replace(" limit", f", 1 {order} limit")).fetchall()
                for order in ("asc", "desc")
            )
        if rows != others or (path == paths[0] and not any(any(row) for row in rows)):
            return False
    return True


def questions(
    known: list[Pattern], generator: random.Random, folder: Path
) -> Iterator[tuple[Question, str, list[str]]]:
    """Questions without end, whose frames take turns, each with the schema and the paths of its
    database, which is written below `folder` if it is not there."""
    paths = {one.name: write_instances(one, folder) for one in DATABASES}
    schemas = {one.name: schema_of(one, paths[one.name][0]) for one in DATABASES}
    values = {one.name: values_of(one, paths[one.name][0]) for one in DATABASES}
    for frame in cycle(FRAMES):
        pattern = generator.choice([one for one in known if one.frame == frame])
        name = pattern.database.name
        yield make_question(pattern, values[name], generator), schemas[name], paths[name]


def make_tasks(n: int, known: list[Pattern], generator: random.Random, folder: Path) -> list[dict]:
    """`n` tasks on databases below `folder`."""
    tasks = (
        {
            "id": question.pattern.name,
            "kind": question.pattern.frame,
            "question": question.text,
            "gold": question.sql,
            "schema": schema,
            "databases": paths,
        }
        for question, schema, paths in questions(known, generator, folder)
        if is_certain(question.sql, paths)
    )
    return [task | {"id": f"{task['id']}/{index}"} for index, task in enumerate(islice(tasks, n))]


def train_tasks(n: int, seed: int, folder: Path) -> list[dict]:
    """`n` training tasks; the same seed gives the same list."""
    return make_tasks(n, patterns(held_out=False), random.Random(f"train/{seed}"), folder)


def heldout_tasks(n: int, folder: Path) -> list[dict]:
    """The first `n` held-out tasks: their patterns are never in `train_tasks`."""
    return make_tasks(n, patterns(held_out=True), random.Random("held out"), folder)


def save_tasks(tasks: list[dict], path: Path) -> str:
    """Write them as JSON lines; the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks), encoding="utf-8")
    return str(path)
