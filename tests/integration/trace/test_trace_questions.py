"""The trace commands on real files: formats, dimensions, losses, errors and exit codes."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.synthesize import SynthesisSpec, synthesize

from penstock.cli import main
from penstock.trace.compare.trace_study import parse_document

SPEC = """
generation: 3
patterns:
  compute: {calls: [{op: Torch.compute, cat: ai, is_pathless: true, lane: compute}]}
  app: {calls: [{op: X.checkpoint, cat: checkpoint, is_pathless: true, is_stamped: true, lane: app}]}
  part:
    path: "{root}/part-{step}-{rank}.pt"
    calls: [{op: open64}, {op: write, sizes: [100, 4096]}, {op: close}]
lanes: {app: {after_us: 0}, compute: {after_us: 2000}}
runs:
  base:
    ranks: 2
    hosts: [n0, n1]
    places: {root: /pfs/ckpt}
    checkpoints: {steps: [1, 2, 3], every_us: 10000}
    does: [{pattern: app}, {pattern: part}, {pattern: compute}]
    budgets:
      - {patterns: [app], us: {others: 3000}}
      - {patterns: [compute], us: {others: 9000}}
      - {ops: [write], us: {0: 1500, 1: 1200}}
  new:
    ranks: 2
    hosts: [n0, n1]
    places: {root: /ssd/ckpt}
    checkpoints: {steps: [1, 2, 3], every_us: 10000}
    does: [{pattern: app}, {pattern: part}, {pattern: compute}]
    budgets:
      - {patterns: [app], us: {others: 6000}}
      - {patterns: [compute], us: {others: 9000}}
      - {ops: [write], us: {0: 1800, 1: 1700}}
    damage: [{kind: garbage_line, rank: 1, line: 4}]
compare: {baseline: base, app_event: X.checkpoint, tiers: {pfs: /pfs, ssd: /ssd}}
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "made"
    synthesize(parse_document(SynthesisSpec, SPEC, source="spec"), folder)
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    return capsys.readouterr().out


def asked(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    return json.loads(said(capsys, *words, "--json"))


def test_overlap_gives_rows_with_union_sum_and_concurrency(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = asked(capsys, "trace", "overlap", traces / "base", "--by", "rank")
    by_rank = {row["rank"]: row for row in document["rows"]}
    assert set(by_rank) == {0, 1}
    # opens and closes take a microsecond each, three checkpoints of two
    assert (by_rank[0]["union_us"], by_rank[0]["sum_us"], by_rank[0]["concurrency"]) == (1506, 1506, 1.0)
    assert by_rank[0]["compute_us"] == 9000
    assert isinstance(by_rank[0]["union_us"], int)


@pytest.mark.parametrize("by", ["pid", "host", "tid", "run"])
def test_overlap_groups_by_other_columns(traces: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    rows = asked(capsys, "trace", "overlap", traces / "base", "--by", by)["rows"]
    assert all(by in row for row in rows)
    assert sum(row["sum_us"] for row in rows) == 2712


def test_every_question_answers_as_json_csv_markdown_and_for_people(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = traces.parent / "base.events"
    asked(capsys, "trace", "load", traces / "base", "-o", table)
    for verb in ("summary", "ops", "files", "classes", "sizes", "ranks", "timeline", "overlap"):
        rows = asked(capsys, "trace", verb, table)["rows"]
        assert rows
        lines = list(csv.reader(io.StringIO(said(capsys, "trace", verb, table, "--format", "csv"))))
        assert lines[0] == list(rows[0])
    for verb in ("summary", "overlap"):
        assert said(capsys, "trace", verb, table, "--format", "markdown").startswith("### ")
        assert "…" not in said(capsys, "trace", verb, table)


def test_tiers_classes_and_phases_are_options(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = asked(
        capsys, "trace", "ops", traces / "base", traces / "new", "--tier", "a=/pfs", "--tier", "b=/ssd"
    )["rows"]
    assert {(row["tier"], row["op"]) for row in rows} >= {("a", "write"), ("b", "write")}
    rows = asked(
        capsys, "trace", "classes", traces / "base", "--class", "first=part-1-", "--by", "file_class"
    )["rows"]
    assert {row["file_class"]: row["num_files"] for row in rows} == {"first": 2, "part.pt": 4}
    rows = asked(capsys, "trace", "ops", traces / "base", "--phase", "io=name~checkpoint", "--by", "name")[
        "rows"
    ]
    assert "X.checkpoint" in {row["name"] for row in rows}


def test_events_of_a_file_are_in_order_and_an_unknown_file_gets_the_nearest_name(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = asked(capsys, "trace", "file", "part-2-1.pt", traces / "base")["rows"]
    assert [row["name"] for row in rows] == ["open64", "write", "write", "close"]
    assert main(["trace", "file", "part-2-7.pt", str(traces / "base")]) == 2
    assert "part-2-" in capsys.readouterr().err


def test_where_filters_events(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = asked(capsys, "trace", "ops", traces / "base", "--where", "op = 'write' AND rank = 1")["rows"]
    assert [(row["op"], row["num_events"]) for row in rows] == [("write", 6)]


def test_losses_are_printed_first_and_fail_only_with_strict(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "summary", str(traces / "new")]) == 0
    assert "1 of" in capsys.readouterr().err
    assert main(["trace", "summary", str(traces / "new"), "--strict"]) == 1


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        (["overlap", "--by", "rnak"], "rank"),
        (["timeline", "--bucket", "0.1us"], "microsecond"),
        (["ops", "--tier", "ssd"], "--tier ssd=/l/ssd"),
        (["ops", "--class", "x"], "--class"),
        (["ops", "--class", "x=("], "regular expression"),
        (["ops", "--class", "x=(?=y)"], "regular expression"),
        (["ops", "--class", "x=y{2000}"], "regular expression"),
        (["ops", "--phase", "x"], "--phase"),
        (["ops", "--phase", "x=args.a..b=1"], "not a condition"),
        (["ops", "--phase", "x=args.a.=1"], "not a condition"),
    ],
)
def test_wrong_options_are_refused_with_an_example(
    traces: Path, capsys: pytest.CaptureFixture[str], words: list[str], said_of_it: str
) -> None:
    assert main(["trace", words[0], str(traces / "base"), *words[1:]]) == 2
    assert said_of_it in capsys.readouterr().err


def test_compare_prints_findings_and_writes_a_report_and_json(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = asked(capsys, "trace", "compare", traces / "runs.yaml", "--out", tmp_path / "report")
    assert document["baseline"] == "base"
    assert {each["code"] for each in document["findings"]} == {"F5", "F10"}
    assert document["tables"]["t1"]["rows"][0] == {"time": "application event", "base": 3000, "new": 6000}
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "report.html", "report.md", "tables.parquet",
    ]  # fmt: skip
    text = said(capsys, "trace", "compare", traces / "runs.yaml")
    assert (
        text.index("differs from base")
        < text.index("F5 new: checkpoints are slower")
        < text.index("T1 Times")
    )


def test_compare_takes_runs_beside_each_other(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ("--tier", "pfs=/pfs", "--tier", "ssd=/ssd")
    runs = ("base=" + str(traces / "base"), str(traces / "new"))
    described = asked(capsys, "trace", "compare", traces / "runs.yaml")
    named = asked(capsys, "trace", "compare", *runs, *tiers)
    assert named["baseline"] == "base"
    assert named["tables"]["t2"] == described["tables"]["t2"]
    rows = asked(capsys, "trace", "compare", *runs)["tables"]["t1"]["rows"]
    assert [row["time"] for row in rows] == ["application event", "files I/O"]


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        (["base"], "One run has nothing to be compared with"),
        (["base/*"], "if they are files of one folder"),
        (["runs.yaml", "--tier", "a=/a"], "The file describes tiers"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_can(
    traces: Path, words: list[str], said_of_it: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(path) for path in traces.glob(words[0])]
    assert main(["trace", "compare", *files, *words[1:]]) == 2
    assert said_of_it in capsys.readouterr().err


@pytest.mark.parametrize("name", ["report.html", "report.md", "tables.parquet"])
def test_compare_writes_over_no_files_but_those_of_a_report(
    name: str, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", "compare", str(traces / "runs.yaml"), "--out", str(tmp_path)]
    (tmp_path / name).write_text("# My notes\n")
    assert main(words) == 2
    assert f"File exists and is not one of an earlier report ({tmp_path / name})" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / name).unlink()
    if name == "report.html":
        assert [main(words), main(words)] == [0, 0]


@pytest.mark.parametrize("target", ["absent", "empty"])
@pytest.mark.parametrize("name", ["report.html", "report.md", "tables.parquet", "page.html", "run.json"])
def test_nothing_is_written_through_a_link_to_nothing_or_to_an_empty_file(
    name: str, target: str, traces: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / name
    out.symlink_to(tmp_path / target)
    words = {
        "page.html": ["report", str(traces / "base"), "--out", str(out)],
        "run.json": ["export", str(traces / "base"), "--out", str(out)],
    }
    compare = ["compare", str(traces / "runs.yaml"), "--out", str(out.parent)]
    assert main(["trace", *words.get(name, compare)]) == 2
    assert not (tmp_path / "absent").exists()
    assert not (tmp_path / "empty").read_bytes()


def test_expect_fails_with_the_line_that_does_not_hold(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = tmp_path / "checks.yaml"
    text = (traces / "runs.yaml").read_text(encoding="utf-8").replace("base/", f"{traces}/base/")
    text = text.replace("new/", f"{traces}/new/")
    checks.write_text(text + 'checks: ["base.num_dropped == 0"]\n', encoding="utf-8")
    assert asked(capsys, "trace", "expect", checks)["holds"] is True
    checks.write_text(text + 'checks: ["base.num_dropped == 0", "new.num_dropped == 0"]\n', encoding="utf-8")
    assert main(["trace", "expect", str(checks)]) == 1
    assert "does not hold: new.num_dropped == 0 (new.num_dropped = 1)" in capsys.readouterr().err


def test_export_writes_a_trace_that_is_read_again(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    assert asked(capsys, "trace", "export", traces / "base", "-o", out)["num_events"] == 36
    rows = asked(capsys, "trace", "ops", out, "--by", "op")["rows"]
    assert {row["op"]: row["sum_us"] for row in rows}["write"] == 2700


@pytest.mark.parametrize("verb", ["compare", "expect"])
def test_a_description_that_is_not_there_or_not_yaml_is_wrong_usage(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", verb, str(tmp_path / "none.yaml")]) == 2
    broken = tmp_path / "broken.yaml"
    broken.write_text("runs: [", encoding="utf-8")
    assert main(["trace", verb, str(broken)]) == 2
    assert "broken.yaml" in capsys.readouterr().err


def test_people_see_a_thousand_rows_and_the_number_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        f'{{"name": "n{i}", "cat": "POSIX", "pid": {i}, "tid": 1, "ts": {i}, "dur": 1, "ph": "X",'
        f' "args": {{"fname": "/d/{i}"}}}}'
        for i in range(1234)
    ]
    trace = tmp_path / "many.pfw"
    trace.write_text("\n".join(["[", *lines, ""]))
    for verb in ("files", "ranks", "summary"):
        for form in ("table", "markdown"):
            shown = said(capsys, "trace", verb, trace, "--format", form).splitlines()
            assert "... and 234 more; --format csv or --json gives all" in shown
            assert len(shown) < 1100
    assert len(said(capsys, "trace", "files", trace, "--format", "csv").splitlines()) == 1235
    assert len(asked(capsys, "trace", "ranks", trace)["rows"]) == 1234
    rows = said(capsys, "trace", "sql", "SELECT path FROM events", trace).splitlines()
    assert rows[-1] == "... and 234 more; --json gives all"
    assert len(rows) < 1100
