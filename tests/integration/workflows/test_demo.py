"""The demo's tour: a page and its figures, and nothing else left behind."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.browser import Browser
from tests.support.page_checks import FIRST_SCREEN, QUESTIONS, check_page, read_banner

from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.reports.page import write_report
from penstock.units import format_rate
from penstock.workflows.demo import Tour, find_limit, make_demo_page, tour


class _Phases(Progress):
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
    (out / "report.html").write_text('<meta name="generator" content="Penstock">the page of yesterday')
    return tour(out, environment=dict(os.environ), progress=phases, probe_size_bytes=16 << 20)


def test_a_file_that_is_no_page_stops_the_tour_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("notes")
    with pytest.raises(UsageError, match="not a page of Penstock"):
        tour(tmp_path, environment={}, progress=_Phases())
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_tour_leaves_its_report_and_nothing_else(seen: Tour) -> None:
    assert sorted(path.name for path in seen.report.parent.iterdir()) == [
        "report.html",
        "report.json",
        "runs",
    ]
    page = seen.report.read_text(encoding="utf-8")
    assert "yesterday" not in page
    assert "What this storage can do" in page
    assert "random read" in page
    document = json.loads(seen.report.with_suffix(".json").read_text(encoding="utf-8"))
    assert document["training"]["au_compat"] > 50
    checkpoints = document["checkpoints"]
    assert checkpoints["read"]["verified_bytes"] == checkpoints["write"]["bytes"] > 0
    assert "Can it take checkpoints and give them back?" in page
    assert "Can it feed an accelerator?" in page
    assert {row["mode"] for row in document["probe"]["measurements"]} == {"buffered", "direct"}


def test_the_page_can_be_read_everywhere(browser: Browser, seen: Tour) -> None:
    check_page(browser, seen.report)


def test_the_first_screen_answers_in_figures(seen: Tour) -> None:
    found = read_banner(seen.report)
    assert found["Passed?"] in ("passed", "too slow", "failed")
    assert "H100 of unet3d" in found["How much"]
    assert "of the time (90 % required" in found["Training"]
    assert "of llama3-8b are durable in " in found["Checkpoints"]
    assert found["Limited by"].startswith("training: ")
    assert found["Since"].startswith("the start")
    assert found["To do"]


def test_the_longest_answers_end_on_the_first_screen_of_a_phone(
    browser: Browser, seen: Tour, tmp_path: Path
) -> None:
    slower = [replace(one, gib_per_s=one.gib_per_s / 4) for one in seen.probe.measurements]
    long_uri = "/srv/storage/of/a/team/with/a/long/name/and/its/experiments/of/this/year"
    probe = replace(seen.probe, uri=long_uri, measurements=tuple(slower))
    page = tmp_path / "longest.html"
    write_report(make_demo_page(replace(seen, probe=probe)), page)
    answers = browser.open(page, width=390, dark=False, questions=QUESTIONS).answers
    assert answers["banner_ends"] <= FIRST_SCREEN


def test_no_figure_lies_above_a_limit_that_the_page_states(seen: Tour) -> None:
    page = seen.report.read_text(encoding="utf-8")
    for op in ("write", "read"):
        limit, _ = find_limit(seen, op)
        rates = [one.phase.gib_per_s for one in seen.checkpoints.rounds if one.round.direction == op]
        probed = [one.gib_per_s for one in seen.probe.measurements if one.op == op]
        assert max([*rates, *probed]) * 2**30 <= limit * (1 + 1e-9)
        assert format_rate(limit) in page


def test_every_phase_of_the_progress_comes_to_its_end(seen: Tour, phases: _Phases) -> None:
    assert seen.report.exists()
    assert len(phases.seen) > 20
    assert all(done == total for total, done in phases.seen)
