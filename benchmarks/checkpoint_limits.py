"""The engine beside the limit of each place: raw loops tuned alike, an S3 client alone, torch.save of many.

    python benchmarks/checkpoint_limits.py [disk|s3|many] [MIB] [RANKS]

`disk`: blocking saves and verified cold loads of so many MiB (64 and 1024, or those given) on 1 and 4 ranks,
beside as many streams of bare O_DIRECT from huge pages into new files, fallocated and as durable, and back;
goals: 0.9, but 0.7 for a save of 64 MiB. Loads stand beside the same bare reads again, each block of which is
summed and copied to where it belongs: what a verified load could be at best on these cores. `s3`: 256 MiB
beside obstore's own parallel multipart of as many bytes, and its parallel ranges, on moto (0.9). `many`: CPU
seconds of 100,000 tensors of 16 bytes beside torch.save and dcp.save (torch.save / ours: 0.67), and the bytes
of 10,000 beside dcp.save's (0.77).
"""

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count as count_up
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

from checkpoint_engine import alone_in_a_group, cpu_s, folder_for_files
from harness import LEAST_ROUNDS, Ratio, compare, rounds
from penstock.checkpoint.api import load, save
from penstock.checkpoint.formats.description import checksum_of
from penstock.checkpoint.manager.manager import Manager
from penstock.storage.aligned import copy_bytes
from penstock.storage.files.local_files import sync_folder
from penstock.transfer.buffers import WarmMemory

MIB = 1 << 20
SIZES_MIB = (64, 1024)
RANKS = (1, 4)
WRITE_STREAMS, READ_STREAMS = 2, 6
MOST_CHUNK_BYTES, BLOCK_BYTES = 16 * MIB, 8 * MIB
PLACED_BLOCK_BYTES = 4 * MIB
"""Smaller, as what the last blocks take after they were read must not be much of a small load."""
S3_MIB = 256
NUM_MANY, NUM_COUNTED = 100_000, 10_000

Ways = dict[str, tuple["Callable[[], object]", float]]
"""What to time, and the amount that it moves."""


def measure(repetitions: int, places: Sequence[str] = ("disk", "s3", "many")) -> list[Ratio]:
    """All of it."""
    ratios: list[Ratio] = []
    if "disk" in places:
        for size_mib in SIZES_MIB:
            for num_ranks in RANKS:
                ratios += measure_disk(repetitions, size_mib, num_ranks)
    if "s3" in places:
        ratios += measure_s3(repetitions)
    if "many" in places:
        ratios += measure_many(repetitions)
    return ratios


def measure_disk(repetitions: int, size_mib: int, num_ranks: int) -> list[Ratio]:
    """Saves and loads of one size."""
    from tests.support.gloo_ranks import on_gloo_ranks  # noqa: PLC0415 - found through `harness`

    with tempfile.TemporaryDirectory(
        prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")
    ) as folder:
        count = max(LEAST_ROUNDS, repetitions)
        seen = on_gloo_ranks(num_ranks, on_disk, Path(folder), size_mib * MIB, count, limit_s=1200)[0]
    where = f"{size_mib} MiB, {num_ranks} rank(s)"
    return [
        compare(seen, f"save / raw, {where}", ("save", "raw write"), "GiB/s"),
        compare(seen, f"load / raw, {where}", ("load", "raw read"), "GiB/s"),
        compare(
            seen,
            f"load / raw, each byte placed and summed, {where}",
            ("load", "raw read, placed and summed"),
            "GiB/s",
        ),
    ]


def on_disk(rank: int, folder: Path, size_bytes: int, count: int) -> list[dict[str, float]]:
    """One rank's part; the figures of each round."""
    own_bytes = size_bytes // dist.get_world_size()
    state = {f"rank{rank}.w{n}": torch.randn(own_bytes // 8 // 4) for n in range(8)}
    raw = RawFiles(folder / f"raw{rank}", own_bytes)
    places = [tensor.numpy().data.cast("B") for tensor in state.values()]
    figures = []
    with Manager(folder / "ours") as manager:
        steps = count_up(1)
        ways: Ways = {
            "save": (lambda: manager.save(next(steps), state), size_bytes),
            "raw write": (raw.write, size_bytes),
            "load": (lambda: manager.restore(state), size_bytes),
            "raw read": (raw.read, size_bytes),
            "raw read, placed and summed": (partial(raw.read, places), size_bytes),
        }
        for number in range(count + 1):
            seen = {}
            names = list(ways) if number % 2 else ["raw write", "save", *list(ways)[:1:-1]]
            for name in names:
                if rank == 0:
                    _forget(folder, name)
                work, amount = ways[name]
                dist.barrier()
                start_s = time.perf_counter()
                work()
                dist.barrier()
                seen[name] = amount / (1 << 30) / (time.perf_counter() - start_s)
            # The first round warms memory and code of both.
            figures += [seen] if number else []
    return figures


def _forget(folder: Path, way: str) -> None:
    """Empty the page cache of what is read, and remove what is written: all write new files."""
    if way not in ("save", "raw write"):
        # A run's lease is not read by loads, and nobody evicts it between two saves of a job.
        for path in (*folder.glob("ours/step-*/*"), *folder.glob("raw*/*")):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return
    for old in folder.glob("ours/step-*" if way == "save" else "raw*"):
        shutil.rmtree(old)
    os.sync()


class RawFiles:
    """Bare O_DIRECT calls, with the streams, the requests and the huge pages that we use."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = size_bytes // WRITE_STREAMS
        self._chunk_bytes = min(MOST_CHUNK_BYTES, self._file_bytes // 2)
        self._memory = WarmMemory(max(WRITE_STREAMS * MOST_CHUNK_BYTES, READ_STREAMS * BLOCK_BYTES))
        self._memory.touch()

    def write(self) -> None:
        """New files, fallocated, written from one buffer a stream, synced, and their names."""
        self._folder.mkdir()
        _in_threads(WRITE_STREAMS, self._write_file)
        sync_folder(self._folder)
        sync_folder(self._folder.parent)

    def read(self, places: Sequence[memoryview] = ()) -> None:
        """The files into one buffer a stream; given `places`, from there to them, and a sum of each block."""
        _in_threads(READ_STREAMS, partial(self._read_part, places))

    def _write_file(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(self._folder / str(number), flags, 0o600)
        buffer = self._memory.view[number * MOST_CHUNK_BYTES :][: self._chunk_bytes]
        os.posix_fallocate(descriptor, 0, self._file_bytes)
        for offset in range(0, self._file_bytes, self._chunk_bytes):
            os.pwrite(descriptor, buffer[: self._file_bytes - offset], offset)
        os.fsync(descriptor)
        os.close(descriptor)

    def _read_part(self, places: Sequence[memoryview], stream: int) -> None:
        block_bytes = PLACED_BLOCK_BYTES if places else BLOCK_BYTES
        blocks = [
            (file, at) for file in range(WRITE_STREAMS) for at in range(0, self._file_bytes, block_bytes)
        ]
        buffer = self._memory.view[stream * BLOCK_BYTES :][:block_bytes]
        for file, at in blocks[stream::READ_STREAMS]:
            descriptor = os.open(self._folder / str(file), os.O_RDONLY | os.O_DIRECT)
            num_read = os.preadv(descriptor, [buffer], at)
            os.close(descriptor)
            if places:
                checksum_of(buffer[:num_read])
                _place(buffer[:num_read], file * self._file_bytes + at, places)


def _place(block: memoryview, begin: int, places: Sequence[memoryview]) -> None:
    number, at = divmod(begin, len(places[0]))
    while block:
        part = places[number][at : at + len(block)]
        copy_bytes(part, block[: len(part)])
        block, number, at = block[len(part) :], number + 1, 0


def _in_threads(num_threads: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))


def measure_s3(repetitions: int) -> list[Ratio]:
    """Saves and loads of an object store, beside its client alone."""
    import obstore  # noqa: PLC0415 - an extra
    from obstore.store import S3Store  # noqa: PLC0415 - likewise
    from tests.support.s3.moto_server import running_moto  # noqa: PLC0415 - found through `harness`
    from tests.support.s3.server import BUCKET  # noqa: PLC0415 - likewise

    state = {f"w{number}": torch.randn(S3_MIB * MIB // 8 // 4) for number in range(8)}
    halves = [torch.randn(S3_MIB * MIB // 2 // 4).numpy().tobytes() for _ in range(WRITE_STREAMS)]
    size_bytes = S3_MIB * MIB
    with running_moto() as server:
        os.environ.update(server.environment)
        store = S3Store(
            BUCKET,
            endpoint=server.environment["AWS_ENDPOINT_URL"],
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

        def put(number: int) -> None:
            obstore.put(store, f"raw/{number}", halves[number], use_multipart=True, chunk_size=BLOCK_BYTES)

        def get(part: int) -> None:
            per_file = len(halves[0]) // BLOCK_BYTES
            for block in range(part, per_file * WRITE_STREAMS, READ_STREAMS):
                file, number = divmod(block, per_file)
                obstore.get_range(store, f"raw/{file}", start=number * BLOCK_BYTES, length=BLOCK_BYTES)

        ways: Ways = {
            "save": (lambda: save(state, f"s3://{BUCKET}/ours"), size_bytes),
            "client writes": (lambda: _in_threads(WRITE_STREAMS, put), size_bytes),
            "load": (lambda: load(state, f"s3://{BUCKET}/ours"), size_bytes),
            "client reads": (lambda: _in_threads(READ_STREAMS, get), size_bytes),
        }
        seen = _take_turns(ways, repetitions, time.perf_counter)
    return [
        compare(seen, "S3: save / obstore alone", ("save", "client writes"), "MiB/s"),
        compare(seen, "S3: load / obstore alone", ("load", "client reads"), "MiB/s"),
    ]


def _take_turns(ways: Ways, repetitions: int, clock: Callable[[], float]) -> list[dict[str, float]]:
    """Amounts of MiB, or of a million, by each second of `clock`."""
    figures: list[dict[str, float]] = []
    for _ in rounds(repetitions):
        figures.append({})
        for name, (work, amount) in ways.items():
            gc.collect()
            start_s = clock()
            work()
            figures[-1][name] = amount / MIB / (clock() - start_s)
    return figures


def measure_many(repetitions: int) -> list[Ratio]:
    """CPU seconds and bytes of many small tensors."""
    with folder_for_files() as folder, alone_in_a_group():
        state = _many(NUM_MANY)
        ways: Ways = {
            "torch.save": (lambda: torch.save(state, folder / "state.pt"), NUM_MANY),
            "save": (lambda: save(state, folder / "ours"), NUM_MANY),
            "load": (lambda: load(state, folder / "ours"), NUM_MANY),
            "dcp.save": (partial(stock_save, state, checkpoint_id=folder / "stock"), NUM_MANY),
            "dcp.load": (partial(stock_load, state, checkpoint_id=folder / "stock"), NUM_MANY),
        }
        seen: Sequence[Mapping[str, float]] = _take_turns(ways, repetitions, cpu_s)
        counted = _many(NUM_COUNTED)
        save(counted, folder / "few")
        stock_save(counted, checkpoint_id=folder / "few stock")
        sizes = [{"ours": 1 / _size(folder / "few"), "stock": 1 / _size(folder / "few stock")}]
    unit = "million a CPU s"
    return [
        compare(seen, f"CPU of torch.save / of save, {NUM_MANY} tensors", ("save", "torch.save"), unit),
        compare(seen, f"CPU of torch.save / of load, {NUM_MANY} tensors", ("load", "torch.save"), unit),
        compare(seen, f"CPU of dcp.save / of save, {NUM_MANY} tensors", ("save", "dcp.save"), unit),
        compare(seen, f"CPU of dcp.load / of load, {NUM_MANY} tensors", ("load", "dcp.load"), unit),
        compare(sizes, f"bytes of dcp.save / of save, {NUM_COUNTED} tensors", ("ours", "stock"), "a byte"),
    ]


def _many(number: int) -> dict[str, torch.Tensor]:
    return {f"layer{each // 10}.w{each % 10}": torch.randn(4) for each in range(number)}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        found = measure_disk(5, int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    else:
        found = measure(5, sys.argv[1:] or ("disk", "s3", "many"))
    for ratio in found:
        print(ratio.line(None))
