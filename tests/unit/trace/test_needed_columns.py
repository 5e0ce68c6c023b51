"""A user's query is planned before anything is read: which columns it needs, and that it only reads."""

import duckdb
import pytest

from penstock.errors import UsageError
from penstock.trace.event_schema import ALL_COLUMNS
from penstock.trace.needed_columns import check_query, find_needed_columns


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        ("SELECT op, count(*), sum(dur_us) FROM events GROUP BY op", {"op", "dur_us"}),
        ("SELECT count(*) FROM events", set()),
        ("SELECT max(end_us) FROM events WHERE path LIKE '%x'", {"end_us", "path"}),
        ("WITH all_of_it AS (SELECT * FROM events) SELECT step FROM all_of_it", {"step"}),
        ("SELECT e.op FROM events e JOIN events f USING (path)", {"op", "path"}),
        ("SELECT COLUMNS('.*_us') FROM events", {"ts_us", "dur_us", "end_us"}),
        ("SELECT kind_id, sum(dur_us) FROM events GROUP BY 1", {"op", "name", "cat", "dur_us"}),
        ("FROM events", ALL_COLUMNS),
        ("SUMMARIZE events", ALL_COLUMNS),
        ("EXPLAIN SELECT op FROM events", ALL_COLUMNS),
        ("DESCRIBE events", set()),
        ("SELECT 1", set()),
    ],
)
def test_a_query_needs_the_columns_that_its_plan_reads(query: str, columns: set[str]) -> None:
    assert find_needed_columns(query) == columns


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("COPY (SELECT 1) TO '/tmp/x'", "of the kind copy"),
        ("ATTACH '/tmp/x.db'", "of the kind attach"),
        ("INSTALL httpfs", "of the kind load"),
        ("CREATE TABLE x AS SELECT 1", "of the kind create"),
        ("DROP VIEW events", "of the kind drop"),
        ("SET threads = 1", "of the kind"),
        ("SELECT 1; SELECT 2", "There are 2 statements"),
        ("", "There are 0 statements"),
        ("SELEC 1", "syntax error"),
    ],
)
def test_a_query_that_does_more_than_read_is_refused(query: str, message: str) -> None:
    with duckdb.connect() as connection, pytest.raises(UsageError, match=message):
        check_query(connection, query)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT x FROM events",
    ],
)
def test_a_query_of_other_files_or_columns_is_refused_before_anything_is_read(query: str) -> None:
    with pytest.raises(UsageError):
        find_needed_columns(query)
