"""Listings: equal for equal sets, bounded in memory, whole or an error that says so."""

import os
import pickle
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.dataset.file_listing import HEAD, MAGIC, RECORD, Listing, list_files
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
@given(sets, st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_listing_holds_what_was_listed_sorted_whatever_the_order_and_the_memory(
    path: Path, files: Files, run_entries: int, max_runs: int, shuffler: random.Random
) -> None:
    given_order = list(files.items())
    shuffler.shuffle(given_order)
    with list_files(infos(given_order), path, run_entries=run_entries, max_runs=max_runs) as listing:
        assert len(listing) == len(files)
        assert [listing.name(index) for index in range(len(listing))] == sorted_names(files)
        for name, size in files.items():
            index = listing.index(name)
            assert index is not None
            assert (listing.name(index), listing.size_bytes(index)) == (name, size)
        assert listing.index("no such name") is None
        listing.verify()
    content = path.read_bytes()
    list_files(infos(files.items()), path).close()
    assert path.read_bytes() == content


def test_two_listings_of_one_set_have_one_fingerprint_and_any_change_another(path: Path) -> None:
    files = some_files(100)
    changed = [
        files,
        dict(reversed(files.items())),
        {**files, "one more": 1},
        {**files, "train/0/file_00000.npz": 1},
        {name + "x": size for name, size in files.items()},
    ]
    prints = [list_files(infos(one.items()), path).fingerprint for one in changed]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_an_empty_set_is_a_listing_too(path: Path) -> None:
    listing = list_files(infos([]), path)
    assert len(listing) == 0
    assert listing.index("x") is None
    listing.verify()
    with pytest.raises(IndexError, match="file 0 of 0"):
        listing.name(0)


def test_a_storages_listing_goes_straight_in(path: Path) -> None:
    storage = MemoryStorage("listing")
    for name, size in some_files(20).items():
        sink = storage.create(name)
        sink.submit(memoryview(bytes(size)))
        sink.finish()
    listing = list_files(storage.list(), path)
    assert {listing.name(i): listing.size_bytes(i) for i in range(len(listing))} == some_files(20)


def test_only_the_listing_is_left_and_missing_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "listing"
    list_files(infos(some_files(50).items()), path, run_entries=7, max_runs=2)
    assert [found.name for found in path.parent.iterdir()] == ["listing"]


def test_a_name_that_comes_twice_is_an_error_and_the_older_listing_stays(path: Path) -> None:
    list_files(infos(some_files(10).items()), path)
    before = path.read_bytes()
    twice = [("a", 1), ("b", 2), ("c", 3), ("b", 2)]
    with pytest.raises(StorageError, match="'b' comes twice"):
        list_files(infos(twice), path, run_entries=2)
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_listing_that_breaks_off_leaves_nothing(path: Path) -> None:
    def broken() -> Iterator[ObjectInfo]:
        yield from infos(some_files(30).items())
        raise StorageError("503 from the service", uri="s3://bucket")

    with pytest.raises(StorageError, match="503"):
        list_files(broken(), path, run_entries=8)
    assert list(path.parent.iterdir()) == []


def test_cut_anywhere_it_is_refused_with_its_sizes(path: Path) -> None:
    list_files(infos(some_files(20).items()), path)
    whole = path.stat().st_size
    for size in (whole - 1, whole - 40, HEAD.size + 5, HEAD.size):
        os.truncate(path, size)
        with pytest.raises(ShortTransfer, match=f"20 files has {size} of {whole} bytes") as caught:
            Listing(path)
        assert (caught.value.expected_bytes, caught.value.actual_bytes) == (whole, size)
    for size in (HEAD.size - 1, 3, 0):
        os.truncate(path, size)
        with pytest.raises(StorageError, match="not a listing"):
            Listing(path)


def test_too_many_bytes_are_refused_too(path: Path) -> None:
    list_files(infos(some_files(3).items()), path)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ShortTransfer):
        Listing(path)


def test_any_flipped_byte_is_found_at_the_latest_by_verify_and_never_gives_a_wrong_name(path: Path) -> None:
    files = some_files(5)
    list_files(infos(files.items()), path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with pytest.raises(StorageError) as caught:
            _read_all(path, files)
        assert str(path) in str(caught.value)


def _read_all(path: Path, files: Files) -> None:
    with Listing(path) as listing:
        for index, name in enumerate(sorted_names(files)):
            assert (listing.name(index), listing.size_bytes(index)) == (name, files[name])
        listing.verify()


def test_a_listing_of_a_later_version_asks_for_the_penstock_that_wrote_it(path: Path) -> None:
    list_files(infos(some_files(3).items()), path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, len(MAGIC), 2)
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"version 2.*only version 1"):
        Listing(path)


def test_what_is_no_listing_says_so(path: Path) -> None:
    path.write_bytes(bytes(200))
    with pytest.raises(StorageError, match="not a listing"):
        Listing(path)
    with pytest.raises(ObjectNotFound):
        Listing(path.with_name("absent"))


def test_a_place_that_cannot_be_written_is_named(path: Path) -> None:
    with pytest.raises((AccessRefused, ObjectNotFound), match="/proc"):
        list_files(infos([]), Path("/proc/penstock/listing"))


def test_the_bytes_of_version_1_never_change(path: Path) -> None:
    list_files(infos([("b/2", 300), ("a", 7)]), path)
    unsigned = struct.pack("<8sIIQQ32x", b"penslist", 1, 0, 2, 4)
    first = struct.pack("<QQ", 1, 7)
    second = struct.pack("<QQ", 4, 300)
    records = [
        part + struct.pack("<I", zlib.crc32(struct.pack("<Q", number) + part + name))
        for number, (part, name) in enumerate([(first, b"a"), (second, b"b/2")])
    ]
    head = struct.pack("<8sIIQQ32x", b"penslist", 1, zlib.crc32(unsigned), 2, 4)
    content = path.read_bytes()
    assert content[:-16] == head + b"ab/2" + b"".join(records)
    identity = struct.pack("<QI", 7, 1) + b"a" + struct.pack("<QI", 300, 3) + b"b/2"
    assert content[-16:] == blake2b(identity, digest_size=16).digest()
    assert RECORD.size == 20


def test_threads_and_other_processes_read_one_file(path: Path) -> None:
    files = some_files(3000)
    listing = list_files(infos(files.items()), path)
    with ThreadPoolExecutor(4) as threads:
        found = dict(threads.map(lambda i: (listing.name(i), listing.size_bytes(i)), range(len(listing))))
    assert found == files
    copy = pickle.loads(pickle.dumps(listing))
    listing.close()
    listing.close()
    assert copy.name(2999) == sorted_names(files)[-1]


AT_SCALE = """
import sys
from pathlib import Path
from penstock.dataset.file_listing import list_files
from penstock.storage.protocol import ObjectInfo

count = 300_000
objects = (
    ObjectInfo(key=f"train/{n % 100:03}/sample_{n * 7919 % count:08}_of.npz", size_bytes=n, modified_s=0.0)
    for n in range(count)
)
listing = list_files(objects, Path(sys.argv[1]), run_entries=20_000, max_runs=8)
assert len(listing) == count
assert listing.name(0) < listing.name(count // 2) < listing.name(count - 1)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stdout.write(peak.split()[1])
"""


def test_hundreds_of_thousands_of_names_pass_through_little_memory(path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", AT_SCALE, str(path)], check=True, capture_output=True, text=True, timeout=120
    )
    assert path.stat().st_size > 14 << 20
    # VmHWM counts the pages of the mapped file that were touched: three names' worth here.
    assert int(said.stdout) < 80 << 10
