"""Counters over time: spools while a run lasts, one table after it, and nothing lost between them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.host_counters import CounterSample
from penstock.errors import ObjectNotFound, StorageError
from penstock.results.counter_files import (
    COUNTERS_FILE,
    CounterSpool,
    SampledHost,
    gather_counters,
    read_counters,
    spool_path,
)

NAMES = st.sampled_from(["disk.vda.read_bytes", "net.eth0.sent_bytes", "cpu.user_ms"])
SAMPLES = st.lists(st.dictionaries(NAMES, st.integers(0, 2**62)), max_size=5)


def host(rank: int) -> SampledHost:
    name = f"node{rank}"
    return SampledHost(
        host=name, rank=rank, boot_id="", drives=["vda"], interval_s=1.0, wall_ns=5, monotonic_ns=7
    )


def fill(folder: Path, samples: list[dict[str, int]], rank: int = 0) -> list[tuple[str, int, str, int]]:
    """Spool the samples; the rows that they make."""
    rows, before = [], dict[str, int]()
    with CounterSpool(folder, host(rank)) as spool:
        for moment, values in enumerate(samples):
            spool.append(CounterSample(monotonic_ns=moment, values=values))
            changed = {name: value for name, value in values.items() if before.get(name) != value}
            rows += [(f"node{rank}", moment, *counter) for counter in (changed or values).items()]
            before = values
    return rows


def rows_of(folder: Path) -> list[tuple[str, int, str, int]]:
    table = read_counters(folder)[1]
    return [(row["host"], row["monotonic_ns"], row["counter"], row["value"]) for row in table.to_pylist()]


@settings(max_examples=15)
@given(first=SAMPLES, second=SAMPLES)
def test_table_has_the_content_of_the_spools(
    tmp_path_factory: pytest.TempPathFactory, first: list[dict[str, int]], second: list[dict[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    rows = fill(folder, first, 0) + fill(folder, second, 3)
    assert rows_of(folder) == rows
    gather_counters(folder)
    assert [path.name for path in folder.iterdir()] == [COUNTERS_FILE]
    assert rows_of(folder) == rows
    assert read_counters(folder)[0] == [host(0), host(3)]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    rows = fill(tmp_path, [{"cpu.user_ms": 1}, {"cpu.user_ms": 2}])
    with spool_path(tmp_path, 0).open("ab") as file:
        file.write(b'{"t":3,"c":{"cpu.us')
    assert rows_of(tmp_path) == rows


def test_run_without_counters_has_no_table(tmp_path: Path) -> None:
    gather_counters(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ObjectNotFound, match="has no sampled counters"):
        read_counters(tmp_path)


@pytest.mark.parametrize("line", [b"", b"[]", b'{"format": 1}', b'{"format": 2}'])
def test_something_else_is_refused(tmp_path: Path, line: bytes) -> None:
    fill(tmp_path, [])
    spool_path(tmp_path, 0).write_bytes(line + b"\n")
    with pytest.raises(StorageError, match=r"Not a spool of counters|different format"):
        read_counters(tmp_path)


def test_a_damaged_table_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / COUNTERS_FILE).write_bytes(b"PAR1 and nothing else")
    with pytest.raises(StorageError, match="Cannot read the counters"):
        read_counters(tmp_path)
