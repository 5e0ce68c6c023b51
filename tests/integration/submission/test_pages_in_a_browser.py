"""Pages of judged results as people open them: in a browser, wide and narrow, light and dark."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import Browser
from tests.support.page_checks import check_page, read_banner
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import valid_round

from penstock.cli.app import main

SCREENS = [
    pytest.param(1280, False, "rgb(251, 251, 249)", id="desktop, light"),
    pytest.param(390, True, "rgb(20, 24, 29)", id="phone, dark"),
]

FRAME: dict[str, str] = {
    "sideways": "document.documentElement.scrollWidth - window.innerWidth",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "requests": "performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length",
}


def tick(group: str, value: str) -> str:
    box = f"document.querySelector('input[name={group}][value=\"{value}\"]')"
    return f"({box}.click(), true)"


ROWS = "document.querySelectorAll('tbody tr:not([hidden])').length"
SHOWN = "[...document.querySelectorAll('section:not([hidden]) .finding:not([hidden]) .mark')]"
VERDICTS: dict[str, str] = {
    **FRAME,
    "at first": f"[...new Set({SHOWN}.map(m => m.textContent))].sort().join()",
    "results at first": ROWS,
    "show passes": tick("finding", "pass"),
    "with passes": f"[...new Set({SHOWN}.map(m => m.textContent))].sort().join()",
    "hide valid": tick("result", "valid"),
    "results without valid": ROWS,
    "type": "(() => { const s = document.querySelector('input[type=search]'); s.value = 'STRUCTURE.folders';"
    " s.dispatchEvent(new Event('input', {bubbles: true})); return true })()",
    "found": f"{SHOWN}.map(m => m.parentElement.textContent).join()",
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdicts")
    valid_submission().write(folder / "round")
    bad = valid_submission()
    bad.organisation = "bad"
    bad.drop("systems/")
    bad.write(folder / "round")
    page = folder / "page.html"
    assert main(["submission", "check", str(folder / "round"), "--html", str(page)]) == 1
    return page


@pytest.mark.parametrize(("width", "dark", "paper"), SCREENS)
def test_the_page_of_verdicts_fits_its_screen_and_filters_as_one_asks(
    browser: Browser, verdicts: Path, *, width: int, dark: bool, paper: str
) -> None:
    seen: Any = browser.open(verdicts, width=width, dark=dark, questions=VERDICTS)
    assert seen.errors == []
    assert seen.answers["sideways"] <= 0
    assert (seen.answers["paper"], seen.answers["requests"]) == (paper, 0)
    assert (seen.answers["at first"], seen.answers["with passes"]) == ("fail", "fail,pass")
    assert (seen.answers["results at first"], seen.answers["results without valid"]) == (2, 1)
    assert seen.answers["found"] == "structure.folders: fail"


def test_the_page_of_verdicts_answers_first_and_can_be_read_by_all_and_on_paper(
    browser: Browser, verdicts: Path
) -> None:
    check_page(browser, verdicts)
    assert read_banner(verdicts) == {
        "Passed?": "invalid",
        "How much": "2 results: 1 valid, 1 invalid",
        "Limited by": "structure.folders, structure.system",
        "Since": "closed/bad/results/fast/unet3d: bad/ has no systems/",
        "To do": "Add systems/ next to results/.",
        "Troubles": "",
    }


FIGURES: dict[str, str] = {
    **FRAME,
    "plots": "document.querySelectorAll('figure svg').length",
    "dots": "document.querySelectorAll('path[class^=dots]').length",
    "outliers": "[...document.querySelectorAll('path.dots.t-bad title')].map(t => t.textContent).join('; ')",
    "wide": "Math.max(...[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().right))"
    " - window.innerWidth",
}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    tree = valid_round()
    rates = tree.summary("run", 3)["metric"]["train_throughput_samples_per_second"]
    rates[:] = [rate + 8 for rate in rates]
    tree.write(folder / "round")
    assert main(["submission", "report", str(folder / "round"), "-o", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


@pytest.mark.parametrize(("width", "dark", "paper"), SCREENS)
def test_the_page_of_figures_fits_its_screen_and_draws_every_value(
    browser: Browser, figures: Path, *, width: int, dark: bool, paper: str
) -> None:
    seen: Any = browser.open(figures, width=width, dark=dark, questions=FIGURES)
    assert seen.errors == []
    assert seen.answers["sideways"] <= 0
    assert seen.answers["wide"] <= 0
    assert (seen.answers["paper"], seen.answers["requests"]) == (paper, 0)
    assert (seen.answers["plots"], seen.answers["dots"]) == (7, 3 * 5 + 4 * 10)
    assert "336.7 samples/s" in seen.answers["outliers"]


def test_the_page_of_figures_can_be_read_by_all_and_on_paper(browser: Browser, figures: Path) -> None:
    check_page(browser, figures)
