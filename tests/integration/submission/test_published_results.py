"""Published results of v1.0: valid, and with the figures that were published."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Validity
from penstock.submission.reports.result_report import report_all

PUBLISHED = os.environ.get("PENSTOCK_MLPERF_RESULTS", "")


@pytest.mark.skipif(not PUBLISHED, reason="PENSTOCK_MLPERF_RESULTS names no published results")
def test_published_results_are_valid_with_their_figures() -> None:
    root = Path(PUBLISHED)
    judged = list(check(root, load_edition("v1.0")))
    assert judged
    for result in judged:
        overall = json.loads((root / result.name / "mlperf_storage_report.json").read_text())["overall"]
        assert result.verdict is Validity.VALID, result.name
        assert result.workload == overall["model"]
        assert result.accelerator == overall["accelerator"]
        assert result.num_accelerators == int(overall["train_num_accelerators"])
        for name, value in result.metrics.items():
            if name in overall:
                assert value == pytest.approx(overall[name], rel=1e-9), name
        assert sum(name in overall for name in result.metrics) == 4


@pytest.mark.skipif(not PUBLISHED, reason="PENSTOCK_MLPERF_RESULTS names no published results")
def test_reports_are_those_that_were_published() -> None:
    root = Path(PUBLISHED)
    for each in report_all(root, load_edition("v1.0")):
        published = json.loads((root / each.checked.name / "mlperf_storage_report.json").read_text())
        assert each.v1 is not None
        assert each.v1["overall"].keys() == published["overall"].keys()
        assert each.v1["runs"].keys() == published["runs"].keys()
        assert each.v1["overall"] == close_to(published["overall"])
        # One submitter's report numbers its runs in another order than its folders.
        by_rate = [sorted(map(rate, report["runs"].values())) for report in (each.v1, published)]
        assert by_rate[0] == pytest.approx(by_rate[1], rel=1e-9)
        assert {frozenset(run) for run in each.v1["runs"].values()} == {
            frozenset(run) for run in published["runs"].values()
        }


def close_to(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        for name, value in figures.items()
    }


def rate(run: dict[str, Any]) -> float:
    return float(run["train_throughput_MB_per_second"])
