"""The kernels of parity beside numpy's in-place XOR and a copy, on one core and the same warm buffers.

Figures count the bytes of the piece that is added. Goals: adding 0.8 of numpy's XOR; the weighted parity,
which numpy doubles in several passes, 2 GB/s; the scaled sums of a rebuild, by a table, 0.5 GB/s. What a save
with parity costs: checkpoint_levels, next to the least that one can do, which is here (`BareRank`).
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoint_limits import RawFiles
from harness import Ratio, best_speed, interleave
from penstock.checkpoint.host_windows import Window
from penstock.checkpoint.levels.redundancy import add, add_scaled, double_and_add
from penstock.storage.aligned import aligned_buffer
from penstock.storage.files.local_files import sync_folder
from penstock.transfer.buffers import WarmMemory

SIZE_BYTES = 32 << 20
FACTOR = 0x8E
"""The inverse of two: a factor with half of its bits set, as a rebuild needs."""

BLOCK_BYTES = 2 << 20
"""What bare ranks exchange and write at once."""
AHEAD = 2
"""Blocks of which a bare rank has begun to send and to receive each."""

_speed = partial(best_speed, SIZE_BYTES)


def measure(repetitions: int) -> list[Ratio]:
    """Each kernel against numpy's XOR of the same buffers."""
    sides = Sides()
    return interleave(sides.ours, sides.theirs, repetitions=repetitions, unit="GB/s")


class Sides:
    """Both sides on the same buffers."""

    def __init__(self) -> None:
        self._plain, self._weighted, self._piece = (_random(seed) for seed in range(3))

    def ours(self) -> Mapping[str, float]:
        """What encoding and rebuilding do with each piece."""
        return {
            "add": _speed(lambda: add(self._plain, self._piece)),
            "double and add": _speed(lambda: double_and_add(self._weighted, self._piece)),
            "add scaled (rebuild)": _speed(lambda: add_scaled(self._plain, self._piece, FACTOR)),
            "add (beside a copy)": _speed(lambda: add(self._plain, self._piece)),
        }

    def theirs(self) -> Mapping[str, float]:
        """Numpy's XOR for all but the last, which stands beside a copy."""
        total = np.frombuffer(self._plain, dtype=np.uint64)
        piece = np.frombuffer(self._piece, dtype=np.uint64)
        added = _speed(lambda: np.bitwise_xor(total, piece, out=total))
        return {
            "add": added,
            "double and add": added,
            "add scaled (rebuild)": added,
            "add (beside a copy)": _speed(lambda: np.copyto(total, piece)),
        }


class BareRank:
    """One rank of the least that saves can do: new files from huge pages, durable, and the old ones hidden.

    Parity is XOR of all other ranks, each of which sends a share; it is exchanged, summed and written while
    the data is. Making one is collective, and so are the saves.
    """

    def __init__(self, folder: Path, rank: int, size_bytes: int) -> None:
        self._rank, self._num_ranks = rank, dist.get_world_size()
        self._stripes = size_bytes // BLOCK_BYTES // (self._num_ranks - 1)
        self._folder = folder / f"bare-{rank}"
        self._folder.mkdir(parents=True)
        self._old = self._folder / "old"
        self._new = self._folder / "new"
        self._gone = self._folder / "gone"
        self._data = RawFiles(self._new, size_bytes)
        self._own = Window.make(size_bytes, is_huge=True)
        self._others = self._windows(size_bytes)
        self._memory = WarmMemory((AHEAD + 3) * BLOCK_BYTES)
        self._memory.touch()
        self._blocks = [self._memory.view[at * BLOCK_BYTES :][:BLOCK_BYTES] for at in range(AHEAD + 3)]

    def plain(self) -> None:
        """The data alone."""
        self._data.write()
        self._hide_old()

    def over_gloo(self) -> None:
        """Parity of what arrives from the others through sockets."""
        self._with_parity(self._gloo_sums)

    def in_shared_memory(self) -> None:
        """Parity of what is read where the others have it, in memory of this host."""
        self._with_parity(self._shared_sums)

    def _windows(self, size_bytes: int) -> list[memoryview]:
        seats: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(seats, f"/proc/{os.getpid()}/fd/{self._own.descriptor}")
        windows = [Window.open(os.open(seat, os.O_RDWR), size_bytes) for seat in seats]
        return [window.view for window in windows]

    def _with_parity(self, sums: Callable[[], Iterator[memoryview]]) -> None:
        path = self._folder / "parity"
        with ThreadPoolExecutor(2) as threads:
            data = threads.submit(self._data.write)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            os.posix_fallocate(descriptor, 0, self._stripes * BLOCK_BYTES)
            begun = None
            for number, block in enumerate(sums()):
                if begun is not None:
                    begun.result()
                begun = threads.submit(os.pwrite, descriptor, block, number * BLOCK_BYTES)
            if begun is not None:
                begun.result()
            os.fsync(descriptor)
            os.close(descriptor)
            data.result()
        path.rename(self._new / "parity")
        sync_folder(self._new)
        self._hide_old()

    def _shared_sums(self) -> Iterator[memoryview]:
        for stripe in range(self._stripes):
            total = self._blocks[stripe % 2]
            for chunk in range(self._num_ranks - 1):
                other = self._others[(self._rank - 1 - chunk) % self._num_ranks]
                at = (stripe * (self._num_ranks - 1) + chunk) * BLOCK_BYTES
                _copy_or_add(total, other[at : at + BLOCK_BYTES], is_first=not chunk)
            yield total

    def _gloo_sums(self) -> Iterator[memoryview]:
        own = torch.frombuffer(self._own.view, dtype=torch.uint8)
        spare = self._blocks[2:]
        num_chunks = self._num_ranks - 1
        sends: list[Any] = []
        receives: list[Any] = []

        def begin(step: int) -> None:
            place = 1 + step % num_chunks
            arriving = torch.frombuffer(spare[step % len(spare)], dtype=torch.uint8)
            receives.append(dist.irecv(arriving, (self._rank - place) % self._num_ranks, tag=step))
            leaving = own[step * BLOCK_BYTES : (step + 1) * BLOCK_BYTES]
            sends.append(dist.isend(leaving, (self._rank + place) % self._num_ranks, tag=step))

        steps = self._stripes * num_chunks
        for step in range(AHEAD):
            begin(step)
        for step in range(steps):
            receives[step].wait()
            if step + AHEAD < steps:
                begin(step + AHEAD)
            stripe, chunk = divmod(step, num_chunks)
            _copy_or_add(self._blocks[stripe % 2], spare[step % len(spare)], is_first=not chunk)
            if chunk == num_chunks - 1:
                yield self._blocks[stripe % 2]
        for send in sends:
            send.wait()

    def _hide_old(self) -> None:
        if self._old.exists():
            self._old.rename(self._gone)
        self._new.rename(self._old)

    def clear_up(self) -> None:
        """Remove what is hidden, when nobody waits for it."""
        if self._gone.exists():
            shutil.rmtree(self._gone)


def _copy_or_add(total: memoryview, piece: memoryview, *, is_first: bool) -> None:
    if is_first:
        np.copyto(np.frombuffer(total, np.uint64), np.frombuffer(piece, np.uint64))
    else:
        add(total, piece)


def _random(seed: int) -> memoryview:
    buffer = aligned_buffer(SIZE_BYTES)
    buffer[:] = np.random.default_rng(seed).bytes(SIZE_BYTES)
    return buffer


if __name__ == "__main__":
    for ratio in measure(repetitions=9):
        print(ratio.line(None))
