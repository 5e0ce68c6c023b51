"""The training that a study emulates on each rank: a state to save, steps that take time, a process group.

The only part that knows torch. Invariant: a step computes equally long in every row, so what it takes longer
beside a flush is what the flush costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.distributed as dist

from penstock.bench.compute import SystemClock, compute_until

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.bench.model_state import StateLayout
    from penstock.cluster.comm import Comm

_WORK_BYTES: Final = 8 << 20
"""What a step touches of memory: a host's work for an accelerator, some milliseconds of one core."""
_PIECE_BYTES: Final = 16 << 20


class Trainer:
    """One rank's state and steps."""

    def __init__(self, layout: StateLayout, rank: int, *, step_s: float) -> None:
        self.rank = rank
        random = np.random.Generator(np.random.SFC64(rank))
        # Names carry the rank: the engine writes what ranks hold in common only once.
        self.state: Mapping[str, torch.Tensor] = {
            f"rank_{rank}/{file.name}": torch.from_numpy(_random_bytes(random, file.size_bytes))
            for file in layout.files_of(rank)
        }
        self._step_ns = round(step_s * 1e9)
        self._work = np.ones(_WORK_BYTES // 8, dtype=np.int64)
        self._clock = SystemClock()

    def files(self) -> Iterator[tuple[str, memoryview]]:
        """The state as plain files."""
        for name, tensor in self.state.items():
            yield name, tensor.numpy().data

    def step(self) -> None:
        """Wait as for an accelerator, then work as a host does."""
        compute_until(time.monotonic_ns() + self._step_ns, self._clock)
        self._work += 1


def _random_bytes(random: np.random.Generator, size_bytes: int) -> NDArray[np.uint8]:
    """Bytes that no storage can shrink, drawn by pieces: a state may be half of a host's memory."""
    drawn = np.empty(size_bytes, dtype=np.uint8)
    for start in range(0, size_bytes, _PIECE_BYTES):
        piece = drawn[start : start + _PIECE_BYTES]
        piece[:] = np.frombuffer(random.bytes(piece.nbytes), dtype=np.uint8)
    return drawn


@contextmanager
def process_group(comm: Comm, meeting: Path) -> Iterator[None]:
    """The ranks of `comm` as torch's default group, over gloo; one that stands is used. Collective.

    They meet at `meeting`, a file that all of them see and that is gone afterwards.
    """
    if comm.size == 1 or dist.is_initialized():
        yield
        return
    torch.set_num_threads(1)
    if comm.rank == 0:
        meeting.unlink(missing_ok=True)
    comm.barrier(awaiting="rank 0 to clear the meeting place")
    store = dist.FileStore(str(meeting), comm.size)  # type: ignore[attr-defined] # not in torch's stubs
    limit = timedelta(seconds=comm.timeout_s)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
    comm.barrier(awaiting="all ranks to leave the process group")
    if comm.rank == 0:
        meeting.unlink(missing_ok=True)
