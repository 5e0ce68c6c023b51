"""The demo's tour: a page and its figures, and nothing else left behind."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from penstock.progress import Silent
from penstock.workflows.demo import Tour, tour

if TYPE_CHECKING:
    from tests.support.browser import Browser

FRAME = {
    "sideways": "document.documentElement.scrollWidth - window.innerWidth",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "requests": "performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length",
    "bars": "document.querySelectorAll('.bar').length",
}


class _Phases(Silent):
    """Notes which phases were begun, and how far each came."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def begin(self, phase: str, total: float) -> None:
        assert phase
        self.seen.append([total, 0.0])

    def advance(self, amount: float) -> None:
        self.seen[-1][1] += amount


@pytest.fixture(scope="module")
def phases() -> _Phases:
    return _Phases()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, phases: _Phases) -> Tour:
    """One tour, in a folder that has the report of an earlier one."""
    out = tmp_path_factory.mktemp("demo")
    (out / "report.html").write_text("the page of yesterday", encoding="utf-8")
    return tour(out, environment=dict(os.environ), progress=phases, probe_size_bytes=16 << 20)


def test_the_tour_leaves_its_report_and_nothing_else(seen: Tour) -> None:
    assert sorted(path.name for path in seen.report.parent.iterdir()) == [
        "report.html",
        "report.json",
        "runs",
    ]
    page = seen.report.read_text(encoding="utf-8")
    assert "yesterday" not in page
    assert "What this storage can do at best" in page
    assert "random read" in page
    document = json.loads(seen.report.with_suffix(".json").read_text(encoding="utf-8"))
    assert document["training"]["au_compat"] > 50
    checkpoints = document["checkpoints"]
    assert checkpoints["read"]["verified_bytes"] == checkpoints["write"]["bytes"] > 0
    assert "Can it take checkpoints and give them back?" in page
    assert "Can it feed an accelerator?" in page
    assert {row["mode"] for row in document["probe"]["measurements"]} == {"buffered", "direct"}


@pytest.mark.parametrize(
    ("width", "dark", "paper"), [(1280, False, "rgb(251, 251, 249)"), (390, True, "rgb(20, 24, 29)")]
)
def test_the_page_fits_its_screen_and_loads_nothing(
    browser: Browser, seen: Tour, *, width: int, dark: bool, paper: str
) -> None:
    shown = browser.open(seen.report, width=width, dark=dark, questions=FRAME)
    assert shown.errors == []
    assert shown.answers["sideways"] <= 0
    assert (shown.answers["paper"], shown.answers["requests"]) == (paper, 0)
    assert shown.answers["bars"] > 5


def test_every_phase_of_the_progress_comes_to_its_end(seen: Tour, phases: _Phases) -> None:
    assert seen.report.exists()
    assert len(phases.seen) > 20
    assert all(done == total for total, done in phases.seen)
