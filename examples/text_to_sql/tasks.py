"""Questions about databases: made here, in any number, or read from a folder of Spider.

A task is a plain JSON object: `id`, `kind`, `question`, the right query `gold`, the `schema` as
text, and `databases`, paths of several SQLite files with the same tables and different contents.
The agent sees the first, all are graded.

A made database has two tables, one of which refers to the other. Pairs of tables are split by a
stable hash, so that the schemas of held-out tasks are never trained on (the words they are made of
are)."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agentlightning.errors import ConfigError

KINDS = ("filter", "order", "group", "join")
FUNCTIONS = {
    "count": "How many rows",
    "avg": "Average {}",
    "max": "Highest {}",
    "min": "Lowest {}",
    "sum": "Total {}",
}
OPERATORS = {">": "above", "<": "below", "=": "with", "!=": "without"}
DIRECTIONS = {"asc": "rising", "desc": "falling"}
TABLES = (
    "singer",
    "concert",
    "player",
    "team",
    "driver",
    "car",
    "student",
    "course",
    "ship",
    "captain",
    "doctor",
    "clinic",
    "shop",
    "worker",
    "farm",
    "horse",
)
NUMBERS = ("age", "price", "score", "weight", "height", "speed", "length", "size")
WORDS = {
    "city": ("Oslo", "Rome", "Paris", "Lyon", "Porto", "Turin"),
    "color": ("red", "blue", "green", "black", "white", "gray"),
    "metal": ("iron", "gold", "zinc", "tin", "lead", "steel"),
    "month": ("May", "June", "July", "March", "April", "August"),
    "fruit": ("apple", "pear", "plum", "fig", "lime", "cherry"),
}
NAMES = (
    "Ann",
    "Bob",
    "Cy",
    "Dan",
    "Eve",
    "Fay",
    "Gus",
    "Hal",
    "Ida",
    "Jo",
    "Kim",
    "Lee",
    "Max",
    "Ned",
    "Ola",
    "Pia",
    "Ray",
    "Sam",
    "Tim",
    "Uma",
    "Val",
    "Wes",
    "Xia",
    "Zoe",
)
HELDOUT_SHARE = 5  # one pair of tables in five is never trained on
INSTANCES = 4
WHERE_IS_SPIDER = (
    "Spider is at https://yale-lily.github.io/spider (a zip file: unpack it, and give the folder "
    "with tables.json; the databases of https://github.com/taoyds/test-suite-sql-eval grade "
    "better). Without it, leave out --spider: then databases and questions are generated, in any "
    "number"
)


@dataclass(frozen=True)
class Table:
    """`parent` is the table that it refers to, by a column of that name."""

    name: str
    label: str  # a column of text, different in every row
    numbers: tuple[str, str]
    words: str
    parent: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        reference = (self.parent,) if self.parent else (self.label,)
        return ("id", *reference, *self.numbers, self.words)


@dataclass(frozen=True)
class Schema:
    parent: Table
    child: Table

    @property
    def name(self) -> str:
        return f"{self.parent.name}_{self.child.name}"

    @property
    def text(self) -> str:
        """What the team is shown; of real databases `agent.schema_of` gives the same."""
        tables = [
            f"{table.name}({', '.join(table.columns)})" for table in (self.parent, self.child)
        ]
        return "\n".join([*tables, f"{self.child.name}.{self.parent.name} = {self.parent.name}.id"])


@dataclass(frozen=True)
class Question:
    """A question in words and in SQL. Which fields count depends on the kind:

    filter: `function` of `target` where the condition holds; order: `target` by `column`, `limit`
    of them if not 0;
    group: `function` of `target` for each `column`; join: `target` of `table` where the condition
    holds for `other`. The condition is `column operator value`; `key` is the column that a join
    goes by."""

    kind: str
    table: str
    target: str
    column: str
    function: str = "count"
    operator: str = "="
    value: str | int = 0
    direction: str = "asc"
    limit: int = 0
    other: str = ""
    key: str = ""

    @property
    def text(self) -> str:
        asked = FUNCTIONS[self.function].format(self.target)
        condition = f"{OPERATORS[self.operator]} {self.column} {self.value}"
        match self.kind:
            case "filter":
                return f"{asked} from {self.table} {condition}?"
            case "order":
                limit = f", limit {self.limit}" if self.limit else ""
                return (
                    f"List {self.target} from {self.table} by {self.column}, "
                    f"{DIRECTIONS[self.direction]}{limit}?"
                )
            case "group":
                return f"{asked} from {self.table} by {self.column}?"
        return f"List {self.target} from {self.table} and {self.other} {condition}?"

    @property
    def sql(self) -> str:
        asked = "count(*)" if self.function == "count" else f"{self.function}({self.target})"
        value = self.value if isinstance(self.value, int) else f"'{self.value}'"
        condition = f"where {self.column} {self.operator} {value}"
        match self.kind:
            case "filter":
                return f"select {asked} from {self.table} {condition}"
            case "order":
                limit = f" limit {self.limit}" if self.limit else ""
                return (
                    f"select {self.target} from {self.table} order by {self.column} "
                    f"{self.direction}{limit}"
                )
            case "group":
                return f"select {asked}, {self.column} from {self.table} group by {self.column}"
        child, parent = (
            (self.other, self.table) if self.key == self.other else (self.table, self.other)
        )
        join = f"join {self.other} on {child}.{parent} = {parent}.id"
        return f"select {self.target} from {self.table} {join} {condition}"


def schemas(*, heldout: bool) -> list[Schema]:
    """All schemas of one side of the split: each pair of tables once, with columns of its own."""
    return [
        make_schema(*pair)
        for pair in itertools.combinations(TABLES, 2)
        if (hashlib.sha256("/".join(pair).encode()).digest()[0] % HELDOUT_SHARE == 0) == heldout
    ]


def make_schema(one: str, other: str) -> Schema:
    generator = random.Random(f"schema/{one}/{other}")
    parent, child = generator.sample((one, other), 2)
    numbers, words = generator.sample(NUMBERS, 4), generator.sample(sorted(WORDS), 2)
    return Schema(
        Table(parent, "name", (numbers[0], numbers[1]), words[0]),
        Table(child, words[1], (numbers[2], numbers[3]), words[1], parent),
    )


def make_question(kind: str, schema: Schema, generator: random.Random) -> Question:
    table, other = generator.sample((schema.parent, schema.child), 2)
    column = generator.choice([*table.numbers, table.words])
    match kind:
        case "group":
            function = generator.choice(list(FUNCTIONS))
            return Question(
                kind, table.name, generator.choice(table.numbers), table.words, function
            )
        case "order":
            by, target = (
                generator.choice(table.numbers),
                generator.choice((table.label, table.words)),
            )
            limit = generator.choice((0, 0, 0, 2, 3, 4))
            return Question(
                kind,
                table.name,
                target,
                by,
                direction=generator.choice(list(DIRECTIONS)),
                limit=limit,
            )
        case "join":
            column = generator.choice([*other.numbers, other.words])
            operator, value = make_condition(column, generator)
            target, key = generator.choice((table.label, *table.numbers)), schema.child.name
            return Question(
                kind,
                table.name,
                target,
                column,
                operator=operator,
                value=value,
                other=other.name,
                key=key,
            )
    function, (operator, value) = (
        generator.choice(list(FUNCTIONS)),
        make_condition(column, generator),
    )
    target = generator.choice([number for number in table.numbers if number != column])
    return Question(kind, table.name, target, column, function, operator, value)


def make_condition(column: str, generator: random.Random) -> tuple[str, str | int]:
    if column in WORDS:
        return generator.choice(("=", "!=")), generator.choice(WORDS[column])
    return generator.choice("<>"), generator.randrange(30, 80)


def write_instances(schema: Schema, folder: Path) -> list[str]:
    """The SQLite files of a schema, made where they are not there yet; the same in every
    process."""
    paths = [folder / schema.name / f"{schema.name}_{index}.sqlite" for index in range(INSTANCES)]
    for path in paths:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_instance(schema, random.Random(f"rows/{path.stem}")))
    return [str(path) for path in paths]


def make_instance(schema: Schema, generator: random.Random) -> bytes:
    """A SQLite file. The numbers of a column are all different, so that an order by them is one
    order."""
    connection = sqlite3.connect(":memory:")
    sizes: dict[str, int] = {}
    for table in (schema.parent, schema.child):
        count = sizes[table.name] = generator.randrange(16, len(NAMES) + 1)
        columns: dict[str, list] = {
            "id": list(range(1, count + 1)),
            "name": generator.sample(NAMES, count),
        }
        columns |= {number: generator.sample(range(10, 100), count) for number in table.numbers}
        columns[table.words] = generator.choices(WORDS[table.words], k=count)
        if table.parent:
            columns[table.parent] = generator.choices(range(1, sizes[table.parent] + 1), k=count)
        reference = (
            f", FOREIGN KEY ({table.parent}) REFERENCES {table.parent}(id)" if table.parent else ""
        )
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(table.columns)}{reference})")
        rows = zip(*(columns[column] for column in table.columns), strict=True)
        connection.executemany(
            f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(table.columns))})", rows
        )
    connection.commit()
    image = connection.serialize()
    connection.close()
    return image


def make_tasks(n: int, known: list[Schema], generator: random.Random, folder: Path) -> list[dict]:
    """`n` tasks whose kinds take turns, on databases below `folder`, which are written if they are
    not there."""
    files = {schema.name: write_instances(schema, folder) for schema in known}
    made: list[dict] = []
    while len(made) < n:
        schema = generator.choice(known)
        question = make_question(KINDS[len(made) % len(KINDS)], schema, generator)
        if has_answer(question.sql, files[schema.name][0]):
            made.append(
                {
                    "id": f"{schema.name}/{len(made)}",
                    "kind": question.kind,
                    "question": question.text,
                    "gold": question.sql,
                    "schema": schema.text,
                    "databases": files[schema.name],
                }
            )
    return made


def has_answer(sql: str, database: str) -> bool:
    """Whether a query of ours finds anything there."""
    with closing(sqlite3.connect(database)) as connection:
        return any(value is not None for row in connection.execute(sql) for value in row)


def train_tasks(n: int, seed: int, folder: Path) -> list[dict]:
    """`n` training tasks; the same seed gives the same list."""
    return make_tasks(n, schemas(heldout=False), random.Random(f"train/{seed}"), folder)


def heldout_tasks(n: int, folder: Path) -> list[dict]:
    """The first `n` held-out tasks: none of their schemas is ever in `train_tasks`."""
    return make_tasks(n, schemas(heldout=True), random.Random("heldout"), folder)


def save_tasks(tasks: list[dict], path: Path) -> str:
    """Write them as JSON lines; the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks), encoding="utf-8")
    return str(path)


def load_spider(folder: Path, split: str) -> list[dict]:
    """The tasks of `split` (`train_spider` or `dev`) in a folder of Spider: tables.json, the
    split's own file, and database/ID/ID.sqlite. Further files beside that are further instances, as
    in its test suites.

    ConfigError for a folder that is missing, or is none of Spider's. What is wrong with a single
    database or query shows when a rollout meets it."""
    keys = ("table_names_original", "column_names_original", "foreign_keys")
    schemas_ = {
        one["db_id"]: spider_schema(one) for one in read_spider(folder, "tables.json", keys)
    }
    tasks: list[dict] = []
    for index, one in enumerate(read_spider(folder, f"{split}.json", ("question", "query"))):
        name = one["db_id"]
        if name not in schemas_:
            raise ConfigError(
                f"{folder / 'tables.json'} does not describe {name!r}, which {split}.json asks "
                "about"
            )
        first = folder / "database" / name / f"{name}.sqlite"
        if not first.is_file():
            raise ConfigError(
                f"{folder} is no folder of Spider: database/{name}/{name}.sqlite is not there. "
                f"{WHERE_IS_SPIDER}"
            )
        others = sorted(path for path in first.parent.glob("*.sqlite") if path != first)
        tasks.append(
            {
                "id": f"{split}/{index}",
                "kind": "spider",
                "question": one["question"],
                "gold": one["query"],
                "schema": schemas_[name],
                "databases": [str(path) for path in (first, *others)],
            }
        )
    return tasks


def read_spider(folder: Path, name: str, keys: tuple[str, ...]) -> list[dict]:
    """A JSON file of objects that have these keys, and a `db_id`."""
    try:
        objects = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"{folder} is no folder of Spider: {name} is not there. {WHERE_IS_SPIDER}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{folder / name} is not JSON: {error}") from None
    needed = {"db_id", *keys}
    if not isinstance(objects, list) or not all(
        isinstance(one, dict) and needed <= one.keys() for one in objects
    ):
        raise ConfigError(
            f"{folder / name} is not as in Spider: a list of objects with "
            f"{', '.join(sorted(needed))}"
        )
    return objects


def spider_schema(described: dict) -> str:
    """One object of tables.json as text: the tables, then which columns refer to which."""
    tables, columns = described["table_names_original"], described["column_names_original"]
    lines = [
        f"{table}({', '.join(column for owner, column in columns if owner == index)})"
        for index, table in enumerate(tables)
    ]
    # the first is `*` of no table, never referred to
    full = [f"{tables[owner]}.{column}" for owner, column in columns]
    return "\n".join(
        [*lines, *(f"{full[one]} = {full[other]}" for one, other in described["foreign_keys"])]
    )
