"""Judged results as one HTML page: the table of all results, then their findings, filtered as one reads.

Pure: judged results in, text out. Invariant: every finding is in the page, passes too; filters only hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding, Validity, Verdict
from penstock.submission.reports.findings_export import count_verdicts
from penstock.submission.reports.page import (
    attribute,
    cell,
    heading,
    listing,
    paragraph,
    render_page,
    table,
)

if TYPE_CHECKING:
    from penstock.submission.check import CheckedResult

_LOOK: Final[Mapping[str, str]] = MappingProxyType(
    {
        Validity.VALID: "good",
        Validity.INVALID: "bad",
        Validity.NOT_CHECKED: "doubt",
        Verdict.PASS: "good",
        Verdict.FAIL: "bad",
        Verdict.WARNING: "doubt",
        Verdict.NOT_APPLICABLE: "",
    }
)
"""The colour of a verdict, on a result or in a finding; the word stands beside it always."""

_ORDER: Final = (
    Verdict.FAIL,
    Verdict.NOT_CHECKED,
    Verdict.WARNING,
    Verdict.PASS,
    Verdict.NOT_APPLICABLE,
)
_SHOWN_AT_FIRST: Final = frozenset({Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING})
_COLUMNS: Final = (
    "result", "verdict", "organisation", "division", "system", "workload", "accelerators", "samples/s",
)  # fmt: skip
_NUMBERS: Final = frozenset({"accelerators", "samples/s"})

_SCRIPT: Final = """
const boxes = [...document.querySelectorAll('.controls input[type=checkbox]')];
const search = document.querySelector('.controls input[type=search]');
function filter() {
  const ticked = group => new Set(boxes.filter(b => b.checked && b.name === group).map(b => b.value));
  const verdicts = ticked('finding'), validities = ticked('result'), word = search.value.toLowerCase();
  for (const row of document.querySelectorAll('tr[data-verdict]'))
    row.hidden = !validities.has(row.dataset.verdict);
  for (const section of document.querySelectorAll('section[data-verdict]')) {
    let shown = 0;
    for (const finding of section.querySelectorAll('.finding')) {
      finding.hidden = !verdicts.has(finding.dataset.verdict)
        || (word !== '' && !finding.textContent.toLowerCase().includes(word));
      shown += finding.hidden ? 0 : 1;
    }
    section.querySelector('.nothing').hidden = shown > 0;
    section.hidden = !validities.has(section.dataset.verdict) || (word !== '' && shown === 0);
  }
}
document.querySelector('.controls').addEventListener('input', filter);
filter();
"""


def verdicts_page(
    judged: Sequence[CheckedResult], edition: str, for_the_reviewer: Sequence[str], empty: Sequence[str] = ()
) -> str:
    """The page; `empty` names the submitters without results."""
    counts = ", ".join(f"{count} {what}" for what, count in count_verdicts(judged).items())
    parts = [
        _controls(judged),
        heading("Results"),
        _summary(judged),
        *([heading("Without results"), listing(empty)] if empty else []),
        heading("Findings"),
        *(_section(number, each) for number, each in enumerate(judged)),
        *([heading("For the reviewer"), listing(for_the_reviewer)] if for_the_reviewer else []),
    ]
    return render_page(
        title=f"Results judged by the rules of {edition}", subtitle=counts, parts=parts, script=_SCRIPT
    )


def _controls(judged: Sequence[CheckedResult]) -> str:
    found = {finding.verdict for each in judged for finding in each.findings}
    boxes = [
        *(_box("result", verdict, is_ticked=True) for verdict in Validity),
        *(
            _box("finding", verdict, is_ticked=verdict in _SHOWN_AT_FIRST)
            for verdict in _ORDER
            if verdict in found
        ),
    ]
    search = '<input type="search" placeholder="a word in findings" aria-label="a word in findings">'
    return f'<form class="controls" onsubmit="return false">{"".join(boxes)}{search}</form>'


def _box(group: str, verdict: str, *, is_ticked: bool) -> str:
    ticked = " checked" if is_ticked else ""
    name = escape(verdict)
    return f'<label><input type="checkbox" name="{group}" value="{name}"{ticked}> {group}s: {name}</label>'


def _summary(judged: Sequence[CheckedResult]) -> str:
    head = "".join(cell(name, "number" if name in _NUMBERS else "", tag="th") for name in _COLUMNS)
    return table(head, "\n".join(_row(number, each) for number, each in enumerate(judged)))


def _row(number: int, judged: CheckedResult) -> str:
    throughput = judged.metrics.get("train_throughput_mean_samples_per_second")
    accelerators = "?" if judged.num_accelerators is None else str(judged.num_accelerators)
    cells = [
        f'<td class="long"><a href="#r{number}">{escape(judged.name)}</a></td>',
        cell(judged.verdict.value, _LOOK[judged.verdict]),
        cell(judged.organisation),
        cell(judged.division or "-"),
        cell(judged.system or "-"),
        cell(judged.workload or "-"),
        cell(f"{accelerators} {judged.accelerator}".strip(), "number"),
        cell("-" if throughput is None else f"{throughput:,.1f}", "number"),
    ]
    return f'<tr data-verdict="{judged.verdict.value}">{"".join(cells)}</tr>'


def _section(number: int, judged: CheckedResult) -> str:
    look = _LOOK[judged.verdict]
    return "\n".join(
        [
            f'<section id="r{number}" data-verdict="{judged.verdict.value}">',
            f"<h3>{escape(judged.name)}: <span{attribute('class', look)}>{judged.verdict.value}</span></h3>",
            paragraph("No finding is among those that are shown.", "faint nothing"),
            *(_finding(finding, places) for finding, places in _alike(judged.findings)),
            "</section>",
        ]
    )


def _alike(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that differ in their evidence alone, once, with all of it; the worst verdicts first."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, evidence=""), []).append(finding.evidence)
    return sorted(places.items(), key=lambda each: _ORDER.index(each[0].verdict))


def _finding(finding: Finding, places: Sequence[str]) -> str:
    times = f", {len(places)} times" if len(places) > 1 else ""
    return "".join(
        [
            f'<div class="finding {_LOOK[finding.verdict]}" data-verdict="{finding.verdict.value}">',
            f'<p><span class="mark">{finding.verdict.value}</span> {escape(finding.rule)}{times}</p>',
            paragraph(finding.proof),
            *(paragraph(text, "faint") for text in (_figures(finding), *places) if text),
            *([paragraph(f"To do: {finding.fix}")] if finding.fix else []),
            "</div>",
        ]
    )


def _figures(finding: Finding) -> str:
    return "; ".join(
        f"{what} {text}" for what, text in (("value", finding.value), ("limit", finding.limit)) if text
    )
