"""SECURITY.md: each promise names tests that exist."""

import re
from pathlib import Path

import pytest
from tests.support.command_line import run_command

ROOT = Path(__file__).parents[2]
ROWS = [
    line.split("|")[1:3]
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if line.startswith("|") and "tests/" in line
]


@pytest.mark.parametrize(("promise", "tests"), ROWS, ids=lambda text: text.strip()[:40])
def test_a_promise_has_tests(promise: str, tests: str) -> None:
    folder = ""
    for name in re.findall(r"`([^`]+)`", tests):
        path = Path(name) if "/" in name else Path(folder, name)
        folder = str(path.parent)
        assert (ROOT / path).is_file(), f"{promise}: {path}"


def test_the_promises_are_found() -> None:
    assert len(ROWS) >= 12


def test_the_wheel_contains_the_promises() -> None:
    """It contains docs/, whose pages `penstock docs` shows."""
    assert run_command("docs", "security").stdout == (ROOT / "SECURITY.md").read_text()
