"""Page cache residency by two system calls, before and after eviction."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.errors import ObjectNotFound, Unavailable
from penstock.storage.files.file_storage import open_local
from penstock.storage.residency import (
    COUNTERS,
    Method,
    PageCounter,
    Residency,
    count_by_cachestat,
    count_by_mincore,
    evict_file,
    evict_files,
    measure_residency,
)
from penstock.testing.storage_contract import arbitrary_bytes

SIZE = 2 * 2**20 + 123


def residency_of(path: Path, counters: Mapping[Method, PageCounter]) -> Residency:
    with closing(open_local(path.parent).open(path.name)) as file:
        return measure_residency(file, counters)


def has_cachestat(path: Path) -> bool:
    try:
        return residency_of(path, {"cachestat": count_by_cachestat}).method == "cachestat"
    except Unavailable:
        return False


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A file that has just been written through the page cache."""
    path = tmp_path / "cached"
    path.write_bytes(arbitrary_bytes(SIZE))
    return path


@pytest.fixture(params=["cachestat", "mincore"])
def method(request: pytest.FixtureRequest, cached: Path) -> Method:
    chosen: Method = request.param
    if chosen == "cachestat" and not has_cachestat(cached):
        pytest.skip("this kernel has no cachestat (Linux 6.5 or later)")
    return chosen


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A file on tmpfs, whose pages have nowhere else to be."""
    path = Path("/dev/shm") / f"penstock-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(65536))
    except OSError as error:
        pytest.skip(f"/dev/shm cannot be written: {error}")
    yield path
    path.unlink()


def test_a_file_just_written_is_resident_to_the_byte(cached: Path, method: Method) -> None:
    found = residency_of(cached, {method: COUNTERS[method]})
    assert found == Residency(resident_bytes=SIZE, total_bytes=SIZE, method=method)
    assert found.fraction == 1.0


def test_dropped_is_dropped_by_either_method(cached: Path, method: Method) -> None:
    drop = evict_file(str(cached))
    assert drop.before.fraction == 1.0
    assert drop.after.resident_bytes == 0
    assert residency_of(cached, {method: COUNTERS[method]}).fraction == 0.0
    assert cached.read_bytes() == arbitrary_bytes(SIZE)


def test_a_file_read_in_part_is_resident_in_part_and_both_methods_agree(cached: Path) -> None:
    evict_file(str(cached))
    descriptor = os.open(cached, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    for page in (0, 7, 100):
        os.pread(descriptor, 10, page * 4096)
    os.close(descriptor)
    by_mincore = residency_of(cached, {"mincore": count_by_mincore})
    assert 0 < by_mincore.fraction < 0.5
    if has_cachestat(cached):
        by_cachestat = residency_of(cached, {"cachestat": count_by_cachestat})
        assert by_cachestat.resident_bytes == by_mincore.resident_bytes


def test_many_files_are_dropped_and_counted_also_by_threads_that_wait(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" for number in range(600)]
    for path in paths:
        path.write_bytes(bytes(5000))
    done: list[int] = []
    drop = evict_files(map(str, paths), done.append)
    assert (drop.before.resident_bytes, drop.after.resident_bytes) == (600 * 5000, 0)
    assert drop.after.total_bytes == 600 * 5000
    assert sum(done) == 600
    with pytest.raises(ObjectNotFound, match="absent"):
        evict_files([*map(str, paths), str(tmp_path / "absent")])


def test_a_clean_file_is_not_synced(cached: Path) -> None:
    if not has_cachestat(cached):
        pytest.skip("this kernel has no cachestat (Linux 6.5 or later)")
    descriptor = os.open(cached, os.O_RDONLY)
    os.fsync(descriptor)
    assert count_by_cachestat(descriptor, SIZE) == (-(-SIZE // 4096), 0)
    os.close(descriptor)
    descriptor = os.open(cached, os.O_RDWR)
    # The kernel may write it back before it is counted.
    seen = []
    for _ in range(9):
        os.pwrite(descriptor, bytes(SIZE), 0)
        seen.append(count_by_cachestat(descriptor, SIZE)[1])
    assert any(seen)
    os.close(descriptor)


def test_memory_file_systems_cannot_be_dropped_and_are_reported_so(in_memory: Path) -> None:
    drop = evict_file(str(in_memory))
    assert (drop.before.fraction, drop.after.fraction) == (1.0, 1.0)
    assert residency_of(in_memory, {"mincore": count_by_mincore}).fraction == 1.0


def test_an_empty_file_has_nothing_resident(tmp_path: Path, method: Method) -> None:
    (tmp_path / "empty").touch()
    found = residency_of(tmp_path / "empty", {method: COUNTERS[method]})
    assert (found.resident_bytes, found.total_bytes, found.fraction) == (0, 0, 0.0)


def test_without_cachestat_mincore_is_used(cached: Path) -> None:
    def not_here(_descriptor: int, _size_bytes: int) -> NoReturn:
        raise OSError(errno.ENOSYS, "Function not implemented")

    found = residency_of(cached, {"cachestat": not_here, "mincore": count_by_mincore})
    assert (found.method, found.fraction) == ("mincore", 1.0)
    with pytest.raises(Unavailable, match="does not report") as caught:
        residency_of(cached, {"cachestat": not_here, "mincore": not_here})
    assert "cachestat, mincore" in str(caught.value)


def test_a_question_that_fails_is_an_error_and_not_a_figure(cached: Path) -> None:
    def broken(_descriptor: int, _size_bytes: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        residency_of(cached, {"cachestat": broken, "mincore": count_by_mincore})


def test_either_question_about_no_file_fails_with_the_systems_number() -> None:
    never_opened = 2**20
    for count in (count_by_cachestat, count_by_mincore):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            count(never_opened, 4096)
        assert caught.value.errno == errno.EBADF


def test_an_absent_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="absent"):
        evict_file(str(tmp_path / "absent"))
