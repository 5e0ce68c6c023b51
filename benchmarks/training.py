"""The native loader beside what DLIO does inside: torch's DataLoader over `numpy.load`, in workers.

Same files, batches, emulated computation, and page cache dropped before each epoch. Both drop their samples;
ours reads the bytes, numpy also builds the array and checks its sum. Printed besides: what a sample costs
the loader alone, and what the harness reaches on storage that costs nothing, for two workloads as shipped.
Where storage is the limit, a run without computation stands beside bare preads of the same files.
"""

import mmap
import os
import resource
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from harness import Ratio, evict_all, interleave
from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.loader_protocol import BatchRequest, ReadRequest
from penstock.bench.loader.native_loader import DEFAULT_BUFFER_BYTES, NativeLoader, NativeOptions
from penstock.bench.recorded_run import EventsInMemory
from penstock.bench.training.training_loop import (
    PreparedTraining,
    TrainingLoop,
    ZeroCostStorage,
    make_phase_works,
    measure_harness_limit,
)
from penstock.bench.training.training_run import prepare_training
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe, write_manifest
from penstock.dataset.generate import generate
from penstock.progress import Progress
from penstock.results.step_events import StepPhase
from penstock.storage import Storage, open_storage
from penstock.storage.in_memory import MemoryStorage
from penstock.workload.enums import DataFormat
from penstock.workload.load_workload import load
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

COMM = SoloComm()
WORKERS = 4
COMPUTE_S = 0.020
WORKLOAD = Workload(
    name="side-by-side",
    dataset=Dataset(format=DataFormat.NPZ, num_files_train=64, record_length_bytes=Fraction(4 << 20)),
    reader=ReaderSection(batch_size=4),
    train=Train(computation_time=Duration(mean_s=COMPUTE_S)),
)
GIB = 2**30
BESIDE_US = Path(__file__).parent.parent
"""On a disk, where /tmp may be memory."""
_OWN = threading.local()


def measure(repetitions: int) -> list[Ratio]:
    """Ours over theirs for utilization, work a CPU second does, and how fast an epoch starts."""
    _print_overhead()
    _print_ceilings()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        storage = open_storage(folder, {})
        recipe = DatasetRecipe(dataset=WORKLOAD.dataset, seed=1, reduction=IRREDUCIBLE)
        generate(recipe, storage, comm=COMM, threads=2, progress=Progress())
        ratios = []
        for start in ("fork", "spawn"):
            side = _TorchSide(storage, Path(folder), start)
            found = interleave(
                lambda: _native(storage),
                side.run,
                repetitions=repetitions if start == "fork" else min(repetitions, 3),
                unit="",
            )
            ratios += [replace(ratio, name=f"{ratio.name}, workers by {start}") for ratio in found]
    return ratios + _beside_raw_reads(repetitions)


def _beside_raw_reads(repetitions: int) -> list[Ratio]:
    """A run without computation over bare preads of the same files, as many threads, past the page cache."""
    ratios = []
    for size_bytes, num_files in ((4 << 20, 160), (16 << 20, 40), (64 << 20, 10)):
        files = replace(WORKLOAD.dataset, num_files_train=num_files, record_length_bytes=Fraction(size_bytes))
        workload = replace(
            WORKLOAD,
            dataset=files,
            reader=ReaderSection(batch_size=2, prefetch_size=4),
            train=replace(WORKLOAD.train, computation_time=Duration()),
        )
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=BESIDE_US) as folder:
            storage = open_storage(f"direct://{folder}", {})
            recipe = DatasetRecipe(dataset=files, seed=1, reduction=IRREDUCIBLE)
            generate(recipe, storage, comm=COMM, threads=2, progress=Progress())
            paths = [str(path) for path in sorted(Path(folder).glob("train/*.npz"))]
            (found,) = interleave(
                partial(_without_computation, workload, storage),
                partial(_raw_reads, paths),
                repetitions=repetitions,
                unit="GiB/s",
            )
            ratios.append(replace(found, name=f"{found.name}, files of {size_bytes >> 20} MiB"))
    return ratios


def _without_computation(workload: Workload, storage: Storage) -> Mapping[str, float]:
    prepared = _prepared(workload, storage)
    work = make_phase_works(workload, prepared, storage, rank=0)[StepPhase.TRAIN]
    recorder = EventsInMemory()
    with closing(NativeLoader(storage, NativeOptions(threads=WORKERS, prefetch_batches=4))) as loader:
        loop = TrainingLoop(comm=COMM, loader=loader, recorder=recorder, progress=Progress(), planned_ahead=6)
        loop.run(work, 1, prepared.plan.epochs[0].num_steps)
    steps = recorder.events(rank=0, host=COMM.host).steps
    elapsed_s = (int(steps["barrier_ns"][-1]) - int(steps["start_ns"][0])) / 1e9
    return {"GiB/s beside raw reads": int(steps["read_bytes"].sum()) / GIB / elapsed_s}


def _raw_reads(paths: list[str]) -> Mapping[str, float]:
    began_s = time.monotonic()
    with ThreadPoolExecutor(WORKERS) as pool:
        read_bytes = sum(pool.map(_read_directly, paths))
    return {"GiB/s beside raw reads": read_bytes / GIB / (time.monotonic() - began_s)}


def _read_directly(path: str) -> int:
    """One file from begin to end, by preads as large as the loader's, into memory of this thread."""
    if not hasattr(_OWN, "buffer"):
        _OWN.buffer = mmap.mmap(-1, DEFAULT_BUFFER_BYTES)
        _OWN.buffer.write(bytes(DEFAULT_BUFFER_BYTES))  # so that no read pays for its pages
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done = 0
    while size_bytes := os.preadv(descriptor, [_OWN.buffer], done):
        done += size_bytes
        if size_bytes % 4096:
            break
    os.close(descriptor)
    return done


def _prepared(workload: Workload, storage: Storage) -> PreparedTraining:
    return prepare_training(
        workload, storage, seed=1, division=Remainder.ROTATE, comm=COMM, progress=Progress()
    )


def _print_overhead() -> None:
    """What the loader itself costs a sample: small files, batches of 24, reads that take no time."""
    keys = [f"{number:06}" for number in range(24_000)]
    storage = ZeroCostStorage(dict.fromkeys(keys, 4096))
    requests = [
        BatchRequest(tuple(ReadRequest(key) for key in keys[start : start + 24]), 24)
        for start in range(0, len(keys), 24)
    ]
    with closing(NativeLoader(storage, NativeOptions(threads=WORKERS))) as loader:
        began_s = time.monotonic()
        for _ in loader.epoch(requests):
            pass
        elapsed_s = time.monotonic() - began_s
    print(f"  overhead of the native loader: {elapsed_s / len(keys) * 1e6:.1f} us a sample", flush=True)


def _print_ceilings() -> None:
    """AU of the harness alone: one accelerator, shipped files and steps, a manifest and no file behind it."""
    for name in ("unet3d_h100", "retinanet_b200"):
        shipped = load(name).workload
        files = replace(shipped.dataset, listing_validation_interval=0)
        workload = replace(shipped, dataset=files, train=replace(shipped.train, epochs=1))
        storage = MemoryStorage()
        write_manifest(storage, DatasetRecipe(dataset=files, seed=1, reduction=IRREDUCIBLE), complete=True)
        options = NativeOptions(threads=WORKERS)
        found, *_ = measure_harness_limit(
            workload, _prepared(workload, storage), storage, options=options, comm=COMM, progress=Progress()
        )
        assert found is not None
        print(
            f"  ceiling of {name}: AU {found['au_compat']:.2f} %, strictly "
            f"{found['au_strict'] or 0:.2f} %, in {found['steps']} steps",
            flush=True,
        )


def _native(storage: Storage) -> Mapping[str, float]:
    prepared = _prepared(WORKLOAD, storage)
    evict_all(storage)
    works = make_phase_works(WORKLOAD, prepared, storage, rank=0)
    recorder = EventsInMemory()
    with closing(NativeLoader(storage, NativeOptions(threads=WORKERS))) as loader:
        loop = TrainingLoop(comm=COMM, loader=loader, recorder=recorder, progress=Progress(), planned_ahead=4)
        began_s = time.process_time()
        loop.run(works[StepPhase.TRAIN], 1, prepared.plan.epochs[0].num_steps)
        cpu_s = time.process_time() - began_s
    steps = recorder.events(rank=0, host=COMM.host).steps
    waits_s = (steps["loaded_ns"] - steps["start_ns"]) / 1e9
    computed_s = (steps["computed_ns"] - steps["loaded_ns"]) / 1e9
    return _figures(waits_s, computed_s, cpu_s=cpu_s, read_bytes=int(steps["read_bytes"].sum()))


def _figures(waits_s: Any, computed_s: Any, *, cpu_s: float, read_bytes: int) -> Mapping[str, float]:
    return {
        "AU after the first step": 100 * computed_s[1:].sum() / (computed_s[1:].sum() + waits_s[1:].sum()),
        "GiB a CPU second": read_bytes / GIB / cpu_s,
        "first batches a second": 1 / waits_s[0],
    }


class NumpyFiles:
    """A map-style data set as DLIO's: a file a sample, loaded by numpy."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        with np.load(self.paths[index]) as archive:
            return int(archive["x"].nbytes)


@dataclass(frozen=True)
class _TorchSide:
    storage: Storage
    folder: Path
    start: str

    def run(self) -> Mapping[str, float]:
        """One epoch through worker processes, made for it as DLIO does."""
        from torch.utils.data import DataLoader  # noqa: PLC0415 - heavy, and ours runs without

        evict_all(self.storage)
        paths = sorted(str(path) for path in self.folder.glob("train/*.npz"))
        before_s = _cpu_s()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises no more workers than cores
            loader: Any = DataLoader(
                cast("Any", NumpyFiles(paths)),
                batch_size=WORKLOAD.reader.batch_size,
                num_workers=WORKERS,
                multiprocessing_context=self.start,
                prefetch_factor=2,
            )
            waits_s, computed_s = _walk(iter(loader))
        read_bytes = sum(os.stat(path).st_size for path in paths)  # noqa: PTH116 - a path as text
        return _figures(waits_s, computed_s, cpu_s=_cpu_s() - before_s, read_bytes=read_bytes)


def _walk(batches: Iterator[Any]) -> tuple[Any, Any]:
    waits_s: list[float] = []
    computed_s: list[float] = []
    while True:
        began_s = time.monotonic()
        if next(batches, None) is None:
            return np.array(waits_s), np.array(computed_s)
        loaded_s = time.monotonic()
        time.sleep(COMPUTE_S)
        waits_s.append(loaded_s - began_s)
        computed_s.append(time.monotonic() - loaded_s)


def _cpu_s() -> float:
    """Of this process and of the workers that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
