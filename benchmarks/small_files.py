"""Many small files: what they cost beside the leanest loops that make the same system calls.

Files of 100 KB on the disk of this folder: generated and synced, read cold in three epochs, and dropped from
the page cache. All figures are CPU time of this process, user and system, a file; a ratio is theirs over
ours, so that 1 is the cost of the system calls alone.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from harness import Ratio, interleave
from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.native_loader import NativeLoader, NativeOptions
from penstock.bench.training.harness_limit import EventsInMemory
from penstock.bench.training.training_loop import TrainingLoop, make_phase_works
from penstock.bench.training.training_run import prepare_training
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE, Content
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.progress import Silent
from penstock.results.step_events import StepPhase
from penstock.storage import Storage, open_storage, residency
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

NUM_FILES = 20_000
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
    """Generation and cold reading beside bare loops; the drop is printed."""
    Content(1, 0)  # so that no side pays for loading the generator
    ratios = []
    where = os.environ.get("PENSTOCK_BENCH_FOLDER", str(BESIDE_US))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=where) as folder:
        made, bare = Path(folder, "made"), Path(folder, "bare")
        ratios += interleave(
            lambda: _figure("files generated a CPU second", lambda: _generate(made)),
            lambda: _figure("files generated a CPU second", lambda: _write_bare(bare)),
            repetitions=repetitions,
            unit="",
        )
        shutil.rmtree(bare)
        storage = open_storage(str(made), {})
        paths = sorted(str(path) for path in made.glob("train/*.npz"))
        ratios += interleave(
            lambda: _figure("cold files read a CPU second", lambda: _read(storage), before=storage),
            lambda: _figure("cold files read a CPU second", lambda: _read_bare(paths), before=storage),
            repetitions=repetitions,
            unit="",
        )
        _read_bare(paths)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        dropped = residency.evict_files(paths)
        print(
            f"  {NUM_FILES:,} clean files dropped in {time.monotonic() - began_s:.2f} s, "
            f"{time.process_time() - began_cpu_s:.2f} CPU s: {dropped.before.resident_bytes:,} bytes were in "
            f"memory, {dropped.after.resident_bytes:,} are"
        )
    return ratios


def _figure(name: str, work: Callable[[], None], *, before: Storage | None = None) -> Mapping[str, float]:
    if before is not None:
        residency.evict_objects(before)
    began_s = time.process_time()
    work()
    return {name: NUM_FILES / (time.process_time() - began_s)}


def _generate(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    recipe = DatasetRecipe(dataset=WORKLOAD.dataset, seed=1, reduction=IRREDUCIBLE)
    generate(recipe, open_storage(str(folder), {}), comm=SoloComm(), threads=2, progress=Silent())


def _write_bare(folder: Path) -> None:
    """What durable files take: a hidden one, its blocks, bytes, sync and name. Then the folder's sync."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    content, calls = os.urandom(100_522), ctypes.CDLL(None)
    for number in range(NUM_FILES):
        hidden = f"{folder}/.{secrets.token_hex(8)}"
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        calls.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(len(content)))
        os.pwrite(descriptor, content, 0)
        os.fstat(descriptor)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(hidden, f"{folder}/{number}")  # noqa: PTH104 - the leanest way
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(parent)
    os.close(parent)


def _read(storage: Storage) -> None:
    prepared = prepare_training(
        replace(WORKLOAD), storage, seed=1, division=Remainder.ROTATE, comm=SoloComm(), progress=Silent()
    )
    work = make_phase_works(WORKLOAD, prepared, storage, rank=0)[StepPhase.TRAIN]
    with closing(NativeLoader(storage, NativeOptions(threads=4))) as loader:
        loop = TrainingLoop(
            comm=SoloComm(), loader=loader, recorder=EventsInMemory(), progress=Silent(), planned_ahead=4
        )
        loop.train(work, 1, prepared.plan.epochs[0].num_steps)


def _read_bare(paths: list[str]) -> None:
    buffer = memoryview(bytearray(1 << 20))
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        os.preadv(descriptor, [buffer[: os.fstat(descriptor).st_size]], 0)
        os.close(descriptor)
