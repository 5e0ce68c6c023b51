"""docs/cluster.md lists every field and every check."""

import re
from pathlib import Path

from tests.unit.cluster.facts.known_hosts import cluster, present

from penstock.cluster.facts.homogeneity import LARGEST_SKEW_S, MEMORY_SLACK, check_homogeneity
from penstock.cluster.facts.host_facts import VERSION, HostReport
from penstock.cluster.gates.gate_checks import (
    NEEDS,
    RESERVE,
    RESULTS_BYTES,
    SHARED_MEMORY_NEEDED,
    SHARED_MEMORY_WANTED,
)
from penstock.cluster.gates.gate_model import Gate
from penstock.cluster.gates.preflight import PATIENCE_S
from penstock.results.counter_files import LEAST_BYTES, LEAST_SHARE

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_field_of_a_report_is_on_the_page() -> None:
    assert HostReport.model_fields.keys() <= QUOTED


def test_every_check_is_on_the_page() -> None:
    of_packages = present("a").report.versions.keys()
    subjects = {check.subject for check in check_homogeneity(cluster(present("a")))}
    assert subjects - of_packages <= QUOTED


def test_every_gate_is_on_the_page_with_its_limits() -> None:
    assert set(Gate) <= QUOTED
    for limit, _, _, _ in NEEDS:
        assert limit.partition(" ")[0] in PAGE
    assert [f"{needed:,}" for _, needed, _, _ in NEEDS] == ["1,024", "256", f"{1 << 30:,}"]
    assert "below 1024, 256 or 1 GiB" in PAGE
    assert [wanted for _, _, wanted, _ in NEEDS] == [4096, 1024, 1 << 40]
    assert "at least 4096 open files, 1024 processes and a file size of 1 TiB" in PAGE
    assert f"/dev/shm has a size of at least {SHARED_MEMORY_WANTED >> 30} GiB" in PAGE
    assert f"less than {SHARED_MEMORY_NEEDED >> 20} MiB free" in PAGE
    assert f"{RESULTS_BYTES >> 20} MiB for results" in PAGE
    assert f"{100 // RESERVE} % more" in PAGE
    assert f"within {PATIENCE_S:g} s" in PAGE


def test_limits_of_deliveries_are_those_of_the_code() -> None:
    assert f"less than {LEAST_SHARE:.0%}".replace("%", " %") in PAGE
    assert f"less than {LEAST_BYTES >> 20} MiB, nothing is compared" in PAGE


def test_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"at most {MEMORY_SLACK * 100:g} %" in PAGE
    assert f"more than {LARGEST_SKEW_S:g} s" in PAGE
    assert f"`version` is {VERSION}" in PAGE
