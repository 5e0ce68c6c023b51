"""The demo's tour: a page and its figures, and nothing else left behind."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from penstock.progress import Silent
from penstock.workflows.demo import tour

if TYPE_CHECKING:
    from pathlib import Path


class _Phases(Silent):
    """Notes which phases were begun, and how far each came."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def begin(self, phase: str, total: float) -> None:
        assert phase
        self.seen.append([total, 0.0])

    def advance(self, amount: float) -> None:
        self.seen[-1][1] += amount


def test_the_tour_leaves_its_report_and_nothing_else(tmp_path: Path) -> None:
    seen = tour(tmp_path / "out", environment=dict(os.environ), progress=Silent(), probe_size_bytes=16 << 20)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html",
        "report.json",
        "runs",
    ]
    page = seen.report.read_text(encoding="utf-8")
    assert "What this storage can do at best" in page
    assert "random read" in page
    document = json.loads(seen.report.with_suffix(".json").read_text(encoding="utf-8"))
    assert document["training"]["au_compat"] > 50
    checkpoints = document["checkpoints"]
    assert checkpoints["read"]["verified_bytes"] == checkpoints["write"]["bytes"] > 0
    assert "Can it take checkpoints and give them back?" in page
    assert "Can it feed an accelerator?" in page
    assert {row["mode"] for row in document["probe"]["measurements"]} == {"buffered", "direct"}


def test_a_second_tour_replaces_the_report_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("the page of yesterday", encoding="utf-8")
    seen = tour(tmp_path, environment=dict(os.environ), progress=Silent(), probe_size_bytes=16 << 20)
    assert "yesterday" not in seen.report.read_text(encoding="utf-8")


def test_every_phase_of_the_progress_comes_to_its_end(tmp_path: Path) -> None:
    phases = _Phases()
    tour(tmp_path, environment=dict(os.environ), progress=phases, probe_size_bytes=16 << 20)
    assert len(phases.seen) > 20
    assert all(done == total for total, done in phases.seen)
