"""Events keep their meaning on the way through spools and tables."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.run_events import RankScript, even_run

from penstock.errors import ObjectNotFound, StorageError
from penstock.results import event_files
from penstock.results.event_files import SpoolWriter, read_spool, spool_path
from penstock.results.step_events import RankClock, RankEvents, SpanEvent, SpanKind, StepEvent, StepPhase


def spooled(folder: Path, ranks: list[RankEvents]) -> None:
    for rank in ranks:
        with SpoolWriter(spool_path(folder, rank.clock.rank), rank.clock) as spool:
            for row in range(0, len(rank.steps), 3):
                spool.append(rank.steps[row : row + 3])
            spool.append(rank.spans)


def assert_same(found: list[RankEvents], wanted: list[RankEvents]) -> None:
    assert [rank.clock for rank in found] == [rank.clock for rank in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.steps.tolist() == other.steps.tolist()
        assert one.spans.tolist() == other.spans.tolist()


def test_a_date_is_the_anchor_plus_what_passed_since() -> None:
    clock = RankClock(rank=0, host="a", wall_ns=1_767_225_600 * 10**9, monotonic_ns=5 * 10**9)
    assert clock.date(5 * 10**9).isoformat() == "2026-01-01T00:00:00+00:00"
    assert clock.date(6_250_001_000).isoformat() == "2026-01-01T00:00:01.250001+00:00"
    assert clock.date(4 * 10**9).isoformat() == "2025-12-31T23:59:59+00:00"


def test_blocks_hold_their_own_steps_and_one_cut_short_holds_none() -> None:
    script = RankScript()
    script.epoch()
    script.step(1, 1)
    script.step(1, 1)
    script.end_block()
    script.checkpoint(SpanKind.SAVE, 3, 100)
    script.block()
    script.step(2, 2)
    script.end_block()
    script.evaluation()
    script.step(3, 3)
    script.end_block()
    script.end_epoch()
    script.epoch()
    script.step(4, 4)
    events = script.events()
    first, second = events.blocks(StepPhase.TRAIN, 1)
    assert (first.number, first.elapsed_ns, len(first.steps)) == (1, 4 * 10**9, 2)
    assert (second.number, second.elapsed_ns, len(second.steps)) == (2, 4 * 10**9, 1)
    assert [block.elapsed_ns for block in events.blocks(StepPhase.EVAL, 1)] == [6 * 10**9]
    assert events.epochs(StepPhase.TRAIN) == [1]
    assert events.blocks(StepPhase.TRAIN, 2) == []
    (save,) = events.spans_of(SpanKind.SAVE, SpanKind.LOAD)
    assert (save.size_bytes, save.end_ns - save.start_ns, save.block) == (100, 3 * 10**9, 1)


def test_spools_are_gathered_into_two_tables_and_removed(tmp_path: Path) -> None:
    ranks = even_run(num_ranks=3)
    spooled(tmp_path, ranks)
    assert_same(event_files.read_events(tmp_path), ranks)
    event_files.gather_events(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        event_files.SPANS_FILE,
        event_files.STEPS_FILE,
    ]
    assert_same(event_files.read_events(tmp_path), ranks)


def test_any_reader_of_parquet_understands_the_table(tmp_path: Path) -> None:
    ranks = even_run(num_ranks=2, num_epochs=1, num_steps=2)
    event_files.write_tables(tmp_path, [rank.clock for rank in ranks], iter(ranks))
    table = pq.read_table(tmp_path / event_files.STEPS_FILE)
    assert table.column_names == ["rank", *StepEvent._fields]
    assert table.column("phase").to_pylist() == ["train"] * 4
    assert table.column("rank").to_pylist() == [0, 0, 1, 1]
    assert json.loads(table.schema.metadata[b"penstock"])["format"] == 1
    spans = pq.read_table(tmp_path / event_files.SPANS_FILE)
    assert spans.column_names == ["rank", *SpanEvent._fields]
    assert spans.column("kind").to_pylist() == ["block", "epoch"] * 2


def test_a_rank_without_steps_is_still_a_rank(tmp_path: Path) -> None:
    ranks = [RankScript(0).events(), even_run(num_ranks=2)[1]]
    event_files.write_tables(tmp_path, [rank.clock for rank in ranks], iter(ranks))
    assert_same(event_files.read_events(tmp_path), ranks)


def test_missing_rank_is_an_error_and_removes_nothing(tmp_path: Path) -> None:
    spooled(tmp_path, even_run(num_ranks=2))
    with pytest.raises(ObjectNotFound, match=r"1 of 3 ranks.*first rank 2.*share"):
        event_files.gather_events(tmp_path, 3)
    assert len(list((tmp_path / "spool").iterdir())) == 2


def test_failed_gathering_keeps_the_spools_and_no_table(tmp_path: Path) -> None:
    ranks = even_run(num_ranks=2)
    spooled(tmp_path, ranks)
    header, _, _ = spool_path(tmp_path, 1).read_bytes().partition(b"\n")
    spool_path(tmp_path, 1).write_bytes(b"{}" + header)
    with pytest.raises(StorageError, match="Not a spool"):
        event_files.gather_events(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spool"]
    assert_same([read_spool(spool_path(tmp_path, 0))], ranks[:1])


@given(cut=st.integers(1, 5000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_spool_cut_anywhere_yields_the_frames_before_the_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / f"{cut}.events"
    path.unlink(missing_ok=True)
    (rank,) = even_run(num_ranks=1, num_steps=8)
    with SpoolWriter(path, rank.clock) as spool:
        ends = []
        for row in rank.steps:
            spool.append(np.array([row]))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    cut = header + cut % (len(whole) - header)
    path.write_bytes(whole[:cut])
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        found = read_spool(path)
    kept = sum(end <= cut for end in ends)
    assert found.steps.tolist() == rank.steps[:kept].tolist()
    assert bool(caplog.records) == (cut not in (header, *ends))


@pytest.mark.parametrize("position", [0, 8, 40])
def test_a_damaged_frame_and_all_behind_it_are_left_out(tmp_path: Path, position: int) -> None:
    path = tmp_path / "0.events"
    (rank,) = even_run(num_ranks=1)
    with SpoolWriter(path, rank.clock) as spool:
        spool.append(rank.steps[:2])
        begin = path.stat().st_size
        spool.append(rank.steps[2:])
        spool.append(rank.spans)
    content = bytearray(path.read_bytes())
    content[begin + position] ^= 0xFF
    path.write_bytes(content)
    found = read_spool(path)
    assert found.steps.tolist() == rank.steps[:2].tolist()
    assert len(found.spans) == 0


def test_a_spool_is_never_written_over(tmp_path: Path) -> None:
    clock = even_run(num_ranks=1)[0].clock
    SpoolWriter(tmp_path / "0.events", clock).close()
    with pytest.raises(FileExistsError):
        SpoolWriter(tmp_path / "0.events", clock)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "Not a spool"),
        (b"[]", "Not a spool"),
        (b'{"format": 1}', "Not a spool"),
        (b'{"format": 2}', "a different format"),
    ],
)
def test_a_foreign_spool_is_refused_by_its_name(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "0.events"
    path.write_bytes(line + b"\nrest")
    with pytest.raises(StorageError, match=said) as refused:
        read_spool(path)
    assert str(path) in str(refused.value)


def test_run_without_events_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="no step events"):
        event_files.read_events(tmp_path)


def test_tables_of_another_format_or_none_at_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / event_files.STEPS_FILE).write_bytes(b"PAR1 and no more")
    with pytest.raises(StorageError, match="Cannot read the events"):
        event_files.read_events(tmp_path)
    pq.write_table(pa.table({"rank": [0]}), tmp_path / event_files.STEPS_FILE)
    with pytest.raises(StorageError, match="format None, not 1"):
        event_files.read_events(tmp_path)


def test_spool_is_closed_at_the_end_of_its_block(tmp_path: Path) -> None:
    (rank,) = even_run(num_ranks=1)
    with SpoolWriter(spool_path(tmp_path, 0), rank.clock) as spool:
        spool.append(rank.steps)
    with pytest.raises(ValueError, match="closed"):
        spool.append(rank.spans)
    spool.close()
    assert_same([read_spool(spool_path(tmp_path, 0))], [replace(rank, spans=rank.spans[:0])])
