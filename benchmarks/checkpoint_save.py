"""Saving a state of 1 GiB beside the raw disk, plain copies and torch's own saves.

Durability is inside the timed part for all, removing what was written outside. Goals: saving at 0.9 of raw
O_DIRECT writes; CPU seconds at most 1.3 of what raw writes, one warm copy and one XXH3 pass take together (a
ratio of 0.77 here); the stall of an async save at most 1.2 of a copy into warm memory (0.83), and a third of
dcp.async_save's (3.0).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from harness import Ratio, interleave
from penstock.checkpoint.manager import Manager
from penstock.checkpoint.pipe.memory import WarmMemory
from penstock.checkpoint.torch_engine import TorchEngine

NUM_TENSORS = 32
TENSOR_BYTES = 32 << 20
SIZE_BYTES = NUM_TENSORS * TENSOR_BYTES
CHUNK_BYTES = 16 << 20
STREAMS = 2


def measure(repetitions: int) -> list[Ratio]:
    """Ours beside each peer."""
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")))
        undo.callback(shutil.rmtree, folder)
        warnings.filterwarnings("ignore", module="torch.distributed")
        store = dist.HashStore()  # type: ignore[attr-defined] # documented, but not in torch's stubs
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        undo.callback(dist.destroy_process_group)
        sides = Sides(folder)
        undo.callback(sides.close)
        pairs = (
            (sides.save, sides.raw, "GiB/s"),
            (sides.save_cpu, sides.least_cpu, "GiB per CPU second"),
            (sides.stall, sides.warm_copy, "GiB/s"),
            (sides.save_beside_torch, sides.torch_save, "GiB/s"),
            (sides.stall_beside_torch, sides.torch_stall, "GiB/s"),
        )
        ratios: list[Ratio] = []
        for ours, theirs, unit in pairs:
            ours()
            theirs()
            ratios += interleave(ours, theirs, repetitions=repetitions, unit=unit)
        return ratios


Ending = Callable[[], None]


class Speed(NamedTuple):
    """How fast a state was moved."""

    gib_per_s: float
    gib_per_cpu_s: float


class Sides:
    """Every way to move the same state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = {f"w{number}": torch.randn(TENSOR_BYTES // 4) for number in range(NUM_TENSORS)}
        self._memory = WarmMemory(STREAMS * CHUNK_BYTES)
        self._memory.touch()
        self._warm = np.ones(SIZE_BYTES, dtype=np.uint8)
        self._manager = Manager(folder / "run", engine=TorchEngine(staging_bytes=SIZE_BYTES + (128 << 20)))
        self._step = 0

    def close(self) -> None:
        """Let the manager go."""
        self._manager.close()

    def save(self) -> Mapping[str, float]:
        """Ours: staged, written, summed, committed."""
        return {"save / raw O_DIRECT": self._timed(self._save).gib_per_s}

    def raw(self) -> Mapping[str, float]:
        """Bare pwrite of one warm huge-page buffer a thread, fsync included."""
        return {"save / raw O_DIRECT": self._timed(self._raw).gib_per_s}

    def save_cpu(self) -> Mapping[str, float]:
        """What ours costs the processor."""
        return {"CPU of raw + copy + XXH3 / CPU of save": self._timed(self._save).gib_per_cpu_s}

    def least_cpu(self) -> Mapping[str, float]:
        """What nobody can do without."""
        return {"CPU of raw + copy + XXH3 / CPU of save": self._timed(self._least).gib_per_cpu_s}

    def stall(self) -> Mapping[str, float]:
        """How long ours keeps the trainer."""
        return {"warm copy / stall of save_async": self._timed(self._save_async).gib_per_s}

    def warm_copy(self) -> Mapping[str, float]:
        """A plain copy into memory that was used before."""
        return {"warm copy / stall of save_async": self._timed(self._copy).gib_per_s}

    def save_beside_torch(self) -> Mapping[str, float]:
        """Ours again."""
        return {"save beside dcp.save": self._timed(self._save).gib_per_s}

    def torch_save(self) -> Mapping[str, float]:
        """What torch's own does, as it comes: with fsync."""
        return {"save beside dcp.save": self._timed(self._torch_save).gib_per_s}

    def stall_beside_torch(self) -> Mapping[str, float]:
        """Ours again."""
        return {"stall of save_async beside dcp.async_save": self._timed(self._save_async).gib_per_s}

    def torch_stall(self) -> Mapping[str, float]:
        """How long torch's own keeps the trainer, as it comes."""
        return {"stall of save_async beside dcp.async_save": self._timed(self._torch_async_save).gib_per_s}

    def _timed(self, work: Callable[[], Ending]) -> Speed:
        """Time `work`; what it returns is called when the clock has stopped."""
        cpu_s, start_s = _cpu_s(), time.perf_counter()
        end = work()
        took_s, took_cpu_s = time.perf_counter() - start_s, _cpu_s() - cpu_s
        end()
        size_gib = SIZE_BYTES / 2**30
        # The kernel counts processor time in hundredths of seconds.
        return Speed(size_gib / took_s, size_gib / max(took_cpu_s, 0.01))

    def _removal(self, name: str) -> Ending:
        return lambda: shutil.rmtree(self._folder / name, ignore_errors=True)

    def _save(self) -> Ending:
        self._step += 1
        self._manager.save(self._step, self._state)
        return self._removal(f"run/step-{self._step}")

    def _save_async(self) -> Ending:
        self._step += 1
        handle = self._manager.save_async(self._step, self._state)
        remove = self._removal(f"run/step-{self._step}")

        def end() -> None:
            handle.result()
            remove()

        return end

    def _torch_save(self) -> Ending:
        save(self._state, checkpoint_id=self._folder / "torch")
        return self._removal("torch")

    def _torch_async_save(self) -> Ending:
        future = async_save(self._state, checkpoint_id=self._folder / "torch")
        remove = self._removal("torch")

        def end() -> None:
            future.result()  # type: ignore[union-attr] # a future without a staging executor
            remove()

        return end

    def _copy(self) -> Ending:
        for number, tensor in enumerate(self._state.values()):
            start = number * TENSOR_BYTES
            np.copyto(self._warm[start : start + TENSOR_BYTES], tensor.numpy().view(np.uint8))
        return _nothing

    def _least(self) -> Ending:
        end = self._raw()
        self._copy()
        for tensor in self._state.values():
            xxhash.xxh3_128_digest(tensor.numpy().data)
        return end

    def _raw(self) -> Ending:
        (self._folder / "raw").mkdir()
        with ThreadPoolExecutor(STREAMS) as threads:
            for done in [threads.submit(self._raw_file, number) for number in range(STREAMS)]:
                done.result()
        return self._removal("raw")

    def _raw_file(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(self._folder / f"raw/{number}", flags, 0o600)
        buffer = self._memory.view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        try:
            os.posix_fallocate(descriptor, 0, SIZE_BYTES // STREAMS)
            for offset in range(0, SIZE_BYTES // STREAMS, CHUNK_BYTES):
                assert os.pwrite(descriptor, buffer, offset) == CHUNK_BYTES
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _nothing() -> None:
    """A copy leaves nothing to remove."""


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


if __name__ == "__main__":
    for ratio in measure(repetitions=5):
        print(ratio.line(None))
