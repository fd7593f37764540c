"""A text-to-SQL team in LangGraph: a writer, a checker, and a rewriter. It does not know whether it
is being trained.

It answers a question about a SQLite database, in up to three turns, against any OpenAI-compatible
endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python agent.py shop.sqlite "How
    many are blue?"
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sqlite3
import time
from pathlib import Path
from typing import TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

ROLES = {
    "writer": "Write one SQLite query that answers the question.",
    "checker": "Say correct if the query answers the question, else what is wrong.",
    "rewriter": "Write a better SQLite query for the question.",
}
MAX_TURNS = 3  # a turn is a query
SHOWN_ROWS, SHOWN_CHARACTERS = 3, 200  # of a result
QUERY_SECONDS, QUERY_BYTES, QUERY_CHARACTERS = 2.0, 100_000, 1000
DENIED = ("printf", "format", "fts3_tokenizer")
ALLOWED = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)


class State(TypedDict, total=False):
    """What the team knows: what was asked, and the latest query with its result and what the
    checker says of it."""

    question: str
    schema: str
    database: str
    query: str
    result: str
    verdict: str
    turns: int


class Team(TypedDict):
    """The chat model of each role; they may be one and the same."""

    writer: BaseChatModel
    checker: BaseChatModel
    rewriter: BaseChatModel


def prompt(role: str, state: State) -> list[dict[str, str]]:
    """What a role is told: the schema, the question and, but for the writer, the latest query and
    what came of it."""
    seen = {"writer": ("question",), "checker": ("question", "query", "result")}
    lines = [state[key] for key in seen.get(role, ("question", "query", "result", "verdict"))]
    system = f"You are the {role}. {ROLES[role]}\n{state['schema']}"
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]


def query_of(text: str) -> str:
    """The query in an answer, with or without a Markdown fence around it."""
    fenced = re.search(r"```(?:sql\w*)?\s(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return (fenced[1] if fenced else text).strip()


def execute(query: str, database: str) -> str:
    """The first rows that `query` returns, or what is wrong with it: it may read this one database,
    for two seconds."""
    try:
        uri = f"{Path(database).resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=QUERY_SECONDS)
    except sqlite3.Error as error:
        return f"error: {error}"
    deadline = time.monotonic() + QUERY_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 100)
    # a function of long texts cannot be interrupted
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, QUERY_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200)
    # nor can the reading of a query, which takes twice as long for each table that doubles another
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, QUERY_CHARACTERS)
    connection.set_authorizer(authorized)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    try:
        rows = connection.execute(query).fetchmany(SHOWN_ROWS)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return f"error: {error}"
    finally:
        connection.close()
    shown = "; ".join(", ".join(show(value) for value in row) for row in rows)
    return shown[:SHOWN_CHARACTERS] or "no rows"


def authorized(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    """What a query may do: read, by functions that end in time and tell nothing of the process."""
    denied = action not in ALLOWED or function in DENIED
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


def show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def schema_of(database: str) -> str:
    """The tables of a SQLite file, one a line, and under them which columns refer to which."""
    connection = sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro", uri=True)
    tables = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    ]
    columns = {
        table: list(connection.execute("SELECT name FROM pragma_table_info(?)", (table,)))
        for table in tables
    }
    keys = [
        f"{table}.{column} = {other}.{target}"
        for table in tables
        for column, other, target in connection.execute(
            'SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)', (table,)
        )
    ]
    connection.close()
    return "\n".join(
        [f"{table}({', '.join(name for (name,) in columns[table])})" for table in tables] + keys
    )


async def ask(role: str, state: State, runtime: Runtime[Team]) -> str:
    return (await runtime.context[role].ainvoke(prompt(role, state))).text


async def write(state: State, runtime: Runtime[Team]) -> State:
    return {"query": query_of(await ask("writer", state, runtime)), "turns": 1}


async def check(state: State, runtime: Runtime[Team]) -> State:
    seen: State = {
        **state,
        "result": await asyncio.to_thread(execute, state["query"], state["database"]),
    }
    return {"result": seen["result"], "verdict": await ask("checker", seen, runtime)}


async def rewrite(state: State, runtime: Runtime[Team]) -> State:
    return {"query": query_of(await ask("rewriter", state, runtime)), "turns": state["turns"] + 1}


def after_check(state: State) -> str:
    return END if state["verdict"].strip().lower().startswith("correct") else "rewrite"


def after_rewrite(state: State) -> str:
    return "check" if state["turns"] < MAX_TURNS else END


def make_graph():
    graph = StateGraph(State, context_schema=Team)
    for node in (write, check, rewrite):
        graph.add_node(node)
    graph.add_edge(START, "write")
    graph.add_edge("write", "check")
    graph.add_conditional_edges("check", after_check, ["rewrite", END])
    graph.add_conditional_edges("rewrite", after_rewrite, ["check", END])
    return graph.compile()


GRAPH = make_graph()


async def answer(question: str, schema: str, database: str, team: Team) -> State:
    """Let the team work on one question; `query` of what it returns is its answer."""
    state: State = {"question": question, "schema": schema, "database": database}
    return await GRAPH.ainvoke(state, context=team)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a SQLite database a question.")
    parser.add_argument("database")
    parser.add_argument("question")
    parser.add_argument("--model", default="policy", help="the model name to ask the endpoint for")
    options = parser.parse_args()
    if not Path(options.database).is_file():
        parser.error(f"there is no database {options.database}")
    model = ChatOpenAI(model=options.model)
    team: Team = {"writer": model, "checker": model, "rewriter": model}
    state = asyncio.run(
        answer(options.question, schema_of(options.database), options.database, team)
    )
    print(state["query"])
    print(execute(state["query"], options.database))


if __name__ == "__main__":
    main()
