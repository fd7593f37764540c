"""Questions of Spider, from a folder of it, as tasks like those of `tasks.py`."""

from __future__ import annotations

import json
from pathlib import Path

from agentlightning.errors import ConfigError

WHERE_IS_SPIDER = (
    "Spider is at https://yale-lily.github.io/spider (a zip file: unpack it, and give the folder "
    "with tables.json; the databases of https://github.com/taoyds/test-suite-sql-eval grade "
    "better). Without it, leave out --spider: then databases and questions are made here"
)


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
