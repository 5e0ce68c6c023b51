"""The comparison of a study's rows: the trace room's own, with the findings of a study before the others.

On rank 0 alone, which alone loads what answers questions. Invariant: `runs.yaml` says all that the comparison
was asked, so `penstock trace compare` repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.trace.compare.comparison import compare_runs
from penstock.trace.compare.report import write_report
from penstock.trace.compare.trace_study import ComparisonSpec, open_study
from penstock.trace.yaml_documents import load_document
from penstock.workflows.study.findings import RULES
from penstock.workflows.study.records import TRACES, write_runs
from penstock.workflows.study.row import SAVE_EVENT

if TYPE_CHECKING:
    from penstock.progress import Progress
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.workflows.study.request import StudyRequest


def compare_rows(request: StudyRequest, progress: Progress) -> tuple[ComparisonResult, Sequence[Path]]:
    """What the traces of all rows say, and the files of its report."""
    path = write_runs(request.out, description(request))
    with open_study(load_document(ComparisonSpec, path), request.out, progress=progress) as opened:
        compared = compare_runs(opened, progress=progress)
        own = [finding for rule in RULES for finding in rule(opened)]
    compared = replace(compared, findings=[*own, *compared.findings])
    return compared, write_report(compared, request.out)


def description(request: StudyRequest) -> dict[str, Any]:
    """`runs.yaml`: for this study, and for whoever compares it again with other questions."""
    described: dict[str, Any] = {
        "runs": {row.name: f"{row.name}/{TRACES}/*.pfw.gz" for row in request.rows},
        "baseline": request.rows[0].name,
        "app_event": SAVE_EVENT,
        "tiers": {"slow": str(request.slow), "fast": str(request.fast)},
    }
    if request.slow_bytes_per_s is not None:
        described["device_rates"] = {"slow": f"{request.slow_bytes_per_s:.0f}B/s"}
    return described
