"""Penstock's own traced runs explain themselves: where the time of each step went, and which run it was."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import Browser
from tests.support.command_line import run_command
from tests.support.repeated_measurement import measure_until
from tests.support.traced_training import FILE_BYTES, TracedRun, make_data_set, train_traced

import penstock.trace
from penstock.results.event_files import read_events
from penstock.results.step_events import SpanKind


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    folder = tmp_path_factory.mktemp("own")
    make_data_set(folder / "data")
    return train_traced(folder / "data", folder / "out", compute_s=0.02)


def ask(traces: Path, query: str) -> list[tuple[Any, ...]]:
    with penstock.trace.load(traces) as loaded:
        assert loaded.losses() == []
        assert loaded.events.name
        return loaded.sql(query).fetchall()


def asked(*words: object) -> Mapping[str, Any]:
    document: Mapping[str, Any] = run_command(*words, "--json").document
    return document


def test_spans_of_each_step_last_as_long_as_the_run_recorded(run: TracedRun) -> None:
    spans = ask(
        run.traces,
        """SELECT epoch, step, sum(dur_us) FILTER (WHERE op = 'train.wait'),
                  sum(dur_us) FILTER (WHERE op = 'train.compute'),
                  sum(dur_us) FILTER (WHERE op = 'train.barrier'),
                  sum(dur_us) FILTER (WHERE op = 'train.step')
           FROM events WHERE step IS NOT NULL GROUP BY epoch, step ORDER BY epoch, step""",
    )
    steps = run.steps
    assert [row[:2] for row in spans] == [(step["epoch"], step["step"]) for step in steps]
    moments = ("start_ns", "loaded_ns", "computed_ns", "barrier_ns")
    pairs = [*pairwise(moments), ("start_ns", "barrier_ns")]
    for part, (began, ended) in enumerate(pairs):
        recorded_us = (steps[ended] - steps[began]) / 1000
        assert [row[2 + part] for row in spans] == pytest.approx(list(recorded_us), abs=1)


def test_the_summary_names_the_run_and_has_its_computation(
    run: TracedRun,
) -> None:
    summary = asked("trace", "summary", run.traces)
    (facts,) = summary["rows"]
    computed_ns = int((run.steps["computed_ns"] - run.steps["loaded_ns"]).sum())
    assert facts["compute_union_us"] == pytest.approx(computed_ns / 1000, abs=len(run.steps))
    assert facts["app_io_union_us"] == 0
    folder = Path(run.result.results_dir)
    assert summary["notes"][0] == f"Trace of the run {folder.name}; its results: {folder.absolute()}"


def test_reading_overlaps_with_computation_and_waiting_is_no_io(
    run: TracedRun,
) -> None:
    (row,) = asked("trace", "overlap", run.traces, "--by", "pid")["rows"]
    assert 0 < row["overlap_us"] <= row["union_us"]
    assert row["compute_us"] > row["overlap_us"]
    (everything,) = asked("trace", "overlap", run.traces, "--by", "pid", "--of", "all")["rows"]
    assert everything["union_us"] == row["union_us"]
    with penstock.trace.load(run.traces) as loaded:
        phases = dict(loaded.events.aggregate("cat, any_value(phase)", "cat").fetchall())
    assert phases["wait"] == "wait"
    assert phases["barrier"] == "barrier"
    assert (phases["compute"], phases["POSIX"]) == ("compute", "io")
    assert {phases[cat] for cat in ("step", "epoch", "run")} == {"loop"}


def test_the_report_draws_each_step_and_what_it_waited_for(
    browser: Browser, run: TracedRun, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    timeline = asked("trace", "report", run.traces, "-o", page)["figures"]["timeline"]
    bars = [row for row in timeline["rows"] if row["kind"] == "step"]
    assert sum(bar["num_events"] for bar in bars) == len(run.steps)
    waited = sum(bar["sum_us"] for bar in timeline["rows"] if bar["kind"] == "wait")
    assert waited == pytest.approx(waited_us(run), abs=len(run.steps))
    looks = "[...document.querySelectorAll('#timeline ~ .panels')][0].querySelectorAll('path.%s').length"
    questions = {look: looks % look for look in ("t-faint", "t-doubt", "t-pale", "t-full")}
    seen = browser.open(page, width=390, dark=True, questions=questions)
    assert seen.errors == []
    assert seen.answers == dict.fromkeys(questions, 1)


def test_result_and_shown_run_name_the_trace(run: TracedRun) -> None:
    assert run.result.document()["trace"] == str(run.traces)
    shown = run_command("results", "show", run.result.results_dir)
    assert str(run.traces) in shown.stdout
    assert asked("results", "show", run.result.results_dir)["trace"] == str(run.traces)


def write_study(folder: Path, **runs: TracedRun) -> Path:
    """`runs.yaml` of these runs; the first is the baseline."""
    lines = [f"  {name}: {run.traces}/*.pfw.gz" for name, run in runs.items()]
    path = folder / "runs.yaml"
    path.write_text("\n".join(["runs:", *lines, "checks: [findings.F1 == 0]"]))
    return path


def waited_us(run: TracedRun) -> float:
    steps = run.steps
    return float((steps["loaded_ns"] - steps["start_ns"]).sum()) / 1000


COMPUTE_S = 0.15
READ_S = COMPUTE_S / 0.98
"""What a step's two files take: computation hides all but two percent of it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """A run that computes for nearly all of its time, on the data set `data` beside it."""
    folder = tmp_path_factory.mktemp("base")
    make_data_set(folder / "data")
    return train_until(90, 10, folder / "data", folder, compute_s=COMPUTE_S, read_s=READ_S)


def train_until(
    percent: float, within: float, data: Path, folder: Path, *, compute_s: float, read_s: float
) -> TracedRun:
    """A run of this utilization."""
    expected = pytest.approx(percent, abs=within)
    run = measure_until(
        lambda attempt: train_traced(
            data, folder / f"run-{attempt}", compute_s=compute_s, rate=2 * FILE_BYTES / read_s
        ),
        lambda run: run.result.document()["au_compat"] == expected,
    )
    assert run.result.document()["au_compat"] == expected
    return run


@pytest.mark.parametrize(
    ("compute_s", "read_s", "said"),
    [
        (0.4 * READ_S, READ_S, "there is less computation to hide them behind."),
        (COMPUTE_S, COMPUTE_S / 0.4, "Reads are slower: "),
    ],
    ids=["computation cut", "reading slowed"],
)
def test_compare_names_waiting_for_data_with_the_seconds_of_the_step_events(
    base: TracedRun, tmp_path: Path, compute_s: float, read_s: float, said: str
) -> None:
    data = base.traces.parents[1] / "data"
    new = train_until(40, 10, data, tmp_path, compute_s=compute_s, read_s=read_s)
    compared = asked("trace", "compare", write_study(tmp_path, base=base, new=new))
    # Slower reads are a finding of their own, which costs about as much.
    finding = next(found for found in compared["findings"][:2] if found["code"] == "F10")
    assert finding["runs"] == ["new"]
    assert finding["title"].startswith("new: waiting for data takes ")
    assert said in finding["says"][-1]
    row = finding["evidence"]["rows"][0]
    assert row["part"] == "waiting for data"
    assert row["here_us"] == pytest.approx(waited_us(new), rel=0.01)
    assert row["base_us"] == pytest.approx(waited_us(base), rel=0.01)
    assert finding["lost_us"] == pytest.approx(waited_us(new) - waited_us(base), rel=0.01)


def test_compare_and_expect_take_the_same_study(run: TracedRun, tmp_path: Path) -> None:
    study = write_study(tmp_path, base=run, new=run)
    assert asked("trace", "compare", study)["runs"] == ["base", "new"]
    assert asked("trace", "expect", study)["holds"]


def test_a_checkpoint_run_has_spans_of_saves_loads_and_stalls(tmp_path: Path) -> None:
    found = asked(
        "checkpoint", "run", "llama3-8b", "--scale", "0.00005", "--interval", "0s", "--chunk", "1MiB",
        "--buffer-memory", "8MiB", "--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"),
        "--writes", "2", "--reads", "1", "--trace", str(tmp_path / "traces"),
    )  # fmt: skip
    assert found["trace"] == str(tmp_path / "traces")
    spans = ask(
        tmp_path / "traces",
        "SELECT op, epoch, step, dur_us FROM events WHERE cat IN ('checkpoint', 'stall') ORDER BY ts_us, op",
    )
    assert sorted((op, epoch, step) for op, epoch, step, _ in spans) == [
        ("checkpoint.load", 1, 1), ("checkpoint.save", 1, 1), ("checkpoint.save", 1, 2),
        ("stall", 1, 1), ("stall", 1, 1), ("stall", 1, 2),
    ]  # fmt: skip
    saved_s = sum(dur_us for op, _, _, dur_us in spans if op == "checkpoint.save") / 1e6
    stalled_s = sum(dur_us for op, _, _, dur_us in spans if op == "stall") / 1e6
    assert stalled_s >= saved_s
    (events,) = read_events(Path(found["results_dir"]))
    recorded_ns = sum(span.end_ns - span.start_ns for span in events.spans_of(SpanKind.SAVE))
    assert saved_s == pytest.approx(recorded_ns / 1e9, abs=2e-6)
    (run,) = ask(tmp_path / "traces", "SELECT args->>'run' FROM events WHERE cat = 'run'")
    assert run[0] == Path(found["results_dir"]).name
