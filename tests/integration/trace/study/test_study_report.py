"""The report in a browser, wide and narrow, light and dark; and its tables as data."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.trace.compare.comparison import ComparisonResult
from penstock.trace.compare.report import write_comparison


@pytest.fixture(scope="session")
def report(compared: ComparisonResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_comparison(compared, folder)
    return folder


QUESTIONS = {
    "empty": "[...document.querySelectorAll('figure.panel')].filter(panel => "
    "![...panel.querySelectorAll('path')].some(path => path.getBBox().width > 0)).length",
    "panels": "document.querySelectorAll('figure.panel').length",
    "titles": "[...document.querySelectorAll('h2')].map(h => h.textContent).join('; ')",
    "contents": "[...document.querySelectorAll('nav a')]"
    ".every(a => document.getElementById(a.hash.slice(1)))",
    "bars": "document.querySelectorAll('#busy ~ .scroll .bar').length",
    "peaks": "[...document.querySelectorAll('figcaption')].map(f => f.textContent)"
    ".filter(t => t.includes('base, lustre')).join()",
    # A phone widens its screen to what does not fit, so it is measured against the width that was asked for.
    "width": "Math.max(document.documentElement.scrollWidth, window.innerWidth)",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "ink": "getComputedStyle(document.querySelector('figcaption')).color",
    "requests": "performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length",
    "title": "document.title",
}


@pytest.mark.parametrize(
    ("width", "dark", "paper", "ink"),
    [
        (1280, False, "rgb(251, 251, 249)", "rgb(27, 36, 48)"),
        (390, True, "rgb(20, 24, 29)", "rgb(227, 231, 236)"),
    ],
    ids=["desktop, light", "phone, dark"],
)
def test_the_report_draws_its_plots_without_an_error_or_a_request(
    browser: Any, report: Path, tmp_path: Path, *, width: int, dark: bool, paper: str, ink: str
) -> None:
    seen = browser.open(report / "report.html", width=width, dark=dark, questions=QUESTIONS)
    (tmp_path / f"{width}.png").write_bytes(seen.screenshot)
    assert seen.errors == []
    # Ranks of seven runs, ten tiers of runs that moved bytes, calls and bytes of each run by size.
    assert (seen.answers["panels"], seen.answers["empty"]) == (7 + 10 + 14, 0)
    assert seen.answers["titles"] == (
        "Differences between the runs; Findings; Busy time by run and tier; Busy with I/O by rank; "
        "Bandwidth over time; Sizes of transfers; Tables"
    )
    assert seen.answers["contents"]
    assert seen.answers["bars"] >= 17
    # Of 7.94 GiB/s while busy, buckets of 20 s left 4.8.
    assert "write at most 9.62 GiB/s" in seen.answers["peaks"]
    assert seen.answers["width"] <= width
    assert (seen.answers["paper"], seen.answers["ink"]) == (paper, ink)
    assert seen.answers["requests"] == 0
    assert seen.answers["title"] == "7 runs compared"


def test_the_page_stands_alone(report: Path) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    assert 'src="http' not in text
    assert '<link rel="stylesheet"' not in text


def test_tables_parquet_holds_every_cell_exactly(report: Path, compared: ComparisonResult) -> None:
    cells = pq.read_table(report / "tables.parquet").to_pylist()
    (cell,) = [
        each for each in cells if (each["table"], each["row"], each["column"]) == ("t1", 1, "scr_pfs_one")
    ]
    assert (cell["number"], cell["text"], cell["unit"]) == (1060072770, "1060072770", "us")
    answers = [
        *compared.tables,
        *compared.charts,
        compared.mismatches,
        *(each.evidence for each in compared.findings),
    ]
    assert len(cells) == sum(len(answer.rows) * len(answer.columns) for answer in answers)
