"""Pipelines on real files, buffered and with direct I/O: short transfers, full and failing disks."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.file_faults import CallFault, FailFileCall, ShortTransfers, faulty_calls

from penstock.bench.checkpoint.read_pipeline import read_objects
from penstock.dataset.content import Content
from penstock.errors import OutOfSpace, StorageError
from penstock.storage.files.file_storage import DirectOptions, FileOptions, FileStorage
from penstock.storage.uri import Location
from penstock.transfer.pipeline import PipelineSettings, PlannedObject, write_objects

CHUNK = 64 * 1024
SETTINGS = PipelineSettings(streams=2, chunk_bytes=CHUNK, buffer_memory_bytes=5 * CHUNK)
PLANNED = [PlannedObject("step/a.distcp", 7 * CHUNK + 4097), PlannedObject("step/b.distcp", 5 * CHUNK)]

ACCESSES: dict[str, FileOptions] = {"buffered": FileOptions(), "direct": DirectOptions(bounce_bytes=1 << 20)}


class Keyed:
    """Content by the object's key, made and verified."""

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        Content(1, planned.key).fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        return Content(1, planned.key).verify(buffer, offset)


def _storage(folder: Path, access: FileOptions, *faults: CallFault, in_flight: int = 1) -> FileStorage:
    options = replace(access, writes_in_flight=in_flight)
    return FileStorage(Location("file", str(folder), {}), options, calls=faulty_calls(*faults))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("access", ACCESSES)
def test_bytes_are_complete_despite_short_reads_and_writes(
    tmp_path: Path, access: str, in_flight: int
) -> None:
    storage = _storage(tmp_path, ACCESSES[access], ShortTransfers(5 * 4096), in_flight=in_flight)
    written = write_objects([storage], PLANNED, Keyed(), SETTINGS)
    assert written.ledger.durable_bytes == 12 * CHUNK + 4097
    assert written.counters.requests > written.latencies_ns.size
    seen = read_objects([storage], PLANNED, Keyed().verify, SETTINGS)
    assert seen.ledger.verified_bytes == 12 * CHUNK + 4097


def test_aligned_chunks_reach_the_device_without_a_copy(tmp_path: Path) -> None:
    storage = _storage(tmp_path, ACCESSES["direct"])
    planned = [PlannedObject("whole.distcp", 8 * CHUNK)]
    write_objects([storage], planned, Keyed(), SETTINGS)
    read_objects([storage], planned, Keyed().verify, SETTINGS)
    assert storage.counters.copied_bytes.total() == 0


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_disk_that_fills_up_is_named_and_nothing_partial_stays(tmp_path: Path, in_flight: int) -> None:
    full = FailFileCall.and_all_after("pwrite", 6, errno.ENOSPC)
    storage = _storage(tmp_path, ACCESSES["buffered"], full, in_flight=in_flight)
    with pytest.raises(OutOfSpace, match=r"step/[ab]\.distcp"):
        write_objects([storage], PLANNED, Keyed(), SETTINGS)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.stat().st_size in {each.size_bytes for each in PLANNED} for path in left)
    assert len(left) < len(PLANNED)


@pytest.mark.parametrize("call", ["fsync", "rename", "open", "fallocate"])
def test_a_failure_of_any_call_on_the_way_to_durability_fails_the_phase(tmp_path: Path, call: str) -> None:
    storage = _storage(tmp_path, ACCESSES["buffered"], FailFileCall(call, 1, errno.EIO))
    with pytest.raises(StorageError):
        write_objects([storage], PLANNED, Keyed(), SETTINGS)


def test_a_flipped_byte_on_disk_is_located(tmp_path: Path) -> None:
    storage = _storage(tmp_path, ACCESSES["buffered"])
    write_objects([storage], PLANNED, Keyed(), SETTINGS)
    with (tmp_path / "step/b.distcp").open("r+b") as file:
        file.seek(3 * CHUNK + 1)
        byte = file.read(1)
        file.seek(3 * CHUNK + 1)
        file.write(bytes([byte[0] ^ 0x80]))
    seen = read_objects([storage], PLANNED, Keyed().verify, SETTINGS)
    assert [(each.key, each.offset) for each in seen.wrong_bytes] == [("step/b.distcp", 3 * CHUNK + 1)]
