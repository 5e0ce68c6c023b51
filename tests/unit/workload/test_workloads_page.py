"""docs/workloads.md: every key that needs a word has one, and its program runs."""

import re
from pathlib import Path

import pytest

from penstock.workload.dlio_keys import DEPARTURES, EXPLAINED, REFUSED
from penstock.workload.quantities import Distribution
from penstock.workload.settings import dotted

PAGE = (Path(__file__).parents[3] / "docs" / "workloads.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*DEPARTURES, *EXPLAINED, *REFUSED], ids=dotted)
def test_the_page_speaks_of_every_key_that_dlio_or_we_treat_otherwise(path: tuple[str, ...]) -> None:
    assert f"`{dotted(path)}`" in PAGE


@pytest.mark.parametrize("law", Distribution)
def test_the_page_lists_every_distribution(law: Distribution) -> None:
    assert f"| `{law}` |" in PAGE


def test_the_pages_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    assert "sizing" in names
