"""The checkpoint pipe beside raw loops on the same disk: pwrite and preadv of one warm huge-page buffer each.

Same sizes, streams, blocks and O_DIRECT, durability inside the timed part on both sides. Ours also makes
every byte, and on the way back verifies it. Goals: 0.95 of the raw loop writing, 0.9 reading. Last, what huge
pages are worth: the raw loop from ordinary pages beside the one from huge pages.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from harness import Ratio, interleave
from penstock.bench.checkpoint.read_pipeline import read_objects
from penstock.dataset.content import Content
from penstock.environment import process_environment
from penstock.storage import open_storage
from penstock.storage.aligned import aligned_buffer
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.ledger import Measurement
from penstock.transfer.pipeline import PipelineSettings, PlannedObject, write_objects

FILE_BYTES = 512 << 20
CHUNK_BYTES = 16 << 20
BUFFER_MEMORY_BYTES = 256 << 20
NUM_FILES = 2


def measure(repetitions: int) -> list[Ratio]:
    """Writing and reading with one and two streams."""
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")))
        undo.callback(shutil.rmtree, folder)
        memory = WarmMemory(BUFFER_MEMORY_BYTES)
        memory.touch()
        ratios: list[Ratio] = []
        for streams in (1, 2):
            sides = Sides(folder, memory, streams)
            sides.ours()
            sides.theirs()
            ratios += interleave(sides.ours, sides.theirs, repetitions=repetitions, unit="GiB/s")
        plain = [aligned_buffer(CHUNK_BYTES) for _ in range(NUM_FILES)]
        raw, ordinary = Raw(folder, sides.raw_buffers, 2), Raw(folder, plain, 2)
        ratios += interleave(
            lambda: {"raw writing, huge pages over ordinary": raw.write()},
            lambda: {"raw writing, huge pages over ordinary": ordinary.write()},
            repetitions=repetitions,
            unit="GiB/s",
        )
        return ratios


class Keyed:
    """Content by the object's key, made and verified."""

    def __init__(self, planned: list[PlannedObject]) -> None:
        self._contents = {each.key: Content(1, each.key) for each in planned}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite `buffer` with the object's bytes at `offset`."""
        self._contents[planned.key].fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """Where the first wrong byte is."""
        return self._contents[planned.key].verify(buffer, offset)


class Raw:
    """Loops of bare system calls, one thread a stream, each on its own files and buffer."""

    def __init__(self, folder: Path, buffers: list[memoryview], streams: int) -> None:
        self._folder, self._buffers, self._streams = folder, buffers, streams

    def write(self) -> float:
        """GiB/s until all files are durable."""
        return self._timed(self._write_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def read(self) -> float:
        """GiB/s of reading them back past the page cache."""
        return self._timed(self._read_file, os.O_RDONLY)

    def _timed(self, move: Callable[[int, memoryview], None], flags: int) -> float:
        def stream(number: int) -> None:
            for file in range(number, NUM_FILES, self._streams):
                descriptor = os.open(self._folder / f"raw{file}", flags | os.O_DIRECT, 0o600)
                try:
                    move(descriptor, self._buffers[number])
                finally:
                    os.close(descriptor)

        start = time.perf_counter()
        with ThreadPoolExecutor(self._streams) as pool:
            for done in [pool.submit(stream, number) for number in range(self._streams)]:
                done.result()
        return NUM_FILES * FILE_BYTES / 2**30 / (time.perf_counter() - start)

    def _write_file(self, descriptor: int, buffer: memoryview) -> None:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        for offset in range(0, FILE_BYTES, CHUNK_BYTES):
            assert os.pwrite(descriptor, buffer, offset) == CHUNK_BYTES
        os.fsync(descriptor)

    def _read_file(self, descriptor: int, buffer: memoryview) -> None:
        for offset in range(0, FILE_BYTES, CHUNK_BYTES):
            assert os.preadv(descriptor, [buffer], offset) == CHUNK_BYTES


class Sides:
    """Both sides on the same disk and the same warm memory, which only one uses at a time."""

    def __init__(self, folder: Path, memory: WarmMemory, streams: int) -> None:
        self.raw_buffers = [
            memory.view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] for number in range(NUM_FILES)
        ]
        self._raw = Raw(folder, self.raw_buffers, streams)
        self._memory = memory
        self._planned = [PlannedObject(f"ours{number}", FILE_BYTES) for number in range(NUM_FILES)]
        self._content = Keyed(self._planned)
        self._storage = open_storage(f"direct://{folder}", process_environment())
        self._names = (
            f"generate + write + fsync, {streams} stream(s)",
            f"read + verify all, {streams} stream(s)",
        )
        self._settings = PipelineSettings(
            streams=streams, chunk_bytes=CHUNK_BYTES, buffer_memory_bytes=BUFFER_MEMORY_BYTES
        )

    def ours(self) -> Mapping[str, float]:
        """The pipe: every byte made on the way out and verified on the way back."""
        storages, planned, settings = [self._storage], self._planned, self._settings
        written = write_objects(storages, planned, self._content, settings, memory=self._memory)
        read = read_objects(storages, planned, self._content.verify, settings, memory=self._memory)
        assert read.ledger.verified_bytes == NUM_FILES * FILE_BYTES
        return dict(zip(self._names, (_speed(written), _speed(read)), strict=True))

    def theirs(self) -> Mapping[str, float]:
        """The same from bare calls: one buffer a stream, written over and over."""
        return dict(zip(self._names, (self._raw.write(), self._raw.read()), strict=True))


def _speed(seen: Measurement) -> float:
    """From the opening of the first file, as on the other side, to the last durable or verified byte."""
    return NUM_FILES * FILE_BYTES / 2**30 / ((seen.end_ns - seen.entered_ns) / 1e9)


if __name__ == "__main__":
    for ratio in measure(repetitions=9):
        print(ratio.line(None))
