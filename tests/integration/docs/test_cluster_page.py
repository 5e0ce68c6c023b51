"""docs/cluster.md: its commands run as a reader would type them, and it tells every field and every check."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.unit.cluster.facts.known_hosts import cluster, present

from penstock.cluster.facts.likeness import LARGEST_SKEW_S, MEMORY_SLACK, check_likeness
from penstock.cluster.facts.model import VERSION, HostReport

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_the_commands_on_the_page_work(tmp_path: Path, typed: Callable[..., str]) -> None:
    (text,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert "memory" in typed(text, tmp_path)


def test_every_field_of_a_report_is_on_the_page() -> None:
    assert HostReport.model_fields.keys() <= QUOTED


def test_every_check_is_on_the_page() -> None:
    of_packages = present("a").report.versions.keys()
    subjects = {check.subject for check in check_likeness(cluster(present("a")))}
    assert subjects - of_packages <= QUOTED


def test_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"at most {MEMORY_SLACK * 100:g} %" in PAGE
    assert f"more than {LARGEST_SKEW_S:g} s" in PAGE
    assert f"`version` is {VERSION}" in PAGE
