"""docs/results.md names every file, column, share and limit by its true name and value."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.bench.step_recorder import CAPACITY, FLUSH_INTERVAL_NS
from penstock.results import layout, tables
from penstock.results.events import Phase, SpanEvent, SpanKind, StepEvent
from penstock.results.record import LONGEST_SILENCE_S, Outcome
from penstock.results.times import MEASURES, Shares
from penstock.results.verdict import STRAGGLER, Bottleneck

PAGE = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`]+)`", PAGE))


@pytest.mark.parametrize(
    "names",
    [
        StepEvent._fields,
        SpanEvent._fields,
        MEASURES,
        [share.name for share in fields(Shares)],
        [bottleneck.value for bottleneck in Bottleneck],
        [outcome.value for outcome in Outcome],
        [kind.name.lower() for kind in SpanKind],
        [phase.name.lower() for phase in Phase],
        [layout.RUN_FILE, layout.SUMMARY_FILE, tables.STEPS_FILE, tables.SPANS_FILE],
    ],
)
def test_every_name_is_on_the_page(names: list[str]) -> None:
    assert set(names) <= QUOTED


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"{FLUSH_INTERVAL_NS // 10**9}\nseconds, every {CAPACITY} steps" in PAGE
    assert f"{LONGEST_SILENCE_S / 60:g} minutes" in PAGE
    assert f"{STRAGGLER:g} times longer" in PAGE
