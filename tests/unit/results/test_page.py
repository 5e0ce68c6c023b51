"""Pages: self-contained, escaped, with bars drawn to scale."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from penstock.results.page import Page, Section, render

PAGE = Page(
    title="Limits of <disk> & co",
    subtitle="here",
    sections=(
        Section(
            title="Figures",
            prose=("First.", "a < b"),
            rows=[
                {"what": "write <x>", "GiB/s": "2.000", "ops": "1,024"},
                {"what": "read", "GiB/s": "0.500", "ops": "7"},
            ],
            bars="GiB/s",
        ),
        Section(title="Nothing to show"),
    ),
)


class _Reader(HTMLParser):
    """Collects the tags that are open at the end, and every address that a page would load."""

    VOID = frozenset({"meta"})

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
    reader.feed(render(PAGE))
    assert reader.open == []
    assert reader.loads == []
    assert "url(" not in render(PAGE)


def test_every_text_is_escaped() -> None:
    text = render(PAGE)
    assert "Limits of &lt;disk&gt; &amp; co" in text
    assert "write &lt;x&gt;" in text
    assert "a &lt; b" in text
    assert "<x>" not in text


def test_bars_are_to_scale() -> None:
    assert re.findall(r"--share: ([0-9.]+)%", render(PAGE)) == ["100.0", "25.0"]


def test_columns_of_numbers_stand_to_the_right() -> None:
    text = render(PAGE)
    assert '<td class="number">1,024</td>' in text
    assert "<td>read</td>" in text


def test_a_section_without_rows_has_no_table_and_zero_bars_none() -> None:
    assert render(PAGE).count("<table>") == 1
    flat = Page(
        title="t", subtitle="s", sections=(Section(title="x", rows=[{"GiB/s": "0.0"}], bars="GiB/s"),)
    )
    assert 'style="--share' not in render(flat)


def test_a_page_suits_phones_and_dark_rooms() -> None:
    text = render(PAGE)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_long_texts_break_their_lines() -> None:
    rows = [{"found": "short", "fix": "a remedy that takes more than a few words to tell"}]
    text = render(Page(title="t", subtitle="s", sections=(Section(title="x", rows=rows),)))
    assert '<td class="long">a remedy' in text
    assert "<td>short</td>" in text
