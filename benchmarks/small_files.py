"""Many small files: what they cost beside the leanest loops that make the same system calls.

Files of 100 KB on the disk of this folder: generated and synced, read cold, and dropped from the page cache.
All figures are files a second of CPU time of this process, user and system; a ratio is ours over theirs, so
that 1 is the cost of the system calls alone. Generation is compared with the calls in our order, and with
those of files that are synced one by one. Deleting files makes creating others dearer on ext4 for the next
five minutes, so nothing is deleted before the end.
"""

import ctypes
import fcntl
import os
import secrets
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path

from harness import Ratio, compare, evict_all, interleave, take_turns
from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.native_loader import NativeLoader, NativeOptions
from penstock.bench.recorded_run import EventsInMemory
from penstock.bench.training.training_loop import TrainingLoop, make_phase_works
from penstock.bench.training.training_run import prepare_training
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE, Content
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.progress import Progress
from penstock.results.step_events import StepPhase
from penstock.storage import Storage, open_storage, residency
from penstock.storage.files.local_files import sync_folder
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

NUM_FILES = 20_000
GROUP = 64
WARM = 0.9
WORKLOAD = Workload(
    name="small-files",
    dataset=Dataset(
        format=DataFormat.NPZ,
        num_files_train=NUM_FILES,
        record_length_bytes=Fraction(100_000),
        listing_validation_interval=0,
    ),
    reader=ReaderSection(batch_size=25),
    train=Train(computation_time=Duration()),
)
BESIDE_US = Path(__file__).parent.parent
"""On a disk, where /tmp may be memory: set PENSTOCK_BENCH_FOLDER for another one."""


def measure(repetitions: int) -> list[Ratio]:
    """Generation and cold reading beside bare loops; the drop is printed beside one."""
    Content(1, 0)  # so that no side pays for loading the generator
    where = os.environ.get("PENSTOCK_BENCH_FOLDER", str(BESIDE_US))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=where) as folder:
        _spread_folders(folder)
        places = (Path(folder, str(number)) for number in count())
        sides: dict[str, Callable[[Path], None]] = {
            "ours": _generate,
            "together": _write_together,
            "in turn": _write_in_turn,
        }
        figures = take_turns(
            [partial(_generation_figure, name, work, places) for name, work in sides.items()],
            repetitions=repetitions,
        )
        name = "files generated a CPU second"
        ratios = [
            compare(figures, name, ("ours", "together"), ""),
            compare(figures, f"{name}, beside one by one", ("ours", "in turn"), ""),
        ]
        made = next(places)
        _generate(made)
        storage = open_storage(str(made), {})
        paths = sorted(str(path) for path in made.glob("train/*.npz"))
        ratios += interleave(
            lambda: _figure("cold files read a CPU second", lambda: _read(storage), before=storage),
            lambda: _figure("cold files read a CPU second", lambda: _read_bare(paths), before=storage),
            repetitions=repetitions,
            unit="",
        )
        for drop in (_drop, _drop_bare, _drop):
            _read_bare(paths)
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            print(
                f"  {drop(paths)}: {NUM_FILES:,} clean files dropped in {time.monotonic() - began_s:.2f} s, "
                f"{time.process_time() - began_cpu_s:.2f} CPU s"
            )
    return ratios


def _drop(paths: list[str]) -> str:
    dropped = residency.evict_files(paths)
    assert dropped.before.fraction > WARM > 1 - WARM > dropped.after.fraction
    return "ours"


def _drop_bare(paths: list[str]) -> str:
    """The calls alone: cachestat has memory of its own, and no count is looked at."""
    syscall, wanted, found = ctypes.CDLL(None).syscall, (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    places = ctypes.byref(wanted), ctypes.byref(found)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fstat(descriptor)
        syscall(residency.CACHESTAT, descriptor, *places, 0)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        syscall(residency.CACHESTAT, descriptor, *places, 0)
        os.close(descriptor)
    return "bare"


def _spread_folders(folder: str) -> None:
    """Let ext4 put each folder in a part of the disk of its own, as those of the top level.

    It does not use the inodes of files that were deleted less than five minutes ago, and looks at each of
    them for every new file: up to three times the CPU time of creating it.
    """
    get, change, top_of_hierarchy = 0x80086601, 0x40086602, 0x00020000
    flags, descriptor = array("l", [0]), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.ioctl(descriptor, get, flags)
        flags[0] |= top_of_hierarchy
        fcntl.ioctl(descriptor, change, flags)
    os.close(descriptor)


def _generation_figure(name: str, work: Callable[[Path], None], places: Iterator[Path]) -> dict[str, float]:
    """Files a CPU second in a fresh folder, which keeps its emptied files, with nothing else to write."""
    folder = next(places)
    os.sync()
    figure = _figure(name, lambda: work(folder))
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    return dict(figure)


def _figure(name: str, work: Callable[[], None], *, before: Storage | None = None) -> Mapping[str, float]:
    if before is not None:
        evict_all(before)
    began_s = time.process_time()
    work()
    return {name: NUM_FILES / (time.process_time() - began_s)}


def _generate(folder: Path) -> None:
    recipe = DatasetRecipe(dataset=WORKLOAD.dataset, seed=1, reduction=IRREDUCIBLE)
    generate(recipe, open_storage(str(folder), {}), comm=SoloComm(), threads=2, progress=Progress())


CONTENT = os.urandom(100_490)


def _write_together(folder: Path) -> None:
    """The calls of durable small files, in the order in which ours are made."""
    calls, nothing, writing, written = ctypes.CDLL(None), ctypes.c_int64(0), 2, 4
    folder.mkdir()
    for start in range(0, NUM_FILES, GROUP):
        group = []
        for number in range(start, min(start + GROUP, NUM_FILES)):
            descriptor, hidden = _begin_bare(folder, calls)
            calls.sync_file_range(descriptor, nothing, nothing, writing)
            group.append((descriptor, hidden, f"{folder}/{number}"))
        for descriptor, _, _ in group:
            calls.sync_file_range(descriptor, nothing, nothing, written)
        for descriptor, _, _ in group:
            os.fsync(descriptor)
            os.close(descriptor)
        for _, hidden, name in group:
            os.rename(hidden, name)  # noqa: PTH104 - the leanest way
    sync_folder(folder)


def _write_in_turn(folder: Path) -> None:
    """The same, but each file is synced before the next one is begun."""
    calls = ctypes.CDLL(None)
    folder.mkdir()
    for number in range(NUM_FILES):
        descriptor, hidden = _begin_bare(folder, calls)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(hidden, f"{folder}/{number}")  # noqa: PTH104 - the leanest way
    sync_folder(folder)


def _begin_bare(folder: Path, calls: ctypes.CDLL) -> tuple[int, str]:
    hidden = f"{folder}/.{secrets.token_hex(8)}"
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    calls.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(len(CONTENT)))
    os.pwrite(descriptor, CONTENT, 0)
    return descriptor, hidden


def _read(storage: Storage) -> None:
    prepared = prepare_training(
        replace(WORKLOAD), storage, seed=1, division=Remainder.ROTATE, comm=SoloComm(), progress=Progress()
    )
    work = make_phase_works(WORKLOAD, prepared, storage, rank=0)[StepPhase.TRAIN]
    with closing(NativeLoader(storage, NativeOptions(threads=4))) as loader:
        loop = TrainingLoop(
            comm=SoloComm(), loader=loader, recorder=EventsInMemory(), progress=Progress(), planned_ahead=4
        )
        loop.run(work, 1, prepared.plan.epochs[0].num_steps)


def _read_bare(paths: list[str]) -> None:
    buffer = memoryview(bytearray(1 << 20))
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        os.preadv(descriptor, [buffer[: os.fstat(descriptor).st_size]], 0)
        os.close(descriptor)
