"""Compares the runs of a study: how they differ, then tables, then findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.progress import Progress
from penstock.trace.compare import study_tables
from penstock.trace.compare.findings import find_all
from penstock.trace.compare.study_tables import file_tables, followed_files
from penstock.trace.compare.trace_study import Study, TraceFinding, format_ranges
from penstock.trace.figures import bandwidth, measure_axis
from penstock.trace.questions.answer import Answer, Column, Value, make_columns
from penstock.trace.questions.breakdowns import ranks
from penstock.trace.questions.events_view import IS_IO
from penstock.trace.questions.timeline import timeline


def find_mismatches(study: Study) -> Answer:
    """Differences of each run from the baseline in ranks, hosts, steps and files, and its losses.

    Comes before all tables: a run with half of the traces looks like a run with half of the writes.
    """
    rows: list[Sequence[Value]] = []
    for what, column, where in _COMPARED_SETS:
        sets = _find_sets(study, column, where)
        base = sets.get(study.baseline, set())
        for run in study.runs:
            values = sets.get(run, set())
            if column in _TRACED and bool(values) != bool(base):
                # An empty set says nothing of the run: its tracer does not record them.
                nowhere = f"unknown: no event of {run if base else study.baseline} has one"
                rows.append((what, run, len(values) or None, len(base) or None, nowhere, ""))
                continue
            # Jobs land on other machines each time: only their number matters.
            if what == "hosts" and len(values) == len(base):
                continue
            if values != base:
                rows.append(
                    (
                        what,
                        run,
                        len(values),
                        len(base),
                        format_ranges(base - values),
                        format_ranges(values - base),
                    )
                )
    rows += _find_losses(study)
    columns = make_columns("what", "run", "here", Column(study.baseline), "missing", "added")
    notes = [] if rows else [f"All runs have the ranks, hosts, steps and files of {study.baseline}."]
    return Answer(
        name="mismatches",
        title=f"What differs from {study.baseline}",
        columns=columns,
        rows=rows,
        notes=notes,
    )


_TRACED: Final = ("rank", "host", "step")
"""Columns that some tracers leave empty."""
_COMPARED_SETS: Final = (
    ("ranks", "rank", "rank IS NOT NULL"),
    ("hosts", "host", "host IS NOT NULL"),
    ("steps", "step", "step IS NOT NULL"),
    ("written files", "parse_filename(path)", f"{IS_IO} AND op IN ('write', 'pwrite') AND path IS NOT NULL"),
)


def _find_sets(study: Study, column: str, where: str) -> dict[str, set[Any]]:
    sets: dict[str, set[Any]] = {}
    for run, value in study.events.ask(f"SELECT DISTINCT run, {column} FROM {{events}} WHERE {where}"):
        sets.setdefault(run, set()).add(value)
    return sets


def _find_losses(study: Study) -> list[Sequence[Value]]:
    rows: list[Sequence[Value]] = []
    for run in study.runs:
        accounts = study.accounts.get(run, ())
        damaged = [account for account in accounts if not account.is_whole]
        if damaged:
            lost = sum(account.dropped for account in damaged)
            salvaged = sum(account.salvaged for account in damaged)
            faults = sum(len(account.faults) for account in damaged)
            loss = f"{lost} lines dropped, {salvaged} salvaged, {faults} torn files"
            rows.append(
                ("damaged files", run, len(damaged), None, loss, ", ".join(a.file for a in damaged[:2]))
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """The parts of a comparison, in the order of the report."""

    runs: Sequence[str]
    baseline: str
    mismatches: Answer
    findings: Sequence[TraceFinding]
    tables: Sequence[Answer]
    charts: Sequence[Answer]

    def table(self, name: str) -> Answer:
        """The table called `name`: `t1`, `t5_spread`."""
        return next(table for table in (*self.tables, *self.charts) if table.name == name)


def compare_runs(study: Study, *, progress: Progress | None = None) -> ComparisonResult:
    """Compare all runs of a study: mismatches, tables, charts, findings."""
    progress = progress or Progress()
    progress.begin("comparing", 5)
    mismatches = find_mismatches(study)
    progress.advance(1)
    measures = study_tables.measures(study)
    whole = [
        study_tables.load_report(study),
        study_tables.times(study),
        study_tables.time_changes(study, measures),
        measures,
        study_tables.volumes(study),
        study_tables.classes(study),
        study_tables.class_calls(study),
        study_tables.class_writes(study),
        study_tables.file_writes(study),
    ]
    progress.advance(1)
    single = file_tables(study, followed_files(study))
    calls = [
        study_tables.call_times(study),
        study_tables.call_bytes(study),
        study_tables.median_sizes(study),
        study_tables.write_sizes(study),
        study_tables.longest_files(study),
    ]
    progress.advance(1)
    charts = [
        timeline(study.events),
        bandwidth(study.events, measure_axis(study.events, study.runs)),
        ranks(study.events),
        study_tables.size_histogram(study),
    ]
    progress.advance(1)
    findings = find_all(study)
    progress.advance(1)
    return ComparisonResult(
        runs=study.runs,
        baseline=study.baseline,
        mismatches=mismatches,
        findings=findings,
        tables=[*whole, *single, *calls],
        charts=charts,
    )
