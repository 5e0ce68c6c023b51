"""Loads on a schedule against real storages: throttled, stalling, of files and of objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.rank_threads import on_ranks
from tests.support.repeated_measurement import measure_until
from tests.support.slow_storages import Stalling, Throttled

from penstock.bench.probe import ProbeRequest, ProbeResult, metadata_rates, probe
from penstock.bench.probe.load_plan import MOST_GROWTH, LoadRequest, arrivals
from penstock.bench.probe.load_run import LoadLoop, LoadResult, measure_load
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.probe_page import make_probe_page
from penstock.bench.probe.probe_run import Part
from penstock.bench.probe.timed_streams import FileTarget
from penstock.cluster.comm import Comm, SoloComm
from penstock.errors import StorageError, UsageError
from penstock.progress import Progress
from penstock.reports.page import render_report
from penstock.storage import Storage, open_storage
from penstock.storage.capabilities import find_local_paths
from penstock.storage.uri import parse_uri
from penstock.testing.faults import FailAtCall

QUICK = ProbeRequest(
    uri="mem://x", size_bytes=16 << 20, max_seconds=1.2, load=LoadRequest(depth=16, seconds=0.5)
)


def _load(
    request: ProbeRequest,
    uri: str = "mem://x",
    *,
    wrap: Callable[[Storage], Storage] = lambda storage: storage,
    comm: Comm | None = None,
) -> LoadResult:
    comm = comm or SoloComm()
    folder = ProbeFolder(parse_uri(uri), "penstock-probe-test", comm=comm, environment={}, options={})
    with folder as place:
        place.storage = wrap(place.storage)
        return measure_load(
            request.load,
            place,
            size_bytes=request.size_bytes,
            max_seconds=request.max_seconds,
            comm=comm,
            progress=Progress(),
        )


def _quick(max_seconds: float = 1.2, **load: object) -> ProbeRequest:
    return replace(QUICK, max_seconds=max_seconds, load=replace(QUICK.load, **load))  # type: ignore[arg-type]


def test_the_knee_of_a_throttled_storage_is_its_rate_within_10_percent() -> None:
    request = _quick(depth=32)
    seen = measure_until(
        lambda _: _load(request, wrap=lambda storage: Throttled(storage, rate_per_s=400, latency_s=0.02)),
        lambda seen: (
            seen.knee is not None
            and seen.knee.operations_per_s == pytest.approx(400, rel=0.1)
            and seen.points[0].p50_ms == pytest.approx(22.5, rel=0.3)
        ),
    )
    assert seen.knee is not None
    assert seen.knee.operations_per_s == pytest.approx(400, rel=0.1)
    assert seen.knee.limited_by == "storage"
    assert seen.points[0].p50_ms == pytest.approx(22.5, rel=0.3)


@pytest.mark.slow
def test_a_load_that_more_in_flight_would_keep_up_with_says_so() -> None:
    request = _quick(depth=4)
    seen = _load(request, wrap=lambda storage: Throttled(storage, rate_per_s=4000, latency_s=0.02))
    assert seen.knee is not None
    # Four in flight for 20 ms each are at most 200 a second. A busy machine may be the limit before that.
    assert seen.knee.operations_per_s <= 200 / (1 - MOST_GROWTH)
    assert seen.knee.limited_by in ("depth", "host")


def test_a_storage_that_stalls_200_ms_every_2_s_shows_it_in_p999() -> None:
    request = _quick(seconds=2.5, rates=(150.0,))
    stalling = partial(Stalling, latency_s=0.05, stall_s=0.2, every_s=2)
    seen = measure_until(
        lambda _: _load(request, wrap=stalling),
        lambda seen: seen.points[0].p999_ms <= 400 and seen.points[0].p50_ms < 100,
    )
    (point,) = seen.points
    # The longest wait is that of what was due as the stall began.
    assert 200 <= point.p999_ms <= 400
    assert point.p50_ms < 100


def test_reads_and_writes_are_mixed_on_files_and_nothing_stays(tmp_path: Path) -> None:
    request = _quick(depth=4, block_bytes=4096, read_percent=70, seconds=0.1, max_seconds=0.3)
    for uri in (f"file://{tmp_path}", f"direct://{tmp_path}"):
        seen = _load(request, uri)
        assert any(point.read_p99_ms is not None for point in seen.points)
        assert any(point.write_p99_ms is not None for point in seen.points)
        assert list(tmp_path.iterdir()) == []


def test_storages_without_files_write_objects_and_remove_them() -> None:
    request = _quick(depth=4, block_bytes=4096, read_percent=0, seconds=0.05, max_seconds=0.2)
    left: list[Storage] = []

    def keep(storage: Storage) -> Storage:
        left.append(storage)
        return storage

    assert _load(request, wrap=keep).points[0].write_p99_ms is not None
    assert list(left[0].list()) == []


def test_all_ranks_offer_their_share_and_come_to_the_same_result(tmp_path: Path) -> None:
    request = _quick(depth=2, block_bytes=4096, seconds=0.05, max_seconds=0.2)
    one, other = on_ranks(2, lambda comm: _load(request, f"file://{tmp_path}", comm=comm))
    assert one == other
    assert one.ranks == 2
    assert list(tmp_path.iterdir()) == []


def test_operations_that_no_sector_holds_are_refused_where_the_page_cache_is_passed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--request 4096"):
        _load(_quick(block_bytes=1000), f"direct://{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_a_read_that_fails_ends_the_load_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Injected fault in read_into"):
        _load(QUICK, f"file://{tmp_path}", wrap=lambda storage: FailAtCall(storage, "read_into", 30))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("depth", [1, 3, 64])
@pytest.mark.parametrize("rate_per_s", [None, 3000.0])
def test_times_of_operations_are_in_order_and_keep_to_the_depth(
    tmp_path: Path, depth: int, rate_per_s: float | None
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    due = arrivals(rate_per_s, 0.1, rank=0, num_ranks=1) if rate_per_s else None
    load = LoadRequest(block_bytes=4096, read_percent=60, depth=depth)
    files = find_local_paths(open_storage(f"direct://{tmp_path}", {}))
    assert files is not None
    with closing(FileTarget(files, "file", "file:///x", is_sequential=False)) as target:
        loop = LoadLoop(
            load, target, uri="file:///x", size_bytes=1 << 20, comm=SoloComm(), progress=Progress()
        )
        times = loop.run(due, 0.1)
    assert (times["begun"] >= np.maximum(times["due"], times["free"])).all()
    assert due is None or times["due"].tolist() == due
    # What was given up has the time of giving up; the rest is in front of it.
    begun, ended = (times[name][times["ended"] != times["begun"]] for name in ("begun", "ended"))
    assert (ended > begun).all()
    # Whenever one begins, fewer than `depth` that began before have not ended. A thread may lose its core
    # between its clock and its operation's number, so numbers are not in the order of beginnings.
    ended_before = np.searchsorted(np.sort(ended), np.sort(begun), side="right")
    assert (np.arange(begun.size) - ended_before < depth).all()
    whole_hundreds = times["is_write"][: times.size // 100 * 100]
    assert whole_hundreds.sum() == 0.4 * whole_hundreds.size


def _probe(uri: str, *parts: Part, load: LoadRequest | None = None) -> ProbeResult:
    request = ProbeRequest(
        uri=uri,
        size_bytes=1 << 20,
        streams=(1, 2),
        max_seconds=0.2,
        parts=parts,
        load=replace(load or LoadRequest(), seconds=0.05),
    )
    return probe(request, comm=SoloComm(), environment={}, options={}, progress=Progress())


@pytest.mark.parametrize("scheme", ["file", "mem"])
def test_files_are_counted_by_call_and_threads_and_removed(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_rates, "MOST_FILES", 500)
    result = _probe(f"file://{tmp_path}" if scheme == "file" else "mem://x", "metadata")
    assert [(seen.op, seen.threads) for seen in result.metadata] == [
        (call, threads) for threads in (1, 2) for call in metadata_rates.CALLS
    ]
    assert len({seen.files for seen in result.metadata if seen.threads == 1}) == 1
    assert all(seen.files_per_s > 0 and seen.p99_ms >= seen.p50_ms for seen in result.metadata)
    assert result.measurements == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("part", "figure"),
    [
        ("knee", "the knee is at "),
        ("metadata", "files a second: create "),
        ("best", "sequentially reads at "),
    ],
)
def test_each_part_alone_has_a_page_that_answers_first(part: Part, figure: str) -> None:
    page = make_probe_page(_probe("mem://x", part, load=LoadRequest(depth=2, read_percent=50)))
    assert page.banner.figure.startswith(figure)
    assert page.highlights or part == "metadata"
    text = render_report(page)
    assert ("Up to the knee: random 128 KiB operations (50 % reads)" in text) == (part == "knee")
    assert ("Accelerators that this storage feeds" in text) == (part != "metadata")
