"""The probe on real storage: what it reports, and that it leaves nothing behind, whatever happens."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.probe import ProbeRequest, ProbeResult, probe, probe_in_folder, probe_run
from penstock.bench.probe.load_plan import LoadInterval
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.probe_run import notes_on_rates
from penstock.bench.probe.timed_streams import ProbeStep
from penstock.bench.recorded_run import RunSettings
from penstock.cluster.comm import SoloComm
from penstock.errors import OutOfSpace, StorageError, UsageError
from penstock.progress import Progress
from penstock.results.run_record import read_record
from penstock.storage import Sink, Storage
from penstock.storage.uri import parse_uri
from penstock.testing.faults import FailAtCall

SMALL = ProbeRequest(uri="mem://x", size_bytes=4 << 20, streams=(1, 3), block_bytes=(64 << 10, 1 << 20))


def _probe(request: ProbeRequest, **options: str) -> ProbeResult:
    return probe(request, comm=SoloComm(), environment=dict(os.environ), options=options, progress=Progress())


@pytest.mark.parametrize("scheme", ["file", "direct"])
def test_every_kind_of_measurement_comes_out_and_nothing_stays_on_disk(tmp_path: Path, scheme: str) -> None:
    result = _probe(replace(SMALL, uri=f"{scheme}://{tmp_path}"))
    operations = {seen.op for seen in result.measurements}
    assert operations == {"write", "read", "random_read", "small_write", "small_read", "fsync"}
    assert list(tmp_path.iterdir()) == []


def test_a_probe_in_a_folder_keeps_its_result_there_or_why_there_is_none(tmp_path: Path) -> None:
    def run(name: str, request: ProbeRequest) -> ProbeResult:
        settings = RunSettings(results=tmp_path, run_folder=tmp_path / name, environment=dict(os.environ))
        return probe_in_folder(settings, request, comm=SoloComm(), options={}, progress=Progress())

    kept = run("good", SMALL)
    assert json.loads((tmp_path / "good" / "probe.json").read_text()) == json.loads(json.dumps(asdict(kept)))
    assert read_record(tmp_path / "good").outcome == "finished"
    with pytest.raises(OutOfSpace):
        run("bad", replace(SMALL, uri=f"file://{tmp_path}/data", size_bytes=1 << 60))
    failed = read_record(tmp_path / "bad")
    assert (failed.outcome, failed.plan["size_bytes"]) == ("failed", 1 << 60)
    assert failed.why.startswith("Each measurement of this probe takes 1 EiB, but only ")


LOCK = """
import sys
from pathlib import Path
from penstock.storage.volumes import locked_folder
with locked_folder(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_takes_for_its_run_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    settings = RunSettings(results=tmp_path, run_folder=folder, environment=dict(os.environ))
    words = [sys.executable, "-c", LOCK, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UsageError, match=f"{other.pid}.* is using this folder"):
            probe_in_folder(settings, SMALL, comm=SoloComm(), options={}, progress=Progress())
        assert list(folder.iterdir()) == []
        other.communicate()


def test_numbers_hang_together(tmp_path: Path) -> None:
    for seen in _probe(replace(SMALL, uri=f"file://{tmp_path}")).measurements:
        assert seen.moved_bytes / seen.elapsed_s / 2**30 == pytest.approx(seen.gib_per_s)
        assert seen.moved_bytes / seen.block_bytes / seen.elapsed_s == pytest.approx(seen.operations_per_s)
        assert 0 < seen.p50_ms <= seen.p99_ms <= seen.max_ms
        assert 0 <= seen.drain_s <= seen.elapsed_s
        assert (seen.create_s > 0) == (seen.op == "write")
        lengths = np.diff([*(one.start_s for one in seen.intervals), seen.elapsed_s])
        ended = lengths @ [one.operations_per_s for one in seen.intervals]
        assert ended * seen.block_bytes == pytest.approx(seen.moved_bytes)
        assert seen.copied_bytes == 0


def test_slow_creation_and_a_first_phase_are_noted() -> None:
    measured = _probe(replace(SMALL, streams=(1,), block_bytes=(1 << 20,))).measurements
    (write,) = (seen for seen in measured if seen.op == "write")
    rates = [2048] * 20 + [512] * 30
    series = tuple(
        LoadInterval(start_s=at / 10, operations_per_s=rate, p50_ms=1, p99_ms=1)
        for at, rate in enumerate([*rates, 0, 0])
    )
    slow = replace(write, elapsed_s=5.2, drain_s=0.2, create_s=1.5, intervals=series)
    created, phases = notes_on_rates([slow])
    assert created.startswith("memory write, 1 x 1 MiB: creating files and reserving their space took 1.50 s")
    assert phases == "memory write, 1 x 1 MiB: the first 2 s were another phase: 2 GiB/s, then 512 MiB/s."
    steady = replace(write, elapsed_s=5.0, drain_s=0.0, create_s=0.1, intervals=series[20:50])
    assert list(notes_on_rates([steady])) == []


def test_a_storage_that_cannot_create_is_the_error_and_not_the_streams_that_wait_for_it(
    tmp_path: Path,
) -> None:
    step = ProbeStep(op="write", mode="buffered", streams=3, block_bytes=64 << 10, blocks_per_stream=2)

    def run() -> None:
        with _place(tmp_path) as place:
            place.storage = FailAtCall(place.storage, "create", 2)
            probe_run.measure(step, place, comm=SoloComm(), progress=Progress())

    with pytest.raises(StorageError, match="Injected fault in create"):
        run()
    assert list(tmp_path.iterdir()) == []


def test_a_plain_path_gives_both_modes_and_makes_and_removes_its_folders(tmp_path: Path) -> None:
    result = _probe(replace(SMALL, uri=str(tmp_path / "not" / "there")))
    assert set(result.storage) == {seen.mode for seen in result.measurements} == {"buffered", "direct"}
    assert list(tmp_path.iterdir()) == []


def test_a_buffered_read_says_how_much_of_it_memory_held(tmp_path: Path) -> None:
    reads = [
        seen for seen in _probe(replace(SMALL, uri=f"file://{tmp_path}")).measurements if "read" in seen.op
    ]
    assert all(seen.resident_before is not None and seen.resident_before <= 1 for seen in reads)
    assert min(seen.resident_before or 0 for seen in reads) < 0.1


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a folder in memory")
def test_a_file_system_in_memory_is_named_as_such() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert any("memory" in note for note in _probe(replace(SMALL, uri=f"file://{folder}")).notes)


def test_calls_on_files_need_no_room_for_a_size(tmp_path: Path) -> None:
    request = replace(SMALL, uri=f"file://{tmp_path}", size_bytes=1 << 60, parts=("metadata",), streams=(1,))
    assert [rate.op for rate in _probe(request).metadata] == ["create", "stat", "list", "delete"]


def test_blocks_that_are_more_than_the_size_are_noted() -> None:
    result = _probe(replace(SMALL, size_bytes=1))
    assert "memory: each stream moves at least one block" in result.notes[0]
    assert "more than --size" in result.notes[0]


def test_slow_storage_shrinks_the_measurements_and_says_so() -> None:
    result = _probe(replace(SMALL, size_bytes=1 << 40, max_seconds=0.001))
    assert "would take about" in result.notes[0]
    assert max(seen.moved_bytes for seen in result.measurements) < 1 << 33


def test_a_probe_that_does_not_fit_fails_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace, match="takes 1 EiB"):
        _probe(replace(SMALL, uri=f"file://{tmp_path}", size_bytes=1 << 60))
    # A stream moves a whole block, whatever the size.
    with pytest.raises(OutOfSpace, match="takes 3 EiB"):
        _probe(replace(SMALL, uri=f"file://{tmp_path}", size_bytes=10, block_bytes=(1 << 60,)))
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_that_no_probe_knows_is_wrong_usage() -> None:
    with pytest.raises(UsageError):
        _probe(replace(SMALL, uri="ftp://host/x"))


def test_unknown_storage_options_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fsync"):
        _probe(replace(SMALL, uri=f"file://{tmp_path}"), fsink="false")


def test_what_the_storage_counted_is_part_of_the_result(tmp_path: Path) -> None:
    result = _probe(replace(SMALL, uri=f"direct://{tmp_path}"))
    counted = result.counters["direct"]
    written = sum(seen.moved_bytes for seen in result.measurements if "write" in seen.op)
    assert isinstance(counted["written_bytes"], int)
    assert counted["written_bytes"] > written
    assert (counted["retries"], counted["errors"], counted["copied_bytes"]) == (0, 0, {})
    assert result.notes == ()


class _Breaking:
    """A storage whose second stream's sink fails at its third buffer; everything else is the inner one's."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        sink = self._inner.create(key, size_bytes)
        return _BreakingSink(sink) if key.endswith("stream1") else sink


class _BreakingSink:
    def __init__(self, inner: Sink) -> None:
        self._inner = inner
        self._left = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, buffer: memoryview, release: Any = None) -> None:
        if self._left == 0:
            raise StorageError("The cable is out", uri="file:///broken")
        self._left -= 1
        self._inner.submit(buffer, release)


def _place(tmp_path: Path, folder: str = "penstock-probe-test") -> ProbeFolder:
    location = parse_uri(f"file://{tmp_path}")
    return ProbeFolder(location, folder, comm=SoloComm(), environment={}, options={})


def test_a_stream_that_fails_ends_all_of_them_with_its_own_error_and_nothing_stays(tmp_path: Path) -> None:
    step = ProbeStep(op="write", mode="buffered", streams=3, block_bytes=64 << 10, blocks_per_stream=2000)

    def run() -> None:
        with _place(tmp_path) as place:
            place.storage = _Breaking(place.storage)
            probe_run.measure(step, place, comm=SoloComm(), progress=Progress())

    of_others = set(threading.enumerate())
    with pytest.raises(StorageError, match="The cable is out"):
        run()
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= of_others


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody with fewer rights")
def test_a_folder_that_may_not_be_entered_is_refused_access_and_no_defect(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    program = (
        "import os, sys\nfrom penstock.cli import main\n"
        "main(['storage', 'probe', 'mem://warm-up', '--size', '1MiB', '--json'])\n"  # imports everything
        f"os.seteuid(65534)\nsys.exit(main(['storage', 'probe', {str(locked / 'in')!r}]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1, result.stderr
    assert "Permission denied" in result.stderr
    assert "defect" not in result.stderr


def test_a_failed_removal_is_told_and_does_not_hide_the_failure(caplog: pytest.LogCaptureFixture) -> None:
    environment = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
    }
    request = replace(SMALL, uri="s3://bucket/x")
    options = {"attempts": "1", "client": "minio"}
    with pytest.raises(StorageError) as caught:
        probe(request, comm=SoloComm(), environment=environment, options=options, progress=Progress())
    assert "ListObjects" not in str(caught.value)
    assert "may still be at s3://bucket/x" in caplog.text


def test_folders_that_were_there_before_stay(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter").write_text("dear", encoding="utf-8")
    _probe(replace(SMALL, uri=f"file://{mine}"))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "letter"]
