"""The PostgreSQL server that tests use."""

from __future__ import annotations

import psycopg
import pytest

from tests.postgres import PostgresServer


def test_a_database_is_empty_durable_and_outlives_restarts(
    postgres_server: PostgresServer, postgres_database: str
) -> None:
    with psycopg.connect(postgres_database) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
        connection.execute("CREATE TABLE numbers AS SELECT 1 AS number")

    with psycopg.connect(postgres_database, autocommit=True) as open_before:
        postgres_server.kill()
        postgres_server.start()
        with pytest.raises(psycopg.OperationalError):
            open_before.execute("SELECT 1")
    postgres_server.restart()
    with psycopg.connect(postgres_database) as connection:
        assert connection.execute("SELECT number FROM numbers").fetchone() == (1,)
