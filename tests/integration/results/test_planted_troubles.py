"""Real runs with planted trouble: their pages name it, and say when it began.

`tests/unit/results` has the same troubles in runs that are told, not run.
"""

import ctypes
import mmap
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
from tests.support.page_checks import read_banner
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.progress import Progress
from penstock.storage import open_storage
from penstock.testing.faults import Gate, Gated, Verb
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, Metric, ReaderSection, Train, Workload

RANKS = 3
STEPS = 24
WORKLOAD = Workload(
    name="small",
    dataset=Dataset(
        format=DataFormat.NPZ, num_files_train=2 * RANKS * STEPS, record_length_bytes=Fraction(64 << 10)
    ),
    reader=ReaderSection(batch_size=2),
    train=Train(epochs=2, computation_time=Duration(mean_s=0.03)),
    metric=Metric(au=0.7),
)

Plant = Callable[[int], Gate]
"""What stands before the storage of a rank."""


def nothing(_rank: int) -> Gate:
    return lambda _verb, _size_bytes: None


def slow_rank(rank: int) -> Gate:
    return delay(0.1 if rank == 2 else 0.0)


def few_workers(_rank: int) -> Gate:
    return delay(0.04)


def delay(seconds: float) -> Gate:
    def wait(verb: Verb, _size_bytes: int) -> None:
        if verb == "read_into" and seconds:
            time.sleep(seconds)

    return wait


def slow_second_half() -> Plant:
    """Half of all reads are fast, then each takes longer."""
    lock, left = threading.Lock(), [2 * RANKS * STEPS]

    def wait(verb: Verb, _size_bytes: int) -> None:
        if verb != "read_into":
            return
        with lock:
            left[0] -= 1
        if left[0] < 0:
            time.sleep(0.15)

    return lambda _rank: wait


@contextmanager
def locked_in_memory(folder: Path) -> Iterator[None]:
    """Keep all files in the page cache, whoever wants to drop them."""
    library = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as files:
        for path in (path for path in folder.rglob("*") if path.stat().st_size and path.is_file()):
            file = files.enter_context(path.open("r+b"))
            pages = files.enter_context(mmap.mmap(file.fileno(), 0))
            start = ctypes.c_char.from_buffer(pages)
            address, size = ctypes.addressof(start), len(pages)
            del start
            if library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
                pytest.skip("this machine lets nobody lock so much memory")
        yield


def run(place: Path, plant: Plant, *, threads: int = 4) -> dict[str, str]:
    """What the page of a run says first, in which each rank reads through its gate."""

    def program(comm: ThreadComm) -> str:
        request = TrainingRequest(
            workload=WORKLOAD, results=place / "runs", seed=1, loader=NativeOptions(threads=threads)
        )
        storage = Gated(open_storage(str(place / "data"), {}), plant(comm.rank))
        return train(request, storage, comm=comm, progress=Progress()).results_dir

    results = on_ranks(RANKS, program, hosts=["node"] * RANKS, timeout_s=120)
    return read_banner(Path(results[0]) / "report.html")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    recipe = DatasetRecipe(dataset=WORKLOAD.dataset, seed=3, reduction=IRREDUCIBLE)
    generate(
        recipe, open_storage(str(tmp_path / "data"), {}), comm=SoloComm(), threads=2, progress=Progress()
    )
    return tmp_path


@pytest.mark.slow
def test_a_slow_rank_is_named(place: Path) -> None:
    said = run(place, slow_rank)
    assert said["Passed?"] == "failed"
    assert "Rank 2 on node waits for samples" in said["Troubles"]
    assert "rank 2's path to storage" in said["To do"]


@pytest.mark.slow
def test_storage_that_becomes_slower_is_named_with_its_moment(place: Path) -> None:
    said = run(place, slow_second_half())
    assert said["Passed?"] == "failed"
    assert " a step waits " in said["Troubles"]
    # What is read ahead is read before the step that waits for it.
    epoch, step = re.findall(r"after the first step: epoch (\d), step (\d+)", said["Since"])[0]
    assert abs(STEPS * (int(epoch) - 2) + int(step)) < STEPS / 3


@pytest.mark.slow
def test_too_few_readers_are_named(place: Path) -> None:
    said = run(place, few_workers, threads=1)
    assert said["Passed?"] == "failed"
    assert "The only reader of each rank was busy" in said["Troubles"]
    assert "Raise reader.read_threads (1 now)" in said["To do"]


@pytest.mark.slow
def test_a_warm_page_cache_makes_the_result_doubtful(place: Path) -> None:
    with locked_in_memory(place / "data"):
        said = run(place, nothing)
    assert said["Passed?"] == "doubtful"
    assert "page cache" in said["Troubles"]
    assert "Read past the page cache" in said["To do"]
