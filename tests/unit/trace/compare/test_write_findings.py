"""F11 and F12: writes of a different size than in the baseline, and calls long after a file was closed."""

from collections.abc import Sequence
from typing import Any

from tests.support.trace_studies import small_study

from penstock.trace.compare.query_findings import calls_after_close, changed_sizes
from penstock.trace.compare.trace_study import TraceFinding

MIB = 1 << 20
SECOND = 1_000_000


def writes(run: str, size: int, number: int, *, dur_us: int = 10, tier: str = "slow") -> list[dict[str, Any]]:
    """Writes of one size, one after the other, with a header before them."""
    path = f"/{tier}/f-0.pt"
    base = {"run": run, "name": "write", "path": path, "rank": 0, "pid": 0}
    header = [{**base, "ts_us": 0, "dur_us": 1, "size_bytes": 64} for _ in range(3 * number)]
    return header + [
        {**base, "ts_us": 1 + dur_us * at, "dur_us": dur_us, "size_bytes": size} for at in range(number)
    ]


def sizes(*runs: Sequence[dict[str, Any]]) -> list[TraceFinding]:
    with small_study([row for rows in runs for row in rows]) as study:
        return changed_sizes(study)


def test_the_size_is_that_of_the_bytes_and_not_of_the_headers() -> None:
    assert sizes(writes("base", 8 * MIB, 4), writes("new", 8 * MIB, 4)) == []
    (finding,) = sizes(writes("base", 8 * MIB, 4), writes("new", MIB, 32, dur_us=2))
    (row,) = finding.evidence.records()
    assert (row["typical_bytes"], row["typical_base"], row["to_base"]) == (MIB, 8 * MIB, 1 / 8)
    assert finding.title == "new: smaller writes than in base"
    assert "in pieces of 1 MiB, in base in pieces of 8 MiB" in finding.says[0]


def test_smaller_writes_that_take_longer_cost_what_they_take_longer() -> None:
    (finding,) = sizes(writes("base", 8 * MIB, 4), writes("new", MIB, 32))
    assert finding.weight.value == "cost"
    assert finding.lost_us == 320 - 40
    assert "longer than in base for as many bytes" in finding.says[1]


def test_larger_writes_that_are_faster_are_a_note() -> None:
    (finding,) = sizes(writes("base", MIB, 32), writes("new", 8 * MIB, 4))
    assert (finding.weight.value, finding.lost_us) == ("note", None)
    assert finding.title == "new: larger writes than in base"
    assert len(finding.says) == 1


def test_another_tier_is_compared_with_the_writes_of_the_same_files() -> None:
    (finding,) = sizes(writes("base", 8 * MIB, 4), writes("new", MIB, 32, tier="fast"))
    assert finding.evidence.records()[0]["tier"] == "fast"


def test_few_bytes_and_files_that_the_baseline_does_not_write_are_no_finding() -> None:
    assert sizes(writes("base", 4096, 4), writes("new", 512, 32)) == []
    other = [{**row, "path": "/slow/other.bin"} for row in writes("new", MIB, 32)]
    assert sizes(writes("base", 8 * MIB, 4), other) == []


def life(*later: tuple[str, int], files: int = 12, opened: bool = True) -> list[dict[str, Any]]:
    """Files that are written and closed within 30 us, and then called on after these seconds."""
    rows: list[dict[str, Any]] = []
    for number in range(files):
        calls = [*([("open", 0)] if opened else []), ("write", 10), ("close", 20)]
        calls += [(name, 30 + after) for name, after in later]
        rows += [
            {"run": "new", "name": name, "ts_us": at, "dur_us": 10, "path": f"/fast/f-{number}.pt",
             "size_bytes": 8 if name == "write" else None, "rank": 0, "pid": 0}
            for name, at in calls
        ]  # fmt: skip
    return rows


def after_close(rows: Sequence[dict[str, Any]]) -> list[TraceFinding]:
    with small_study(rows) as study:
        return calls_after_close(study)


def test_calls_long_after_the_close_are_found_with_the_time_that_passed() -> None:
    (finding,) = after_close(life(("stat", 24 * SECOND), ("stat", 24 * SECOND + 10), ("access", 2 * SECOND)))
    assert finding.title == "new: files are looked at up to 24.0 s after they were closed"
    found = {row["op"]: row for row in finding.evidence.records()}
    assert found["stat"]["median_after_us"] == 24 * SECOND + 5
    assert (found["stat"]["num_files"], found["stat"]["num_calls"]) == (12, 24)
    assert "24 calls of stat on 12 files of f.pt come 24.0 s after" in finding.says[0]
    assert finding.lost_us == 10 * 3  # on twelve files at once


def test_soon_after_the_close_or_while_a_file_is_open_again_is_no_finding() -> None:
    assert after_close(life(("stat", SECOND // 2))) == []
    assert after_close(life(("open", 2 * SECOND), ("fstat", 2 * SECOND + 10))) == []


def test_a_trace_without_opens_still_tells_what_follows_a_close() -> None:
    assert len(after_close(life(("stat", 2 * SECOND), opened=False))) == 1


def test_few_files_and_calls_that_end_a_file_are_no_finding() -> None:
    assert after_close(life(("stat", 24 * SECOND), files=9)) == []
    assert after_close(life(("unlink", 24 * SECOND), ("rename", 25 * SECOND))) == []


def test_files_that_are_only_read_are_no_finding() -> None:
    rows = [
        {**row, "name": "read" if row["name"] == "write" else row["name"]}
        for row in life(("stat", 9 * SECOND))
    ]
    assert after_close(rows) == []
