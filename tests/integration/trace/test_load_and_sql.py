import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.trace_files import START_US, Writing, make_events, write_trace

from penstock.cli import main
from penstock.errors import OutOfSpace, PenstockError, UsageError
from penstock.progress import Progress
from penstock.results.published_files import publishing
from penstock.trace import load
from penstock.trace.event_schema import SCHEMA
from penstock.trace.questions.sql import answer_query, check_query
from penstock.trace.reading.trace_files import find_trace_files
from penstock.trace.trace_set import (
    GatheredEvents,
    convert,
    name_trace_files,
    open_trace_set,
    read_events,
    read_facts,
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(3):
        write_trace(folder, Writing(events=400, rank=rank, generation=rank + 1))
    return folder


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_load_makes_a_table_sorted_by_time_over_all_files(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.events"
    document = run_json(capsys, "trace", "load", str(traces), "-o", str(out))
    table = pq.read_table(out)
    assert document["events"] == table.num_rows == 1201
    assert table.schema.names == SCHEMA.names
    times = table["ts_us"].to_pylist()
    assert times == sorted(times)
    assert len(set(table["file"].to_pylist()[:200])) > 1
    statistics = pq.read_metadata(out).row_group(0).column(0).statistics
    assert (statistics.min, statistics.max) == (times[0], times[-1])


def test_sql_gives_the_same_answer_from_files_and_table(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.events"
    assert main(["trace", "load", str(traces), "-o", str(out)]) == 0
    capsys.readouterr()
    query = "SELECT rank, op, count(*) AS n, sum(size_bytes) AS b FROM events GROUP BY ALL ORDER BY ALL"
    raw = run_json(capsys, "trace", "sql", query, str(traces))
    assert run_json(capsys, "trace", "sql", query, str(out)) == raw
    assert raw["columns"] == ["rank", "op", "n", "b"]
    reads = sum(event.size_bytes or 0 for event in make_events(Writing(events=400)) if event.name == "read")
    assert [0, "read", sum(e.name == "read" for e in make_events(Writing(events=400))), reads] in raw["rows"]


@pytest.mark.parametrize(
    "words",
    [["sql", "SELECT offset, ret FROM events"], ["summary", "--where", "offset > 5"]],
    ids=["query", "where"],
)
def test_the_column_that_is_a_word_of_sql_is_to_be_quoted(
    words: list[str], traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *words, str(traces)]) == 2
    assert 'Quote the column: "offset".' in capsys.readouterr().err
    assert main(["trace", *(word.replace("offset", '"offset"') for word in words), str(traces)]) == 0


def test_several_tables_are_summarized_as_their_files(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [str(tmp_path / f"{number}.events") for number in range(3)]
    for path, table in zip(find_trace_files([str(traces)]), tables, strict=True):
        assert main(["trace", "load", str(path), "-o", table]) == 0
    capsys.readouterr()
    assert run_json(capsys, "trace", "summary", *tables) == run_json(capsys, "trace", "summary", str(traces))


def test_a_column_that_sql_names_wrongly_is_wrong_usage(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "sql", "SELECT opp FROM events", str(traces)]) == 2
    assert "opp" in capsys.readouterr().err


def test_where_keeps_only_matching_events(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT DISTINCT op FROM events"
    assert run_json(capsys, "trace", "sql", query, str(traces), "--where", "op = 'write'")["rows"] == [
        ["write"]
    ]


def test_strict_refuses_a_damaged_trace_and_leaves_no_table(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (traces / "broken.pfw").open("wb") as file:
        file.write(b'{"id":1,"name":"close","cat":"POSIX","pid":1,"tid":1,"ts":5,"du\n')
    out = tmp_path / "run.events"
    assert main(["trace", "load", str(traces), "-o", str(out), "--strict"]) == 1
    assert "cut short" in capsys.readouterr().err
    assert not out.exists()
    assert main(["trace", "load", str(traces), "-o", str(out)]) == 0
    assert "broken.pfw: 1 of 1 lines damaged: 1 cut short, dropped" in capsys.readouterr().err


def test_a_table_older_than_its_sources_is_made_again(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.events"
    convert(name_trace_files(find_trace_files([str(traces)]), run=""), out, progress=Progress())
    write_trace(traces, Writing(events=900, rank=1, generation=2))
    with open_trace_set({"": [str(out)]}, progress=Progress()) as opened:
        assert opened.connection.sql("SELECT count(*) FROM events").fetchall() == [(1701,)]
    facts = read_facts(out)
    assert facts is not None
    sizes = [path.stat().st_size for path in sorted(traces.iterdir())]
    assert [source["size_bytes"] for source in facts.sources] == sizes


def test_the_name_of_a_table_is_no_pattern_of_other_names(traces: Path, tmp_path: Path) -> None:
    table, other = tmp_path / "run[1]*.events", tmp_path / "run1.events"
    files = name_trace_files(find_trace_files([str(traces)]), run="")
    convert(files, table, progress=Progress())
    convert(files[:1], other, progress=Progress())
    with load(table) as run:
        assert len(run.events) == 1201


@pytest.mark.parametrize(
    "facts",
    [
        '{"version": 3, "accounts": [], "sources": [{}], "where": ""}',
        '{"version": 3, "accounts": [], "sources": "abc", "where": ""}',
        (
            '{"version": 3, "accounts": [], "where": "", "sources":'
            ' [{"path": "a", "name": "a", "run": "", "rank_pattern": 7}]}'
        ),
        "{",
        "[]",
        "3",
        '{"version": [3]}',
        '{"version": 3, "accounts": 7}',
        '{"version": 3, "accounts": [{}]}',
    ],
)
def test_a_table_with_damaged_facts_is_refused(facts: str, tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    pq.write_table(pa.table({"ts_us": [1]}).replace_schema_metadata({"penstock.trace": facts}), path)
    with pytest.raises(PenstockError, match=r"damaged|Another version") as refusal:
        read_facts(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("pattern", ["(", "rank"])
def test_a_damaged_pattern_of_ranks_in_a_table_is_refused_when_it_is_needed(
    pattern: str, traces: Path, tmp_path: Path
) -> None:
    path, source = tmp_path / "run.events", min(traces.iterdir())
    convert(name_trace_files([source], run=""), path, progress=Progress())
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"penstock.trace"])
    facts["sources"][0]["rank_pattern"] = pattern
    pq.write_table(table.replace_schema_metadata({"penstock.trace": json.dumps(facts)}), path)
    with load(path) as run:
        assert len(run.events) == 400
    os.utime(source, ns=(1, 1))
    with pytest.raises(UsageError, match="finds no rank in a file's name"), load(path):
        pass


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rank", None),
        ("ts_us", pa.array(["1"] * 400)),
        ("path", pa.array([["/d/a"]] * 400)),
        ("path", pa.array([{"x": 1}] * 400)),
        ("path", pa.array([b"\xff"] * 400)),
        ("dur_us", pa.array([1.5] * 400)),
    ],
)
def test_a_table_whose_columns_are_not_those_of_events_is_refused_by_its_name(
    column: str, values: pa.Array | None, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.events"
    convert(name_trace_files([min(traces.iterdir())], run=""), path, progress=Progress())
    table = pq.read_table(path)
    place, names = table.column_names.index(column), table.column_names
    table = table.remove_column(place) if values is None else table.set_column(place, column, values)
    assert values is None or table.column_names == names
    pq.write_table(table, path)
    for words in (["sql", "SELECT 1"], ["summary"], ["report", "--json"]):
        assert main(["trace", *words, str(path)]) == 1
        told = capsys.readouterr().err
        assert f"This event table lacks columns of events: {column}" in told
        assert str(path) in told


@pytest.mark.parametrize(
    ("column", "value"), [("ts_us", None), ("op", None), ("dur_us", -5), ("end_us", 1 << 62)]
)
def test_a_table_with_rows_that_cannot_be_events_is_refused(
    column: str, value: int | None, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.events"
    convert(name_trace_files([min(traces.iterdir())], run=""), path, progress=Progress())
    table = pq.read_table(path)
    values = [value, *table[column].to_pylist()[1:]]
    table = table.set_column(
        table.column_names.index(column), column, pa.array(values, table.schema.field(column).type)
    )
    pq.write_table(table, path)
    for words in (["sql", "SELECT 1"], ["summary"], ["report", "--json"]):
        assert main(["trace", *words, str(path)]) == 1
        assert "This event table has 1 row that cannot be an event" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"ts": 1 << 60}, {"args": {"offset": 1 << 61}}])
def test_an_event_too_large_to_evaluate_is_an_error_that_shows_its_number(
    given: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.pfw"
    args = {"fname": "/data/a", "ret": 4096, "offset": 0}
    about = {"name": "read", "cat": "POSIX", "pid": 1, "tid": 1, "dur": 5, "ph": "X", "args": args}
    events = [about | {"ts": 10 * number} for number in range(200)]
    events[7] |= {**given, "args": args | given.get("args", {})}
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["trace", "report", str(path), "-o", str(tmp_path / "run.html")]) == 1
    assert "An event has a number or a text that cannot be evaluated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "chunk", "num_chunks"),
    [
        ("ts_us", pa.array([7] * 50_000), 60),
        ("args", pa.array(["x" * (16 << 20)]), 70),
    ],
    ids=["very many events", "very long texts"],
)
def test_a_table_that_unpacks_to_much_more_than_its_size_is_refused(
    column: str, chunk: pa.Array, num_chunks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [pa.chunked_array([pa.nulls(len(chunk), one.type)] * num_chunks) for one in SCHEMA]
    columns[SCHEMA.get_field_index(column)] = pa.chunked_array([chunk] * num_chunks)
    facts = json.dumps({"version": 3, "accounts": [], "sources": [], "where": ""})
    table = pa.table(columns, SCHEMA.names).replace_schema_metadata({"penstock.trace": facts})
    path = tmp_path / "run.events"
    group_rows = 1 if len(chunk) == 1 else table.num_rows
    pages = {"max_rows_per_page": table.num_rows, "data_page_size": 1 << 30}
    pq.write_table(
        table, path, compression="zstd", row_group_size=group_rows, use_dictionary=["ts_us"], **pages
    )
    assert main(["trace", "sql", "SELECT 1", str(path)]) == 1
    told = capsys.readouterr().err
    assert "This event table unpacks to over 100 times its size" in told
    assert str(path) in told


def test_alike_events_make_a_table_that_can_be_read(tmp_path: Path) -> None:
    source, path = tmp_path / "x.pfw", tmp_path / "x.events"
    line = '{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":1700000000000000,"dur":1,"ph":"X","args":{}}\n'
    source.write_text(line * 300_000)
    convert(name_trace_files([source], run=""), path, progress=Progress())
    with load(path) as run:
        assert len(run.events) == 300_000
    assert pq.read_metadata(path).num_rows < 50 * path.stat().st_size


def test_the_table_of_another_user_is_not_rebuilt_from_the_files_that_it_names(
    traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run.events"
    convert(name_trace_files(find_trace_files([str(traces)]), run=""), out, progress=Progress())
    before = out.read_bytes()
    write_trace(traces, Writing(events=900, rank=1, generation=2))
    if os.geteuid() == 0:
        os.chown(out, 4711, 4711)
    else:
        out.chmod(0o666)
    with pytest.raises(UsageError, match="cannot be rebuilt here"), load(out):
        pass
    assert out.read_bytes() == before


def test_a_table_outlives_its_sources(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.events"
    convert(name_trace_files(find_trace_files([str(traces)]), run=""), out, progress=Progress())
    for path in traces.iterdir():
        path.unlink()
    with load(out) as run:
        assert len(run.events) == 1201


def test_a_table_is_never_written_over_something_else(traces: Path, tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(UsageError, match="not a Penstock event table"):
        convert(name_trace_files(find_trace_files([str(traces)]), run=""), precious, progress=Progress())
    assert precious.read_text() == "years of work"


def test_an_output_that_is_an_input_is_refused_before_anything_is_read(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, exported = tmp_path / "r.events", tmp_path / "r.json.gz"
    assert main(["trace", "load", str(traces), "-o", str(table)]) == 0
    assert main(["trace", "export", str(table), "-o", str(exported)]) == 0
    (tmp_path / "same").hardlink_to(table)
    for words in (
        ["load", str(table), "-o", str(table)],
        ["load", str(table), "-o", str(tmp_path / "same")],
        ["load", str(table), "-o", str(table), "--dask", "local"],
        ["export", str(exported), "-o", str(exported)],
    ):
        kept = Path(words[3]).read_bytes()
        capsys.readouterr()
        assert main(["trace", *words]) == 2
        assert "The output is one of the inputs" in capsys.readouterr().err
        assert Path(words[3]).read_bytes() == kept


def test_a_table_is_not_replaced_by_one_without_events(traces: Path, tmp_path: Path) -> None:
    table, noise = tmp_path / "r.events", tmp_path / "noise.pfw"
    assert main(["trace", "load", str(traces), "-o", str(table)]) == 0
    kept = table.read_bytes()
    noise.write_text("no event\n" * 9)
    assert main(["trace", "load", str(noise), "-o", str(table)]) == 1
    assert table.read_bytes() == kept


@pytest.mark.parametrize("verb", ["export", "report"])
def test_export_and_report_replace_only_what_they_have_made(
    verb: str, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, made = tmp_path / "r.events", tmp_path / "made"
    assert main(["trace", "load", str(traces), "-o", str(table)]) == 0
    trace = next(traces.iterdir())
    for precious in (table, trace):
        kept = precious.read_bytes()
        assert main(["trace", verb, str(traces), "-o", str(precious)]) == 2
        said = capsys.readouterr().err
        assert "File exists and is not an earlier" in said or "The output is one of the inputs" in said
        assert precious.read_bytes() == kept
    made.touch()
    for _ in range(2):
        assert main(["trace", verb, str(traces), "-o", str(made)]) == 0
    assert made.stat().st_size


def test_an_export_that_fails_leaves_the_earlier_one(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.json"
    assert main(["trace", "export", str(traces), "-o", str(out)]) == 0
    kept = out.read_bytes()

    def run_out_of_space(*_: Any) -> Iterator[dict[str, Any]]:
        yield {}
        raise OutOfSpace("No space is left", uri=str(out))

    monkeypatch.setattr("penstock.trace.perfetto_export._documents", run_out_of_space)
    assert main(["trace", "export", str(traces), "-o", str(out)]) == 1
    assert out.read_bytes() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "traces"]


@pytest.mark.parametrize("verb", ["load", "export", "report"])
def test_an_output_that_is_no_file_is_refused(
    verb: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.lstat("/dev/stdout").st_ino
    for name in ("/dev/stdout", "/dev/null"):
        assert main(["trace", verb, str(traces), "-o", name]) == 2
        assert "is not a file" in capsys.readouterr().err
    assert os.lstat("/dev/stdout").st_ino == before
    with pytest.raises(UsageError, match="must be a file"), publishing(Path("/dev/null")):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.progress import Progress
from penstock.trace.trace_set import convert
from penstock.trace.reading.trace_files import find_trace_files
from penstock.trace.trace_set import name_trace_files

class Killer(Progress):
    def advance(self, amount):
        os.kill(os.getpid(), signal.SIGKILL)

convert(name_trace_files(find_trace_files([sys.argv[1]]), run=""), Path(sys.argv[2]), progress=Killer())
"""


def test_a_killed_conversion_leaves_no_table_and_the_next_cleans_up(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "run.events"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(traces), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(out.parent.iterdir())) == 1
    convert(name_trace_files(find_trace_files([str(traces)]), run=""), out, progress=Progress())
    assert list(out.parent.iterdir()) == [out]


def test_events_come_as_relation_arrow_and_pandas(traces: Path) -> None:
    with load(str(traces / "*.pfw.gz"), run="base", where="op = 'close'") as run:
        table = run.events.arrow()
        assert table.num_rows == len(run.events) == len(run.events.pandas())
        assert {"tier", "file_class", "phase", "run", "rank", "host", "end_us", "ret"} <= set(
            table.column_names
        )
        first: Any = run.events.filter("rank = 1").to_arrow_table()
        assert min(first["ts_us"].to_pylist()) >= START_US
        assert run.losses() == []


def test_runs_have_names(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.events"
    convert(name_trace_files(find_trace_files([str(traces)]), run="old"), out, progress=Progress())
    with load({"table": str(out), "raw": str(traces)}) as run:
        rows = run.sql("SELECT run, count(*) FROM events GROUP BY run ORDER BY run").fetchall()
    assert rows == [("raw", 1201), ("table", 1201)]


def test_a_name_that_stands_for_nothing_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(str(tmp_path / "*.pfw"))


def test_a_parquet_file_of_something_else_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), other)
    assert main(["trace", "sql", "SELECT 1", str(other)]) == 2
    assert "not an event table" in capsys.readouterr().err
    assert main(["trace", "load", str(tmp_path), "-o", str(other)]) == 2


def test_a_program_read_as_a_trace_is_all_dropped_and_never_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(sys.executable).resolve()
    query = "SELECT count(*) FROM events"
    assert main(["trace", "sql", query, str(program), "--where", "op = 'read'", "--json"]) == 1
    assert "it seems to be" in capsys.readouterr().err


def test_help_of_the_verbs_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("load", "sql"):
        assert main(["trace", verb, "--help"]) == 0
        assert f"penstock trace {verb}" in capsys.readouterr().out


def test_columns_of_one_name_are_all_shown_and_none_is_squeezed_off_a_terminal(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "sql", "SELECT 'a' AS x, 'b' AS x, 'c' AS x", str(traces)]) == 0
    heads, _, values = capsys.readouterr().out.strip().splitlines()
    assert heads.split() == ["x", "x", "(2)", "x", "(3)"]
    assert values.split() == ["a", "b", "c"]
    columns = ", ".join(f"'{'v' * 20}' AS column_{number}" for number in range(20))
    assert main(["trace", "sql", f"SELECT {columns}", str(traces)]) == 0
    assert capsys.readouterr().out.count("v" * 20) == 20


def test_error_of_a_query_shows_the_query_alone(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "sql", "SELECT op,\n  nope FROM events", str(traces)]) == 2
    said = capsys.readouterr().err
    assert "EXPLAIN" not in said
    shown, caret = said[said.index("LINE 2:") :].splitlines()[:2]
    assert shown == "LINE 2:   nope FROM events"
    assert caret.index("^") == shown.index("nope")


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
        ("SELECT * FROM read_csv('/etc/passwd')", "disabled"),
        ("SELECT * FROM read_text('/etc/passwd')", "disabled"),
        ("SELECT x FROM events", "x"),
    ],
)
def test_a_query_that_does_more_than_read_events_is_refused(query: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_query(query)


@pytest.mark.parametrize(
    "query", ["FROM events", "SUMMARIZE events", "DESCRIBE events", "EXPLAIN FROM events"]
)
def test_other_queries_that_only_read_are_answered(query: str, traces: Path) -> None:
    assert main(["trace", "sql", query, str(traces)]) == 0


def test_more_events_than_fit_in_memory_are_sorted_from_disk(traces: Path, tmp_path: Path) -> None:
    files = name_trace_files(find_trace_files([str(traces)]), run="")
    answers = []
    for limit in (100, 10_000):
        gathered = GatheredEvents(tmp_path, limit)
        read_events(files, gathered, progress=Progress())
        assert (gathered.num_parts > 0) is (limit == 100)
        with duckdb.connect() as connection:
            answers.append(connection.execute(gathered.source(connection)).fetchall())
    times = [row[0] for row in answers[0]]
    assert answers[0] == answers[1]
    assert times == sorted(times)


def test_sql_in_a_table_is_not_run_when_its_sources_have_changed(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, source = tmp_path / "run.events", min(traces.iterdir())
    assert main(["trace", "load", "-o", str(table), str(source), "--where", "op = 'write'"]) == 0
    os.utime(source, ns=(1, 1))
    assert main(["trace", "sql", "SELECT 1", str(table)]) == 2
    assert "trace load --where 'op = '" in capsys.readouterr().err


FULL = 'mount -t tmpfs -o size=100k tmpfs "$1" && exec "$2" -m penstock trace load "$3" -o "$1/run.events"'


def test_a_full_disk_is_an_error_that_names_the_table(tmp_path: Path) -> None:
    source, small = tmp_path / "run.pfw", tmp_path / "small"
    small.mkdir()
    random = Random(7)
    lines = (
        f'{{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":{random.getrandbits(40)},"dur":1,"ph":"X",'
        f'"args":{{"ret":{random.getrandbits(40)},"fname":"/{random.getrandbits(64)}"}}}}'
        for _ in range(20_000)
    )
    source.write_text("\n".join(["[", *lines, ""]))
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts need privileges that this user lacks")
    command = ["unshare", "-m", "sh", "-c", FULL, "sh", str(small), sys.executable, str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert f"No space left on device ({small}/run.events). Free some space" in done.stderr


def test_no_room_for_sorting_is_not_the_fault_of_the_query(tmp_path: Path) -> None:
    source = tmp_path / "run.pfw"
    source.write_text("[\n")

    def sort() -> None:
        with open_trace_set({"": [str(source)]}, progress=Progress()) as traces:
            traces.connection.execute("SET memory_limit = '30MB'")
            traces.connection.execute("SET max_temp_directory_size = '1MB'")
            answer_query(
                traces.connection, "SELECT md5(i::VARCHAR) AS x FROM range(3_000_000) r(i) ORDER BY x"
            )

    with pytest.raises(OutOfSpace, match=r"No space left on device \(TMPDIR="):
        sort()
