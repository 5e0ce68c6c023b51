"""Watching a round: progress, signs of life and remarks while it lasts, and nothing afterwards."""

import threading
import time
from pathlib import Path

import pytest

from penstock.bench.checkpoint import checkpoint_rounds as watching
from penstock.bench.checkpoint.checkpoint_rounds import ProgressBoard, RoundProgress
from penstock.progress import Progress


class _Bar(Progress):
    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.moved = 0.0
        self.remarks: list[str] = []

    def begin(self, phase: str, total: float) -> None:
        self.begun.append((phase, total))

    def advance(self, amount: float) -> None:
        self.moved += amount

    def remark(self, text: str) -> None:
        self.remarks.append(text)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_INTERVAL_S", 0.005)
    monkeypatch.setattr(watching, "SIGN_INTERVAL_S", 0.0)


def test_a_round_that_lasts_tells_how_far_all_ranks_are(hasty: None, tmp_path: Path) -> None:
    alive, bar = threading.Event(), _Bar()
    board = ProgressBoard(tmp_path / "progress", rank=0, num_ranks=2)
    watch = RoundProgress(board, rank=0, progress=bar, heartbeat=alive.set)
    other = ProgressBoard(tmp_path / "progress", rank=1, num_ranks=2)
    with watch.track("writing checkpoint 3 of 10", [1000, 1000], unit="written_bytes"):
        other.note(100)
        watch.advance(900)
        watch.advance(400)  # chunks are counted whole, so the last of a file may overshoot
        deadline_s = time.monotonic() + 60
        while "rank 1 is last with 10%" not in bar.remarks and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert alive.wait(timeout=60)
    assert bar.begun == [("writing checkpoint 3 of 10, all ranks", 2000)]
    assert bar.moved == 2000
    assert "rank 1 is last with 10%" in bar.remarks
    assert bar.remarks[-1] == ""
    assert "penstock-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_failed_round_does_not_come_to_its_end(tmp_path: Path) -> None:
    bar = _Bar()
    watch = RoundProgress(
        ProgressBoard(tmp_path / "progress", rank=0, num_ranks=1),
        rank=0,
        progress=bar,
        heartbeat=lambda: None,
    )
    with pytest.raises(OSError, match="gone"), watch.track("reading", [10], unit="read_bytes"):
        raise OSError("gone")
    assert bar.moved == 0


def test_other_ranks_only_note_their_own(hasty: None, tmp_path: Path) -> None:
    bar = _Bar()
    board = ProgressBoard(tmp_path / "progress", rank=1, num_ranks=2)
    watch = RoundProgress(board, rank=1, progress=bar, heartbeat=lambda: None)
    with watch.track("reading", [10, 10], unit="read_bytes"):
        watch.advance(7)
        while board.read() != [0, 7]:
            threading.Event().wait(0.005)
    assert bar.begun == []


def test_the_last_interval_of_a_round_ends_with_its_last_bytes(tmp_path: Path) -> None:
    board = ProgressBoard(tmp_path / "progress", rank=0, num_ranks=1)
    watch = RoundProgress(board, rank=0, progress=_Bar(), heartbeat=lambda: None)
    with watch.track("writing", [1000], unit="written_bytes"):
        began_ns = watch.began_ns
        watch.advance(600)
        watch.advance(600)  # chunks are counted whole
        elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
    moved = watch.moved_over_time(1000)
    assert sum(size_bytes for _, _, size_bytes in moved) == 1000
    assert all(width_s > 0 for _, width_s, _ in moved)
    begin_s, width_s, _ = moved[-1]
    assert begin_s + width_s <= elapsed_s
