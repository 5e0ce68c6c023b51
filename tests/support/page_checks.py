"""What holds for every page, asked in a browser: it fits, it is quiet, it loads nothing, and all can read it.

`check_page` opens a page wide, on a phone, in the dark and on paper; a screenshot of each is left beside it.
"""

import json
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any, Final

from tests.support.browser import Browser

MOST_BYTES: Final = 1_500_000
"""Of a page without timelines."""
FIRST_SCREEN: Final = 900
PAPERS: Final = {"wide": "rgb(251, 251, 249)", "dark": "rgb(20, 24, 29)", "phone": "rgb(251, 251, 249)"}

QUESTIONS: Final = {
    # A phone widens its screen to what does not fit, so it is measured against the width that was asked for.
    "width": "Math.max(document.documentElement.scrollWidth, window.innerWidth)",
    "empty": "[...document.querySelectorAll('figure.panel')].filter(panel => "
    "![...panel.querySelectorAll('path')].some(path => path.getBBox().width > 0))"
    ".map(panel => panel.textContent).join()",
    "blank": "[...document.querySelectorAll('h2')].filter(h => !h.nextElementSibling || "
    "h.nextElementSibling.tagName === 'H2').map(h => h.textContent).join()",
    "unnamed": "[...document.querySelectorAll('svg')].filter(s => !s.getAttribute('aria-label')).length",
    "requests": "performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "banner_ends": "document.querySelector('.banner')?.getBoundingClientRect().bottom ?? 0",
    "charts_end": "Math.max(0, ...[...document.querySelectorAll('.panels.first figure')]"
    ".map(f => f.getBoundingClientRect().bottom))",
}


def check_page(browser: Browser, page: Path) -> None:
    """Assert what holds for every page."""
    assert page.stat().st_size < MOST_BYTES
    for screen, width in (("wide", 1280), ("dark", 1280), ("phone", 390)):
        questions = QUESTIONS | ({"axe": _axe()} if screen != "phone" else {})
        seen = browser.open(page, width=width, dark=screen == "dark", questions=questions)
        page.with_suffix(f".{screen}.png").write_bytes(seen.screenshot)
        assert seen.errors == [], screen
        _assert_readable(seen.answers, width=width)
        assert seen.answers["paper"] == PAPERS[screen]
        if screen == "wide":
            assert seen.answers["charts_end"] <= FIRST_SCREEN, (
                "the answer and its charts are on the first screen"
            )
        if screen == "phone":
            assert seen.answers["banner_ends"] <= FIRST_SCREEN, "the answers are on the first screen"
    paper = browser.open(page, width=780, dark=False, questions=QUESTIONS, media="print")
    page.with_suffix(".print.png").write_bytes(paper.screenshot)
    assert paper.errors == []
    _assert_readable(paper.answers, width=780)


def _assert_readable(answers: dict[str, Any], *, width: int) -> None:
    assert answers["width"] <= width
    assert (answers["empty"], answers["blank"]) == ("", "")
    assert (answers["unnamed"], answers["requests"]) == (0, 0)
    assert json.loads(answers.get("axe", "[]")) == []


def _axe() -> str:
    """Serious and critical findings of axe-core, as JSON."""
    source = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    return (
        f"{source};axe.run(document, {{resultTypes: ['violations']}}).then(found => JSON.stringify("
        "found.violations.filter(v => ['serious', 'critical'].includes(v.impact)).map(v => "
        "[v.id, v.nodes.length, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary])))"
    )


class _Banner(HTMLParser):
    """The texts of a page's first section, by what they answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, str] = {"Passed?": "", "How much": "", "Troubles": ""}
        self._asked = ""
        self._is_open = True
        self._is_question = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        look = dict(attrs).get("class") or ""
        asked = {"mark": "Passed?", "troubles": "Troubles"}.get(look, "")
        self._asked = asked or ("" if tag in ("h1", "h2", "title", "style") else self._asked)
        self._is_question = tag == "dt"

    def handle_endtag(self, tag: str) -> None:
        self._is_open = self._is_open and tag != "section"
        if tag == "span" and self._asked == "Passed?":
            self._asked = "How much"

    def handle_data(self, data: str) -> None:
        text = data.strip()
        if not text or not self._is_open:
            return
        if self._is_question:
            self._asked = text
        elif self._asked:
            self.answers[self._asked] = f"{self.answers.get(self._asked, '')} {text}".strip()


def read_banner(page: Path) -> dict[str, str]:
    """What a page's first section answers, by the question."""
    reader = _Banner()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.answers
