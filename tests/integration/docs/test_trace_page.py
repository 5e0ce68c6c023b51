"""docs/trace.md: its commands, descriptions and Python run, and its names are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from penstock.cli import main
from penstock.trace.compare.description import Comparison
from penstock.trace.documents import parse_document
from penstock.trace.expect import Expectations
from penstock.trace.findings.rules import RULES
from penstock.trace.questions.ranks import STRAGGLER_RATIO
from penstock.trace.synthesize import Description, synthesize
from penstock.trace.synthesize.description import Damage

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "trace.md").read_text(encoding="utf-8")
(TOUR,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
(PYTHON,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMPARISON, CHECKS, TRACES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_tour_and_the_python_after_it_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in TOUR.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    said = capsys.readouterr().out
    assert "1060.072770" in said
    assert (tmp_path / "report" / "report.html").exists()
    exec(compile(PYTHON, "docs/trace.md", "exec"), {})
    assert "model.pt" in capsys.readouterr().out


def test_the_descriptions_on_the_page_are_read(tmp_path: Path) -> None:
    asked = parse_document(Comparison, COMPARISON, source="page")
    assert asked.lens().tiers["ssd"] == ("/l/ssd", "/nvme")
    named = COMPARISON.replace("{base:", "{new: x.pfw, base:")
    assert len(parse_document(Expectations, named + CHECKS, source="page").checks) == 4
    made = synthesize(parse_document(Description, TRACES, source="page"), tmp_path / "made")
    assert made.num_files == {"one": 4}


def test_findings_and_damages_on_the_page_are_those_of_the_code() -> None:
    kinds = get_args(Damage.model_fields["kind"].annotation)
    assert all(f"`{kind}`" in PAGE for kind in kinds)
    assert all(re.search(rf"^\|.*\b{code}\b", PAGE, re.MULTILINE) for code in RULES)
    assert f"more than {STRAGGLER_RATIO:g} times the median" in PAGE
