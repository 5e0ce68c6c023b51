"""docs/results.md names every file, column, share and limit by its true name and value."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.bench.recorded_run import CAPACITY, FLUSH_INTERVAL_NS
from penstock.results import event_files, run_folder
from penstock.results.phase_figures import MEASURES, STRAGGLER, Bottleneck, TimeShares
from penstock.results.run_record import LONGEST_SILENCE_S, RunOutcome
from penstock.results.step_events import SpanEvent, SpanKind, StepEvent, StepPhase

PAGE = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`]+)`", PAGE))


@pytest.mark.parametrize(
    "names",
    [
        StepEvent._fields,
        SpanEvent._fields,
        MEASURES,
        [share.name for share in fields(TimeShares)],
        [bottleneck.value for bottleneck in Bottleneck],
        [outcome.value for outcome in RunOutcome],
        [kind.name.lower() for kind in SpanKind],
        [phase.name.lower() for phase in StepPhase],
        [run_folder.RUN_FILE, run_folder.SUMMARY_FILE, event_files.STEPS_FILE, event_files.SPANS_FILE],
    ],
)
def test_every_name_is_on_the_page(names: list[str]) -> None:
    assert set(names) <= QUOTED


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"{FLUSH_INTERVAL_NS // 10**9} seconds, every {CAPACITY} steps" in " ".join(PAGE.split())
    assert f"{LONGEST_SILENCE_S / 60:g} minutes" in PAGE
    assert f"more than {STRAGGLER:g} times as long" in PAGE
