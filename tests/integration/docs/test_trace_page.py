"""docs/trace.md: its descriptions are read, and its names are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import main
from penstock.trace.compare.expectations import Expectations
from penstock.trace.compare.findings import FINDING_RULES
from penstock.trace.compare.trace_study import ComparisonSpec, parse_document
from penstock.trace.questions.breakdowns import STRAGGLER_RATIO

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "trace.md").read_text(encoding="utf-8")
_, *CAPTURING = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
COMPARISON, CHECKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_every_way_of_capturing_on_the_page_is_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in CAPTURING for line in block.splitlines() if line.startswith("penstock ")]
    assert len(lines) >= 5
    for line in lines:
        noun, verb = line.split()[1:3]
        assert main([noun, verb, "--help"]) == 0, line
        assert "--trace" in capsys.readouterr().out or noun == "trace"


def test_the_descriptions_on_the_page_are_read() -> None:
    asked = parse_document(ComparisonSpec, COMPARISON, source="page")
    assert asked.dimensions().tiers["ssd"] == ("/l/ssd", "/nvme")
    named = COMPARISON.replace("{base:", "{new: x.pfw, base:")
    assert len(parse_document(Expectations, named + CHECKS, source="page").checks) == 4


def test_findings_on_the_page_are_those_of_the_code() -> None:
    assert all(re.search(rf"^\|.*\b{code}\b", PAGE, re.MULTILINE) for code in FINDING_RULES)
    assert f"more than {STRAGGLER_RATIO:g} times the median" in PAGE
