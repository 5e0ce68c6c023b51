"""The study's section of docs/levels.md: its options, rows and findings are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import main
from penstock.units import format_bytes
from penstock.workflows.levels_study.study_findings import RULES
from penstock.workflows.levels_study.study_plan import DEFAULT_TOTAL_BYTES, list_rows

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "levels.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## The study\n")[2].partition("\n## ")[0]


def test_every_option_of_the_section_is_one_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "study", "--help"]) == 0
    helped = capsys.readouterr().out
    options = set(re.findall(r"--[a-z][a-z-]+", SECTION))
    assert {"--fast", "--slow", "--out", "--saves", "--slow-bandwidth"} <= options
    assert [option for option in sorted(options - {"--json"}) if option not in helped] == []
    commands = [shlex.split(line) for line in SECTION.splitlines() if line.startswith("penstock ")]
    assert [words[1:3] for words in commands] == [["checkpoint", "study"]] * 2 + [["trace", "compare"]]


def test_the_section_names_every_row_and_every_finding() -> None:
    for row in list_rows(4, parity_every=3):
        assert f"`{row.name}`" in SECTION
    codes = re.findall(r"^\| (S\d) \|", SECTION, re.MULTILINE)
    assert codes == [f"S{number}" for number in range(1, len(RULES) + 1)]
    assert format_bytes(DEFAULT_TOTAL_BYTES) in SECTION
