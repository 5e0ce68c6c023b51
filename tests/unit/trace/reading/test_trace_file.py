"""The rank in the name of a trace file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.trace.reading.trace_file import TraceFile


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("trace-3-of-16.pfw.gz", 3),
        ("trace-1-of-2-node7-4711-1.pfw.gz", 1),
        ("run_rank12.pfw", 12),
        ("trace-7.pfw", 7),
        ("trace-node7-4711.pfw.gz", None),
        ("trace-0c95a86b679b75ff-preload.pfw.gz", None),
        ("trace-1234567890123456-app.pfw.gz", None),
        ("frank-3.pfw", None),
    ],
)
def test_a_rank_is_a_number_in_its_place_and_not_the_beginning_of_a_hash(name: str, rank: int | None) -> None:
    assert TraceFile(path=Path(name)).origin.rank == rank
