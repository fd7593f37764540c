"""Is a query right? Execution match on several instances of a database, as in Spider's test-suite
evaluation.

Both queries run on every instance: the same tables with different contents, so that a query that is
right by chance on one of them (`> 40` where `> 41` was asked, and nobody is 41) is found out.
Results are compared as multisets of rows, in order only where the right query asks for one, with
columns in any order. The predicted query can only read, for a limited time. Unlike Spider's script,
`DISTINCT` is not taken out of both queries: whether rows repeat is part of the answer. How two
results are compared is in `sql_results.py`."""

from __future__ import annotations

from sql_results import sql_result_equal

SECONDS = 2.0  # for each query on each instance


def grade(task: dict, query: str) -> float:
    """1.0 where `query` and the task's `gold` agree on all of its `databases`, else 0.0.

    Raises InvalidError where the right query fails (a malformed one, a broken file), ConfigError
    for a missing file: that is no fault of the agent's, and fails the rollout instead of rewarding
    it."""
    agree = (
        sql_result_equal(query, task["gold"], database, timeout=SECONDS, any_column_order=True)
        == 1.0
        for database in task["databases"]
    )
    return float(all(agree))
