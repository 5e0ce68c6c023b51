"""The page's sections on history and on what a check and a report write name things as they are."""

import re
from pathlib import Path

import click

from penstock.cli.app import RESULTS
from penstock.results.history import FILE, FOLDER, INCOMPLETE, parse_outcomes
from penstock.submission.result_figures import (
    CONFIDENCE,
    MAX_SCORE,
    MEAN_DEVIATION_SCALE,
    MEDIAN_DEVIATION_SCALE,
)
from penstock.submission.result_report import FINDING_COLUMNS

DOCS = Path(__file__).parents[3] / "docs"
HISTORY = (DOCS / "results.md").read_text(encoding="utf-8").partition("## History")[2]
SUBMISSION = (DOCS / "submission.md").read_text(encoding="utf-8")


def test_files_and_outcomes_are_named_as_they_are() -> None:
    assert f"`{FOLDER}/{FILE}`" in HISTORY
    assert f"`{INCOMPLETE}`" in HISTORY
    assert all(f"`{outcome}`" in HISTORY for outcome in parse_outcomes(INCOMPLETE))


def test_every_verb_and_option_of_the_section_is_there() -> None:
    section = HISTORY.partition("\n## ")[0]
    context = click.Context(RESULTS)
    verbs = {name: RESULTS.get_command(context, name) for name in RESULTS.verbs}
    options = {option for verb in verbs.values() if verb for each in verb.params for option in each.opts}
    assert {"ls", "rm"} <= set(verbs)
    assert set(re.findall(r"(--[a-z][a-z-]+)", section)) <= options


def test_columns_and_limits_of_reports_are_those_of_the_code() -> None:
    assert ", ".join(FINDING_COLUMNS) in SUBMISSION
    for number in (MAX_SCORE, MEDIAN_DEVIATION_SCALE, MEAN_DEVIATION_SCALE):
        assert f"{number}" in SUBMISSION
    assert f"{CONFIDENCE * 100:.0f} % confidence" in SUBMISSION
