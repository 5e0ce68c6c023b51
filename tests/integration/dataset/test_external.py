"""Data sets that others made: found by listing, once a job, whatever their files are called."""

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.rank_threads import on_ranks

from penstock.cluster.comm import Comm, SoloComm
from penstock.dataset.external_dataset import ExternalFiles, list_external_files, list_in_parallel
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import ObjectInfo, open_storage
from penstock.storage.protocol import WrappedStorage
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 10)


def found(place: Path, dataset: Dataset, *, evaluates: bool = False) -> ExternalFiles:
    storage = open_storage(str(place), {})
    return list_external_files(dataset, storage, evaluates=evaluates, comm=SoloComm(), progress=Progress())


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_files_of_any_name_are_found_and_others_are_not(tmp_path: Path, scratch: Path) -> None:
    place = tmp_path / "data"
    put(place, "train/b.jpg", "train/deep/a.JPEG", "train/readme.txt", "valid/v.jpeg", "elsewhere.jpg")
    dataset = Dataset(format=DataFormat.JPEG, num_files_train=2, num_files_eval=1)
    seen = found(place, dataset, evaluates=True)
    assert [seen.train.name(index) for index in range(len(seen.train))] == [
        "train/b.jpg",
        "train/deep/a.JPEG",
    ]
    assert seen.evaluation is not None
    assert seen.evaluation.name(0) == "valid/v.jpeg"
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("folders", ["dlio", "own"])
def test_subfolders_are_found_by_dlios_names_and_by_any_other(tmp_path: Path, folders: str) -> None:
    place = tmp_path / "data"
    names = [f"{number:02}" if folders == "dlio" else f"class-{number}" for number in range(10)]
    put(place, *(f"train/{name}/img_{index}.npz" for name in names for index in range(3)))
    seen = found(place, Dataset(format=DataFormat.NPZ, num_files_train=30, num_subfolders_train=10))
    assert len(seen.train) == 30


def test_fewer_files_than_asked_for_are_an_error_that_says_how_many(tmp_path: Path, scratch: Path) -> None:
    put(tmp_path / "data", "train/a.npz", "train/b.npz")
    with pytest.raises(UsageError, match=r"2 files were found.* is 3.*num_files_train=2"):
        found(tmp_path / "data", Dataset(format=DataFormat.NPZ, num_files_train=3))
    assert not list(scratch.iterdir())


def test_no_files_at_all_say_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="training generate"):
        found(tmp_path, Dataset(format=DataFormat.NPZ, num_files_train=3))


def test_a_root_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="root folder failed: No such file or directory"):
        found(tmp_path / "missing", Dataset(format=DataFormat.NPZ, num_files_train=3))


def test_one_rank_lists_and_hands_on_to_each_node(tmp_path: Path) -> None:
    put(tmp_path, *(f"train/{number:03}.npz" for number in range(300)))
    dataset = Dataset(format=DataFormat.NPZ, num_files_train=300)
    listings: list[str] = []

    class Watched(WrappedStorage):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            listings.append(prefix)
            return super().list(prefix)

    def on_rank(comm: Comm) -> list[str]:
        storage = Watched(open_storage(str(tmp_path), {}))
        seen = list_external_files(dataset, storage, evaluates=False, comm=comm, progress=Progress())
        return [seen.train.name(number) for number in range(300)]

    ranks = on_ranks(3, on_rank, hosts=["a", "a", "b"])
    assert ranks[0] == ranks[1] == ranks[2] == [f"train/{number:03}.npz" for number in range(300)]
    assert listings == ["train"]


def info(key: str) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, modified_s=0.0)


def test_folders_are_listed_at_once_in_bounded_memory() -> None:
    barrier = threading.Barrier(3, timeout=30)

    def files(folder: str) -> Iterator[ObjectInfo]:
        barrier.wait()
        return (info(f"{folder}/{index}") for index in range(5000))

    seen = [one.key for one in list_in_parallel(files, ["a", "b", "c"], threads=3)]
    assert len(set(seen)) == len(seen) == 15_000


def test_a_folder_that_cannot_be_listed_ends_the_listing_of_all() -> None:
    def files(folder: str) -> Iterator[ObjectInfo]:
        if folder == "b":
            raise StorageError("No such right", uri="b")
        return (info(f"{folder}/{index}") for index in range(100_000))

    with pytest.raises(StorageError, match="No such right"):
        list(list_in_parallel(files, list("abcdef"), threads=2))


def test_whoever_stops_listening_leaves_no_thread_behind() -> None:
    stream = list_in_parallel(
        lambda folder: (info(f"{folder}/{n}") for n in range(10**6)), list("abc"), threads=3
    )
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(stream.close).result(timeout=60)  # type: ignore[attr-defined]  # a generator
    assert not [one for one in threading.enumerate() if one.name.startswith("penstock-list")]
