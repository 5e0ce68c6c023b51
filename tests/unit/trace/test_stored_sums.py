"""The sums that a table stores are those that a query of its events gives."""

from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.trace_files import Writing, write_trace

from penstock.progress import Silent
from penstock.trace import stored_sums
from penstock.trace.dimensions import Dimensions
from penstock.trace.event_cells import MEASURES, sums_sql
from penstock.trace.event_table import convert
from penstock.trace.ordered_events import ParquetEvents
from penstock.trace.questions.breakdowns import classes, files, ops, overlap, ranks, sizes, summary
from penstock.trace.questions.events_view import view_traces
from penstock.trace.questions.timeline import timeline
from penstock.trace.stored_sums import StoredSums, SumsToStore, TableSums
from penstock.trace.trace_set import find_trace_files, name_trace_files, open_trace_set

BY = {
    "by_thread": {"run", "host", "rank", "pid", "tid", "kind_id"},
    "by_path": {"run", "path_id", "kind_id"},
    "by_size": {"run", "each_bytes", "kind_id"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for rank, generation in enumerate((1, 2, 3, 3)):
        write_trace(folder, Writing(events=400, rank=rank, generation=generation, seed=rank))
    return load(folder, folder / "run.events")


def load(folder: Path, out: Path) -> Path:
    sources = find_trace_files([str(folder / "*.pfw*")])
    convert(name_trace_files(sources, run=""), out, progress=Silent())
    return out


def rows_of(connection: duckdb.DuckDBPyConnection, relation: str, names: list[str]) -> list[tuple[Any, ...]]:
    return sorted(connection.sql(f"SELECT {', '.join(names)} FROM {relation}").fetchall(), key=repr)


def test_stored_sums_are_those_of_the_events(table: Path) -> None:
    sums = TableSums(ParquetEvents(table))
    assert sums.by == BY
    with duckdb.connect() as connection:
        stored = StoredSums(connection, [("", sums)])
        connection.execute(f"CREATE VIEW events AS FROM read_parquet('{table}')")
        for name, by in BY.items():
            columns = sorted(by)
            names = [*columns, *MEASURES]
            expected = rows_of(connection, f"({sums_sql('events', columns)})", names)
            assert rows_of(connection, stored.relation(name), names) == expected
        paths = "(SELECT DISTINCT path_id, path FROM events WHERE path IS NOT NULL)"
        assert rows_of(connection, str(stored.find_texts("paths")), ["path_id", "path"]) == rows_of(
            connection, paths, ["path_id", "path"]
        )
        kinds = ["kind_id", "op", "name", "cat"]
        assert rows_of(connection, str(stored.find_texts("kinds")), kinds) == rows_of(
            connection, f"(SELECT DISTINCT {', '.join(kinds)} FROM events)", kinds
        )


def test_sums_of_two_tables_under_names_of_runs_stay_apart(table: Path) -> None:
    with duckdb.connect() as connection:
        sums = TableSums(ParquetEvents(table))
        stored = StoredSums(connection, [("first", sums), ("second", sums)])
        found = stored.find(frozenset(("run", "path_id")))
        assert found == ("by_path", frozenset(BY["by_path"]))
        by_run = (
            f"SELECT run, count(*), max(path_id) FROM {stored.relation('by_path')} GROUP BY run ORDER BY run"
        )
        first, second = connection.sql(by_run).fetchall()
        assert (first[:2], second[:2]) == (("first", first[1]), ("second", first[1]))
        assert second[2] - first[2] >= 1 << 32


@pytest.mark.parametrize("columns", [("path_id", "pid"), ("file",), ("each_bytes", "path_id")])
def test_what_no_stored_sums_are_by_is_not_found(columns: tuple[str, ...], table: Path) -> None:
    with duckdb.connect() as connection:
        stored = StoredSums(connection, [("", TableSums(ParquetEvents(table)))])
        assert stored.find(frozenset(columns)) is None


def test_sums_of_other_events_than_the_tables_are_not_used(table: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.events"
    pq.write_table(pq.read_table(table).slice(0, 100), part)
    assert pq.read_metadata(part).metadata[b"penstock.sums"]
    assert TableSums(ParquetEvents(part)).by == {}


def test_sums_that_would_be_many_are_not_stored(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_sums, "_MOST_SUMS", 50)
    sums = TableSums(ParquetEvents(load(table.parent, tmp_path / "run.events")))
    assert set(sums.by) == {"by_thread", "by_size"}
    with duckdb.connect() as connection:
        stored = StoredSums(connection, [("", sums)])
        assert stored.find_texts("kinds")
        assert stored.find_texts("paths") is None


def test_sums_that_do_not_fit_in_64_bits_are_not_stored() -> None:
    sums = SumsToStore([("", None, None, 1, 1)], [("read", "read", "POSIX")], [])
    longest = pa.array([1 << 61, 1 << 61])
    zeros = pa.array([0, 0], pa.int32())
    numbers = {"ts_us": pa.array([0, 1]), "dur_us": longest, "size_bytes": pa.nulls(2, pa.int64())}
    ids = {"thread_id": zeros, "kind_id": zeros, "path_id": pa.nulls(2, pa.int32())}
    sums.add(pa.table({**numbers, **ids}))
    assert sums.metadata() == {}


@pytest.mark.parametrize("tiers", [{}, {"fast": ["/p"]}], ids=["no tiers", "tiers"])
def test_questions_have_the_same_answers_with_and_without_stored_sums(
    tiers: dict[str, list[str]], table: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.events"
    events = pq.read_table(table)
    metadata = {key: value for key, value in events.schema.metadata.items() if b"sums" not in key}
    pq.write_table(events.replace_schema_metadata(metadata), bare)

    def answer(path: Path) -> tuple[bool, list[Any]]:
        with open_trace_set({"": [str(path)]}, progress=Silent()) as traces:
            view = view_traces(traces, Dimensions(tiers=tiers))
            is_stored = view.relations.has_cells(frozenset(("pid",)))
            questions = (
                *(summary, ops, files, classes, sizes, ranks, overlap, timeline),
                partial(files, by=("path", "op")),
                partial(overlap, by=("rank", "tid")),
                partial(sizes, by=("tier", "op")),
            )
            return is_stored, [question(view) for question in questions]

    (with_sums, stored), (without, computed) = answer(table), answer(bare)
    assert (with_sums, without) == (True, False)
    assert stored == computed
