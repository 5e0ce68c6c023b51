"""Ranks of one host that load the same safetensors: beside one rank, four mmaps, and device bytes.

    python benchmarks/checkpoint_ranks.py [MIB] [RANKS]        a file of 813 MiB and 4 ranks by default

Cold, the ranks share what one of them reads: the device gives each byte once (goal: at most 1.02 of the file)
and all have it in at most 1.1 of what one rank takes (0.91). Where cores are few that is out of reach for
anyone, as each rank copies every byte: bare loops, which read, copy and do nothing else, show how near it is.
Warm, each takes it from the page cache: not slower than as many copies out of an mmap (1.0).
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file, save_file

from harness import LEAST_ROUNDS, Ratio, compare
from penstock.checkpoint.host_windows import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

DEFAULT_MIB = 813
NUM_RANKS = 4
TENSOR_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
NUM_PLACES = 12
READERS = 3
POLL_S = 50e-6

State = dict[str, torch.Tensor]


def measure(repetitions: int, size_mib: int = DEFAULT_MIB, num_ranks: int = NUM_RANKS) -> list[Ratio]:
    """Loads of all ranks together beside their peers."""
    from tests.support.gloo_ranks import on_gloo_ranks  # noqa: PLC0415 - found through `harness`

    with tempfile.TemporaryDirectory(
        prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")
    ) as folder:
        path = Path(folder) / "model.safetensors"
        save_file(_state(size_mib << 20), path)
        rounds = max(LEAST_ROUNDS, repetitions)
        seen = on_gloo_ranks(num_ranks, load_in_turn, path, rounds, limit_s=1200)[0]
    several = f"{num_ranks} ranks"
    return [
        compare(seen, f"cold, {several} / one rank", ("cold", "cold alone"), "GiB/s"),
        compare(seen, f"cold, {several} / bare loops", ("cold", "bare loops"), "GiB/s"),
        compare(seen, f"cold, bare loops of {several} / one rank", ("bare loops", "cold alone"), "GiB/s"),
        compare(
            seen, f"cold, {several}: bytes of the file / of the device", ("device", "file"), "of the file"
        ),
        compare(seen, f"warm, {several} / as many mmaps", ("warm", "mmap"), "GiB/s"),
        compare(seen, f"warm, {several} / as many of load_file", ("warm", "load_file"), "GiB/s"),
    ]


def load_in_turn(rank: int, path: Path, rounds: int) -> list[dict[str, float]]:
    """One rank's part; the figures of each round."""
    from penstock.checkpoint.api import load  # noqa: PLC0415 - in the ranks alone

    alone = dist.new_group([0])
    # Not kept, because what a process maps stays in the page cache.
    mapped = load_file(path)
    expected = {name: _sum(value) for name, value in mapped.items()}
    whole = torch.ones(sum(value.numel() for value in mapped.values()))
    parts = torch.split(whole, [value.numel() for value in mapped.values()])
    state = dict(zip(mapped, parts, strict=True))
    del mapped
    loops = BareLoops(rank, path, whole.view(torch.uint8).numpy())
    size_bytes = path.stat().st_size
    size_gib = sum(value.nbytes for value in state.values()) / (1 << 30)

    def together() -> None:
        load(state, path)

    def by_one() -> None:
        if rank == 0:
            load(state, path, process_group=alone)

    def by_mmap() -> None:
        for name, value in load_file(path).items():
            state[name].copy_(value)

    ways: dict[str, tuple[Callable[[], None], bool]] = {
        "cold": (together, True),
        "cold alone": (by_one, True),
        "bare loops": (loops.run, True),
        "warm": (together, False),
        "load_file": (by_mmap, False),
        "mmap": (lambda: _copy_from_mmap(path, state), False),
    }
    figures: list[dict[str, float]] = []
    for number in range(rounds):
        figures.append({"file": 1.0})
        order = list(ways)
        for name in (*order[number % len(order) :], *order[: number % len(order)]):
            work, is_cold = ways[name]
            took_s, device_bytes = _timed(rank, path, work, is_cold=is_cold)
            figures[-1][name] = size_gib / took_s
            if name == "cold":
                figures[-1]["device"] = size_bytes / max(device_bytes, 1)
                assert all(_sum(value) == expected[name] for name, value in state.items())
                for value in state.values():
                    value.zero_()
    return figures


class BareLoops:
    """The least that sharing takes: each block is read once, past the page cache, and copied by all ranks."""

    def __init__(self, rank: int, path: Path, target: NDArray[np.uint8]) -> None:
        self._rank, self._num_ranks, self._target = rank, dist.get_world_size(), target
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        num_blocks = target.nbytes // BLOCK_BYTES
        head_bytes = 4 * num_blocks * (self._num_ranks + 1)
        size_bytes = NUM_PLACES * BLOCK_BYTES + head_bytes
        window, names = None, [""]
        if rank == 0:
            # Without huge pages this fails: then there is no telling what the least is.
            window = Window.make(size_bytes, is_huge=True)
            names = [f"/proc/{os.getpid()}/fd/{window.descriptor}"]
        dist.broadcast_object_list(names)
        opened = window or Window.open(os.open(names[0], os.O_RDWR), size_bytes)
        memory = np.frombuffer(opened.view, dtype=np.uint8)
        dist.barrier()
        opened.close()
        self._places = memory[:-head_bytes].reshape(NUM_PLACES, BLOCK_BYTES)
        # By block, the last round in which it was shown, and in which each rank has copied it.
        heads = memory[-head_bytes:].view(np.int32).reshape(self._num_ranks + 1, num_blocks)
        self._shown, self._copied = heads[0], heads[1:]
        self._round = 0

    def run(self) -> None:
        """Read a share of the blocks, and copy all of them."""
        self._round += 1
        blocks = iter(range(self._rank, len(self._shown), self._num_ranks))
        with ThreadPoolExecutor(READERS) as threads:
            reading = [threads.submit(self._read, blocks) for _ in range(READERS)]
            for block in range(len(self._shown)):
                while self._shown[block] != self._round:
                    time.sleep(POLL_S)
                place = self._places[block % NUM_PLACES]
                np.copyto(self._target[block * BLOCK_BYTES :][:BLOCK_BYTES], place)
                self._copied[self._rank, block] = self._round
        for each in reading:
            each.result()

    def _read(self, blocks: Iterator[int]) -> None:
        for block in blocks:
            before = block - NUM_PLACES
            while before >= 0 and (self._copied[:, before] != self._round).any():
                time.sleep(POLL_S)
            os.preadv(self._file, [self._places[block % NUM_PLACES]], block * BLOCK_BYTES)
            self._shown[block] = self._round


def _timed(rank: int, path: Path, work: Callable[[], None], *, is_cold: bool) -> tuple[float, int]:
    """Seconds until all ranks are done, and what the device gave all of them."""
    gc.collect()
    dist.barrier()
    if rank == 0:
        _evict(path) if is_cold else path.read_bytes()
    dist.barrier()
    before, start_s = _device_bytes(), time.perf_counter()
    work()
    dist.barrier()
    took_s = time.perf_counter() - start_s
    read = torch.tensor([_device_bytes() - before])
    dist.all_reduce(read)
    return took_s, int(read)


def _copy_from_mmap(path: Path, state: State) -> None:
    """What any loader by mmap has to do: touch the pages, and copy to where the tensors are."""
    whole = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    position = 8 + int.from_bytes(whole[:8].numpy().tobytes(), "little")
    for value in state.values():
        value.view(-1).view(torch.uint8).copy_(whole[position : position + value.nbytes])
        position += value.nbytes


def _sum(value: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(value.numpy().data)


def _evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _device_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _state(size_bytes: int) -> State:
    """Tensors of 16 MiB and a smaller last one, in the order in which safetensors stores them."""
    sizes = [min(TENSOR_BYTES, size_bytes - at) for at in range(0, size_bytes, TENSOR_BYTES)]
    return {f"layer{number:04}": torch.randn(size // 4) for number, size in enumerate(sizes)}


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    for ratio in measure(5, *arguments):
        print(ratio.line(None))
