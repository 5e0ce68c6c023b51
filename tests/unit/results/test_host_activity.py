"""What happens between two samples belongs to the phases between them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cluster.host_counters import CounterSample
from penstock.results.counter_files import (
    CounterSpool,
    SampledHost,
    read_counters,
    summarize_activity,
)
from penstock.results.step_events import SPAN_TYPE, STEP_TYPE, RankClock, RankEvents, SpanEvent, SpanKind

S = 10**9


def _events(
    rank: int, *spans: tuple[SpanKind, int, float, float], epochs: tuple[int, ...] = ()
) -> RankEvents:
    """The step of each span is its number, and its epoch too unless `epochs` names another."""
    rows = [
        SpanEvent(
            kind=kind,
            phase=0,
            epoch=epoch,
            block=1,
            step=number,
            start_ns=round(start * S),
            end_ns=round(end * S),
            size_bytes=0,
        )
        for (kind, number, start, end), epoch in zip(
            spans, epochs or [number for _, number, *_ in spans], strict=True
        )
    ]
    return RankEvents(
        clock=RankClock(rank=rank, host=f"node{rank}", wall_ns=0, monotonic_ns=0),
        steps=np.empty(0, STEP_TYPE),
        spans=np.array(rows, SPAN_TYPE),
    )


def _found(folder: Path, *events: RankEvents, boot_id: str = "") -> list[dict[str, Any]]:
    """Of hosts that read 100 bytes and send 10 from second 2 to 3, busy half of that time, and rest else."""
    for each in events:
        host = SampledHost(
            host=each.clock.host,
            rank=each.clock.rank,
            boot_id=boot_id,
            drives=("vda",),
            interval_s=1.0,
            wall_ns=0,
            monotonic_ns=0,
        )
        with CounterSpool(folder, host) as spool:
            for second in range(6):
                done = 1000 if second >= 3 else 0
                spool.append(
                    CounterSample(
                        monotonic_ns=second * S,
                        values={
                            "disk.vda.read_bytes": 7 + done // 10,
                            "disk.vda1.read_bytes": 7 + done // 10,
                            "net.eth0.sent_bytes": 7 + done // 100,
                            "net.lo.sent_bytes": 7 + done,
                            "ib.mlx5_0/1.received_bytes": 5,
                            "cpu.user_ms": done // 2,
                            "cpu.idle_ms": second * 1000 - done // 2,
                        },
                    )
                )
    return summarize_activity(*read_counters(folder), events)


@pytest.mark.parametrize(
    ("start", "end", "part"),
    [(0.0, 2.0, 0.0), (2.0, 3.0, 1.0), (1.0, 2.5, 1.0), (2.25, 2.75, 1.0), (3.0, 9.0, 0.0)],
)
def test_phase_gets_all_that_grew_between_the_samples_around_it(
    tmp_path: Path, start: float, end: float, part: float
) -> None:
    (found,) = _found(tmp_path, _events(0, (SpanKind.EPOCH, 1, start, end)))
    assert found["phase"] == "epoch 1"
    assert found["drives_read_bytes"] == round(100 * part)
    assert found["networks_sent_bytes"] == round(10 * part)
    assert (found["drives_written_bytes"], found["networks_received_bytes"]) == (0, 0)
    assert found["elapsed_s"] == pytest.approx(end - start)


def test_phases_between_two_samples_share_what_grew_there_by_their_times(tmp_path: Path) -> None:
    spans = ((SpanKind.LOAD, 1, 2.1, 2.3), (SpanKind.LOAD, 2, 2.4, 2.7), (SpanKind.LOAD, 3, 4.2, 4.8))
    found = _found(tmp_path, _events(0, *spans, epochs=(1, 1, 1)))
    assert [each["drives_read_bytes"] for each in found] == [40, 60, 0]
    assert [each["cpu_busy_share"] for each in found] == [pytest.approx(0.5), pytest.approx(0.5), 0.0]


def test_checkpoints_of_an_epoch_and_the_rest_of_it_add_up_to_the_epoch(tmp_path: Path) -> None:
    spans = (
        (SpanKind.BLOCK, 1, 0.0, 2.25),
        (SpanKind.SAVE, 1, 2.25, 2.5),
        (SpanKind.BLOCK, 2, 2.5, 2.75),
        (SpanKind.SAVE, 2, 2.75, 3.0),
        (SpanKind.EPOCH, 1, 0.0, 3.0),
    )
    found = _found(tmp_path, _events(0, *spans, epochs=(1,) * len(spans)))
    assert [(each["phase"], each["elapsed_s"], each["drives_read_bytes"]) for each in found] == [
        ("epoch 1", 2.5, 50),
        ("save 1", 0.25, 25),
        ("save 2", 0.25, 25),
    ]
    # Busy for half of 0.5 s of the 2.5 s.
    assert found[0]["cpu_busy_share"] == pytest.approx(0.1)


def test_an_epoch_that_never_ended_has_its_complete_blocks(tmp_path: Path) -> None:
    spans = ((SpanKind.BLOCK, 1, 1.0, 2.5), (SpanKind.SAVE, 1, 2.5, 3.0))
    found = _found(tmp_path, _events(0, *spans, epochs=(1, 1)))
    assert [(each["phase"], each["elapsed_s"], each["drives_read_bytes"]) for each in found] == [
        ("epoch 1", 1.5, 50),
        ("save 1", 0.5, 50),
    ]


def test_a_run_that_ended_before_its_first_phase_has_no_activity(tmp_path: Path) -> None:
    assert _found(tmp_path, _events(0)) == []


def test_hosts_are_added_up_and_their_processors_averaged(tmp_path: Path) -> None:
    spans = ((SpanKind.EPOCH, 1, 0.0, 2.0), (SpanKind.EPOCH, 2, 2.0, 3.0))
    first, second = _found(tmp_path, _events(0, *spans), _events(4, *spans))
    assert (first["phase"], first["hosts"]) == ("epoch 1", 2)
    assert first["cpu_busy_share"] == pytest.approx(0.0)
    assert (second["drives_read_bytes"], second["networks_sent_bytes"]) == (200, 20)
    assert second["cpu_busy_share"] == pytest.approx(0.5)


def test_drives_of_one_machine_under_two_names_count_once(tmp_path: Path) -> None:
    span = (SpanKind.EPOCH, 1, 2.0, 3.0)
    (found,) = _found(tmp_path, _events(0, span), _events(4, span), boot_id="x")
    assert (found["hosts"], found["drives_read_bytes"], found["networks_sent_bytes"]) == (2, 100, 20)


def test_checkpoints_at_the_same_step_of_several_epochs_are_told_apart(tmp_path: Path) -> None:
    spans = ((SpanKind.SAVE, 4, 0.0, 2.0), (SpanKind.SAVE, 4, 2.0, 3.0))
    found = _found(tmp_path, *(_events(rank, *spans, epochs=(1, 2)) for rank in (0, 3)))
    assert [
        (each["phase"], each["hosts"], each["elapsed_s"], each["drives_read_bytes"]) for each in found
    ] == [
        ("save 4 of epoch 1", 2, 2.0, 0),
        ("save 4 of epoch 2", 2, 1.0, 200),
    ]


def test_a_run_of_checkpoints_alone_has_no_epoch(tmp_path: Path) -> None:
    spans = ((SpanKind.SAVE, 1, 2.0, 3.0), (SpanKind.LOAD, 2, 4.0, 5.0), (SpanKind.EPOCH, 1, 0.0, 5.0))
    found = _found(tmp_path, _events(0, *spans, epochs=(1, 1, 1)))
    assert [each["phase"] for each in found] == ["save 1", "load 2"]
    assert found[0]["drives_read_bytes"] == 100
