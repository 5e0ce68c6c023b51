"""The whole comparison: mismatches first, then tables, then what stands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.progress import Progress, Silent
from penstock.trace.compare import tables
from penstock.trace.compare.mismatches import mismatches
from penstock.trace.compare.one_file import file_tables, followed_files
from penstock.trace.findings.rules import find

if TYPE_CHECKING:
    from penstock.trace.compare.study import Study
    from penstock.trace.findings.base import Finding
    from penstock.trace.questions.base import Answer
from penstock.trace.questions.ranks import ranks
from penstock.trace.questions.timeline import timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a comparison says, in the order in which it is to be read."""

    runs: Sequence[str]
    baseline: str
    mismatches: Answer
    findings: Sequence[Finding]
    tables: Sequence[Answer]
    charts: Sequence[Answer]

    def table(self, name: str) -> Answer:
        """The table called `name`: `t1`, `t5_spread`."""
        return next(table for table in (*self.tables, *self.charts) if table.name == name)


def compare(study: Study, *, progress: Progress | None = None) -> Compared:
    """Ask everything of the study."""
    progress = progress or Silent()
    progress.begin("comparing", 5)
    differing = mismatches(study)
    progress.advance(1)
    times = tables.times(study)
    whole = [
        tables.load_report(study),
        times,
        tables.time_changes(study, times),
        tables.measures(study),
        tables.volumes(study),
        tables.classes(study),
        tables.class_calls(study),
        tables.class_writes(study),
        tables.file_writes(study),
    ]
    progress.advance(1)
    single = file_tables(study, followed_files(study))
    calls = [
        tables.call_times(study),
        tables.call_bytes(study),
        tables.median_sizes(study),
        tables.write_sizes(study),
        tables.longest_files(study),
    ]
    progress.advance(1)
    charts = [timeline(study.events), ranks(study.events), tables.size_histogram(study)]
    progress.advance(1)
    found = find(study)
    progress.advance(1)
    return Compared(
        runs=study.runs,
        baseline=study.baseline,
        mismatches=differing,
        findings=found,
        tables=[*whole, *single, *calls],
        charts=charts,
    )
