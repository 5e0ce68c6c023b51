"""Listings: equal for equal sets, whole or an error that says so."""

import os
import pickle
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.dataset.file_listing import Listing, list_files
from penstock.errors import AccessRefused, ObjectNotFound, ShortTransfer, StorageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import ObjectInfo

Files = dict[str, int]

FOREIGN = b"img_\xff\xfe.npz".decode("utf-8", "surrogateescape")
names = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), st.just(FOREIGN)
)
sets = st.dictionaries(names, st.integers(0, 2**63), max_size=40)


def infos(files: Iterable[tuple[str, int]]) -> Iterator[ObjectInfo]:
    return (ObjectInfo(key=name, size_bytes=size, modified_s=0.0) for name, size in files)


def some_files(count: int) -> Files:
    return {f"train/{number % 7}/file_{number:05}.npz": number * 1000 for number in range(count)}


def sorted_names(files: Files) -> list[str]:
    return sorted(files, key=lambda name: name.encode("utf-8", "surrogateescape"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "files.listing"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)  # real files, fsync
@given(sets, st.randoms(use_true_random=False))
def test_a_listing_holds_what_was_listed_sorted_whatever_the_order(
    path: Path, files: Files, shuffler: random.Random
) -> None:
    given_order = list(files.items())
    shuffler.shuffle(given_order)
    listing = list_files(infos(given_order), path)
    with closing(listing):
        assert len(listing) == len(files)
        assert [listing.name(index) for index in range(len(listing))] == sorted_names(files)
    content = path.read_bytes()
    list_files(infos(files.items()), path).close()
    assert path.read_bytes() == content


def test_an_empty_set_is_a_listing_too(path: Path) -> None:
    listing = list_files(infos([]), path)
    assert len(listing) == 0
    with pytest.raises(IndexError, match="file 0 of 0"):
        listing.name(0)


def test_a_storages_listing_goes_straight_in(path: Path) -> None:
    storage = MemoryStorage("listing")
    for name, size in some_files(20).items():
        sink = storage.create(name)
        sink.submit(memoryview(bytes(size)))
        sink.finish()
    listing = list_files(storage.list(), path)
    assert [listing.name(i) for i in range(len(listing))] == sorted_names(some_files(20))


def test_only_the_listing_is_left(path: Path) -> None:
    list_files(infos(some_files(50).items()), path)
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_name_that_comes_twice_is_an_error_and_the_older_listing_stays(path: Path) -> None:
    list_files(infos(some_files(10).items()), path)
    before = path.read_bytes()
    twice = [("a", 1), ("b", 2), ("c", 3), ("b", 2)]
    with pytest.raises(StorageError, match="'b' comes twice"):
        list_files(infos(twice), path)
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_listing_that_breaks_off_leaves_nothing(path: Path) -> None:
    def broken() -> Iterator[ObjectInfo]:
        yield from infos(some_files(30).items())
        raise StorageError("503 from the service", uri="s3://bucket")

    with pytest.raises(StorageError, match="503"):
        list_files(broken(), path)
    assert list(path.parent.iterdir()) == []


def test_cut_anywhere_it_is_refused(path: Path) -> None:
    list_files(infos(some_files(20).items()), path)
    whole = path.stat().st_size
    for size in range(whole - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(ShortTransfer, match=f"has {size} of ") as caught:
            Listing(path)
        assert caught.value.actual_bytes == size


def test_too_many_bytes_are_refused_too(path: Path) -> None:
    list_files(infos(some_files(3).items()), path)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ShortTransfer):
        Listing(path)


def test_what_is_no_listing_says_so(path: Path) -> None:
    path.write_bytes(bytes(200))
    with pytest.raises(ShortTransfer):
        Listing(path)
    with pytest.raises(ObjectNotFound):
        Listing(path.with_name("absent"))


def test_a_place_that_cannot_be_written_is_named(path: Path) -> None:
    with pytest.raises((AccessRefused, ObjectNotFound), match="/proc"):
        list_files(infos([]), Path("/proc/penstock/listing"))


def test_threads_and_other_processes_read_one_file(path: Path) -> None:
    files = some_files(3000)
    listing = list_files(infos(files.items()), path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(listing.name, range(len(listing))))
    assert found == sorted_names(files)
    copy = pickle.loads(pickle.dumps(listing))
    listing.close()
    listing.close()
    assert copy.name(2999) == sorted_names(files)[-1]
