"""Pages: self-contained, escaped, with bars drawn to scale, and accessible."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import UsageError
from penstock.reports.page import render_report, write_report
from penstock.reports.report import (
    Banner,
    Cell,
    Chart,
    Kind,
    Look,
    Report,
    Section,
    Series,
    Table,
    table_section,
)

BANNER = Banner(
    verdict="passed", look=Look.GOOD, figure="", limited_by="a < b", since="no change", to_do="Nothing."
)


def render(*sections: Section) -> str:
    title = "Limits of <disk> & co"
    return render_report(Report(title=title, subtitle="here", banner=BANNER, sections=sections))


PAGE = render(
    table_section(
        "figures",
        "Figures",
        [
            {"what": "write <x>", "GiB/s": "2.000", "ops": "1,024"},
            {"what": "read", "GiB/s": "0.500", "ops": "7"},
        ],
        bars="GiB/s",
    ),
    table_section("nothing", "Nothing to show", []),
)


class _Reader(HTMLParser):
    """Collects the tags that are open at the end, and every address that a page would load."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads.extend(value or "" for name, value in attrs if name in ("src", "href"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_well_formed_and_loads_nothing() -> None:
    reader = _Reader()
    reader.feed(PAGE)
    assert reader.open == []
    assert reader.loads == ["data:,"]
    assert "url(" not in PAGE


def test_every_text_is_escaped() -> None:
    assert "Limits of &lt;disk&gt; &amp; co" in PAGE
    assert "write &lt;x&gt;" in PAGE
    assert "a &lt; b" in PAGE
    assert "<x>" not in PAGE


def test_names_of_strangers_cannot_become_markup_or_scripts() -> None:
    name = """<b>"'&"""
    chart = Chart(kind=Kind.BARS, title=name, run=name, names=[name], series=[Series(name=name, y=[1.0])])
    part = Section(title=name, name=name, mark=name, look=Look.BAD, text=[name], items=[name])
    cell = Cell(name, link="javascript:alert(1)", run=name)
    page = render(
        Section(
            title=name, name=name, charts=[chart], tables=[Table([{name: cell}], title=name)], parts=[part]
        )
    )
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert "<b>" not in page
    assert reader.loads == ["data:,", "./javascript%3Aalert%281%29"]


def test_bars_are_to_scale() -> None:
    assert re.findall(r"--share: ([0-9.]+)%", PAGE) == ["100.0", "25.0"]
    rows = [{"bytes": Cell("3 MiB", value=3.0)}, {"bytes": Cell("1.5 MiB", value=1.5)}]
    page = render(Section(title="x", tables=[Table(rows, bars="bytes")]))
    assert re.findall(r"--share: ([0-9.]+)%", page) == ["100.0", "50.0"]


def test_columns_of_numbers_stand_to_the_right() -> None:
    assert '<td class="number">1,024</td>' in PAGE
    assert "<td>read</td>" in PAGE
    page = render(Section(title="x", tables=[Table([{"rank": "1", "bytes": "2 MiB"}], numbers={"bytes"})]))
    assert '<td>1</td><td class="number">2 MiB</td>' in page


def test_a_section_without_rows_has_a_sentence_and_zero_bars_none() -> None:
    assert PAGE.count("<table>") == 1
    assert "<p>None.</p>" in PAGE
    assert 'style="--share' not in render(table_section("flat", "x", [{"GiB/s": "0.0"}], bars="GiB/s"))


def test_a_page_suits_phones_dark_rooms_and_paper() -> None:
    assert 'name="viewport"' in PAGE
    assert "screen and (prefers-color-scheme: dark)" in PAGE
    assert "@media print" in PAGE


def test_long_texts_break_their_lines() -> None:
    rows = [{"found": "short", "fix": "a remedy that takes more than a few words to tell"}]
    text = render(table_section("long", "x", rows))
    assert '<td class="long">a remedy' in text
    assert "<td>short</td>" in text


def test_a_run_has_one_colour_on_a_page() -> None:
    chart = Chart(kind=Kind.BARS, title="x", run="a", series=[Series(y=[1.0])])
    page = render(
        Section(title="x", charts=[chart], tables=[Table([{"run": Cell("b", run="b")}])]),
        Section(title="y", charts=[chart], tables=[Table([{"run": Cell("a", run="a")}])]),
    )
    first, again = re.findall(r'<figure class="panel (run-\d)"', page)
    (other, same) = re.findall(r'<td class="hue (run-\d)"', page)
    assert first == again == same != other


def test_charts_of_one_legend_have_it_once() -> None:
    both = [Series(name="read", y=[1.0]), Series(name="write", y=[1.0], tone="dark")]
    charts = [
        Chart(kind=Kind.BARS, title=title, run=title, names=["x"], series=series)
        for title, series in (("a", both), ("b", both[:1]))
    ]
    assert render(Section(title="x", charts=charts)).count('class="key"') == 2


def test_parts_can_be_filtered_by_their_marks() -> None:
    finding = Section(title="rule", mark="fail", look=Look.BAD, text=["proof"])
    part = Section(title="one", name="one", mark="invalid", look=Look.BAD, parts=[finding])
    page = render_report(
        Report(
            title="t",
            subtitle="s",
            banner=BANNER,
            sections=[Section(title="Findings", parts=[part])],
            filters={"result": {"invalid": True}, "finding": {"fail": True, "pass": False}},
        )
    )
    assert re.findall(r'name="(\w+)" value="(\w+)"( checked)?', page) == [
        ("result", "invalid", " checked"),
        ("finding", "fail", " checked"),
        ("finding", "pass", ""),
    ]
    assert re.findall(r'data-mark="(\w+)"', page) == ["invalid", "fail"]
    assert "<script" not in PAGE


def test_only_pages_are_written_over(tmp_path: Path) -> None:
    report = Report(title="t", subtitle="s", banner=BANNER)
    write_report(report, tmp_path / "page.html")
    write_report(report, tmp_path / "page.html")
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(UsageError, match="not a page"):
        write_report(report, tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text() == "mine"


Colour = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
STYLE = (files("penstock.reports") / "templates" / "style.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    {name: np.array([int(text[at : at + 2], 16) / 255 for at in (0, 2, 4)]) for name, text in found}
    for found in (
        re.findall(r"--(\w+): #([0-9a-f]{6});", rules) for rules in STYLE.split("@media screen")[:2]
    )
)
# What readers without red or green cones see, after Machado, Oliveira and Fernandes (2009), severity 1.
SEEN_BY = {
    "trichromats": np.eye(3),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def linear(colour: Colour) -> Colour:
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def luminance(colour: Colour) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def lab(colour: Colour, eyes: str) -> Colour:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ SEEN_BY[eyes] @ linear(colour), 1e-3, None) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_verdicts_have_colours_that_stay_apart(palette: dict[str, Colour], eyes: str) -> None:
    for one, other in combinations(("good", "bad", "doubt"), 2):
        assert np.linalg.norm(lab(palette[one], eyes) - lab(palette[other], eyes)) > 20, (one, other)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "faint", "good", "bad", "doubt"])
def test_every_text_has_the_contrast_that_wcag_asks_for(palette: dict[str, Colour], name: str) -> None:
    dark, light = sorted((luminance(palette[name]), luminance(palette["paper"])))
    assert (light + 0.05) / (dark + 0.05) >= 4.5
