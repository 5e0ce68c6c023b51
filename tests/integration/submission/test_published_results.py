"""Published results of v1.0: valid, and with the figures that were published."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Validity

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
