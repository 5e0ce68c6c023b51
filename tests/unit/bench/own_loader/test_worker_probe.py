"""What a fetch leaves, and what is made of it: sleep told from computing by clocks that are seldom read."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.own_loader.own_reads import OwnReads
from penstock.bench.own_loader.wait_stages import sleep_ns
from penstock.bench.own_loader.worker_probe import (
    CLOCKS_TYPE,
    MOMENTS_TYPE,
    FetchClocks,
    FetchMoments,
    FetchProbe,
    fetches_path,
    read_fetches,
)

MS = 1_000_000
EVERY = 8


def leave_records(count: int, *, slept: int, loading: int, collating: int, between: int) -> bytes:
    """What a loader leaves whose fetches are all alike, and whose clocks are read once in `EVERY` fetches."""
    content, now, cpu = b"", 50 * MS, 7 * MS
    for number in range(count):
        began, loaded = now, now + slept + loading
        ended = loaded + collating
        is_read = number % EVERY == 0
        moments = FetchMoments(began, loaded, ended, 6 + is_read)
        content += np.array([moments], MOMENTS_TYPE).tobytes()
        if is_read:
            clocks = FetchClocks(
                *(cpu, cpu + loading, cpu + loading + collating, -1), *(0, 0, 0, -1), *(0, 0, 0, -1)
            )
            content += np.array([clocks], CLOCKS_TYPE).tobytes()
        cpu, now = cpu + loading + collating + between, ended + between
    return content + bytes(3 * MOMENTS_TYPE.itemsize)


@pytest.mark.parametrize("between", [0, 2 * MS], ids=["worker", "consumer-that-computes"])
def test_fast_fetches_without_readings_divide_as_their_neighbours_do(between: int) -> None:
    rows = read_fetches(
        leave_records(100, slept=MS // 2, loading=MS // 4, collating=MS // 8, between=between)
    )
    assert rows["seq"].tolist() == list(range(100))
    assert rows["load_cpu_ns"] == pytest.approx(np.full(100, MS // 4), abs=2)
    assert rows["collate_cpu_ns"] == pytest.approx(np.full(100, MS // 8), abs=2)
    assert [sleep_ns(row) for row in rows] == pytest.approx([MS // 2] * 100, abs=2)


class Fetcher:
    """As torch's: loads samples, then collates them."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        self._sleep_s = sleep_s
        self.collate_fn: Any = lambda samples: samples

    def load(self, _index: object) -> object:
        time.sleep(self._sleep_s)
        return self.collate_fn([1])


def test_slow_fetch_among_fast_ones_slept(tmp_path: Path) -> None:
    probe = FetchProbe(tmp_path, 0, reads=OwnReads(), samples=False)
    fast, slow = Fetcher(), Fetcher(0.05)
    for number in range(40):
        probe.time(Fetcher.load)(slow if number == 21 else fast, number)
    probe.finish()
    rows = read_fetches(fetches_path(tmp_path, 0).read_bytes())
    assert sleep_ns(rows[21]) > 0.8 * 0.05e9


class WithoutHash:
    """A user's collation that is compared by value, as a dataclass is."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithoutHash)

    def __call__(self, samples: object) -> object:
        return samples


def test_a_collation_needs_no_hash(tmp_path: Path) -> None:
    probe = FetchProbe(tmp_path, 0, reads=OwnReads(), samples=False)
    fetcher = Fetcher()
    fetcher.collate_fn = WithoutHash()
    assert [probe.time(Fetcher.load)(fetcher, number) for number in range(3)] == [[1]] * 3
    probe.finish()
    assert len(read_fetches(fetches_path(tmp_path, 0).read_bytes())) == 3


@pytest.mark.parametrize("clocks_every_ns", [0, 20_000, MS], ids=["always", "at-times", "seldom"])
def test_records_grow_beyond_their_first_room_and_failed_fetches_are_no_batches(
    clocks_every_ns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bench.own_loader.worker_probe._CLOCKS_EVERY_NS", clocks_every_ns)
    probe = FetchProbe(tmp_path, 0, reads=OwnReads(), samples=False)
    fetcher = Fetcher()
    for number in range(5000):
        probe.time(Fetcher.load)(fetcher, number)
    with pytest.raises(ZeroDivisionError):
        probe.time(lambda _fetcher, _index: 1 // 0)(fetcher, 0)
    probe.finish()
    rows = read_fetches(fetches_path(tmp_path, 0).read_bytes())
    assert (len(rows), rows["is_batch"].sum()) == (5001, 5000)
    assert (np.diff(rows["ended_ns"]) > 0).all()


def test_full_disk_ends_the_records_and_not_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    probe = FetchProbe(tmp_path, 0, reads=OwnReads(), samples=False)
    assert probe.time(Fetcher.load)(Fetcher(), 0) == [1]
    probe.finish()
    assert not len(read_fetches(fetches_path(tmp_path, 0).read_bytes()))


def test_own_reads_are_left_out_of_the_kernels_figures(tmp_path: Path) -> None:
    file, reads = tmp_path / "file", OwnReads()
    file.write_bytes(bytes(5000))
    before = reads.io_of(os.getpid())
    for _ in range(20):
        reads.read(file)
    assert reads.io_of(os.getpid()) == before
    with file.open("rb", buffering=0) as other:
        other.read(3000)
    after = reads.io_of(os.getpid())
    assert after["rchar"] - before["rchar"] == 3000
