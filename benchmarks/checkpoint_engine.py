"""The checkpoint engine beside the raw disk, plain copies and peers: saves, stalls, loads, of 2 GiB.

    python benchmarks/checkpoint_engine.py [GIB]        a state of so many GiB, by default 2

All ways of a kind take turns in each round. Goals: saving at 0.9 of raw O_DIRECT writes; CPU seconds at most
1.3 of what raw writes, one warm copy and one XXH3 pass take together (a ratio of 0.77 here); the stall of an
async save at most 1.2 of a copy into warm memory (0.83), a third of dcp.async_save's (3.0), and with less
staging at most 1.1 of what the rest takes at raw speed (0.91); loading at 0.85 of raw cold reads with every
checksum verified, stock checkpoints, which have none, too; an eighth of the rows for 1.1 eighths of the bytes
(0.91).
"""

import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_loaders import SHARE, Loaders
from checkpoint_savers import Ending, MegatronSaver, Savers
from harness import Ratio, Side, compare, take_turns

TENSOR_BYTES = 32 << 20
ROWS = 8192
GIB = 1 << 30
DEFAULT_BYTES = 2 * GIB


def measure(repetitions: int, size_bytes: int = DEFAULT_BYTES) -> list[Ratio]:
    """Ours beside each peer."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    warnings.filterwarnings("ignore", module="megatron")
    state = {
        f"w{number}": torch.randn(ROWS, TENSOR_BYTES // 4 // ROWS)
        for number in range(size_bytes // TENSOR_BYTES)
    }
    with alone_in_a_group(), folder_for_files() as folder:
        return [*_saves(folder, state, repetitions), *_loads(folder, state, repetitions)]


def _saves(folder: Path, state: Mapping[str, torch.Tensor], repetitions: int) -> list[Ratio]:
    savers = Savers(folder, state)
    try:
        return [
            *_whole_saves(savers, folder, state, repetitions),
            *_stalls(savers, folder, state, repetitions),
        ]
    finally:
        savers.close()


def _whole_saves(
    savers: Savers, folder: Path, state: Mapping[str, torch.Tensor], repetitions: int
) -> list[Ratio]:
    peers = {
        "raw O_DIRECT": savers.raw,
        "dcp.save": savers.torch_dcp,
        "dcp.async_save": savers.torch_dcp_async,
        "torch.save": savers.torch_plain,
        "safetensors": savers.safetensors,
    }
    megatron = MegatronSaver.if_installed(folder, state)
    if megatron is not None:
        peers["Megatron's writer"] = megatron.save
    ways = {"ours": savers.ours, "raw + copy + XXH3": savers.least, **peers}
    seen = take_turns(_timed_sides(ways, savers.size_bytes), repetitions=repetitions)
    return [
        *(compare(seen, f"save / {name}", ("ours", name), "GiB/s") for name in peers),
        compare(
            seen, "CPU of raw + copy + XXH3 / CPU of save", ("ours CPU", "raw + copy + XXH3 CPU"), CPU_UNIT
        ),
        *(
            compare(seen, f"CPU of {name} / CPU of save", ("ours CPU", f"{name} CPU"), CPU_UNIT)
            for name in peers
            if name != "raw O_DIRECT"
        ),
    ]


CPU_UNIT = "GiB per CPU second"


def _stalls(savers: Savers, folder: Path, state: Mapping[str, torch.Tensor], repetitions: int) -> list[Ratio]:
    ways = {
        "ours": savers.our_stall,
        "ours with less": savers.our_stall_with_less,
        "raw": savers.raw,
        "warm copy": savers.copy,
        "dcp.async_save": savers.torch_stall,
    }
    megatron = MegatronSaver.if_installed(folder, state)
    if megatron is not None:
        ways["Megatron's fork"] = megatron.stall
    seen = take_turns(_timed_sides(ways, savers.size_bytes), repetitions=repetitions)
    # So fast would a save with little staging be that only waited for the rest of the state to be written.
    part = 1 - savers.small_staging_bytes / savers.size_bytes
    limits = [{**each, "rest at raw speed": each["raw"] / part} for each in seen]
    peers = [name for name in ("dcp.async_save", "Megatron's fork") if name in ways]
    return [
        compare(seen, "warm copy / stall of save_async", ("ours", "warm copy"), "GiB/s"),
        compare(
            limits,
            "rest at raw speed / stall with a quarter of the staging",
            ("ours with less", "rest at raw speed"),
            "GiB/s",
        ),
        *(compare(seen, f"stall of {name} / stall of save_async", ("ours", name), "GiB/s") for name in peers),
    ]


def _loads(folder: Path, state: Mapping[str, torch.Tensor], repetitions: int) -> list[Ratio]:
    loaders = Loaders(folder, state)
    size_bytes = sum(each.nbytes for each in state.values())
    ways: dict[str, Callable[[], None]] = {
        "ours": loaders.ours,
        "stock by ours": loaders.stock_by_ours,
        "raw": loaders.raw,
        "ours by dcp.load": loaders.ours_by_torch,
        "stock by dcp.load": loaders.stock_by_torch,
    }

    def cold(name: str, work: Callable[[], None]) -> Side:
        def side() -> Mapping[str, float]:
            loaders.empty_cache()
            start_s = time.perf_counter()
            work()
            return {name: size_bytes / GIB / (time.perf_counter() - start_s)}

        return side

    def parts() -> Mapping[str, float]:
        wanted = size_bytes / SHARE
        return {
            "part": wanted / loaders.part_bytes_by_ours(),
            "part by dcp.load": wanted / loaders.part_bytes_by_torch(),
            "all of it wanted": 1.0,
        }

    try:
        seen = take_turns([*(cold(*way) for way in ways.items()), parts], repetitions=repetitions)
    finally:
        loaders.close()
    part = f"bytes of 1/{SHARE} of the rows / bytes read"
    return [
        compare(seen, "load, verified / raw O_DIRECT", ("ours", "raw"), "GiB/s"),
        compare(seen, "load of a stock checkpoint / raw O_DIRECT", ("stock by ours", "raw"), "GiB/s"),
        compare(seen, "load / dcp.load", ("ours", "ours by dcp.load"), "GiB/s"),
        compare(
            seen, "load of a stock checkpoint / dcp.load", ("stock by ours", "stock by dcp.load"), "GiB/s"
        ),
        compare(seen, part, ("part", "all of it wanted"), "of what is read"),
        compare(seen, f"{part}, beside dcp.load", ("part", "part by dcp.load"), "of what is read"),
    ]


def _timed_sides(ways: Mapping[str, Callable[[], Ending]], size_bytes: int) -> list[Side]:
    return [_timed(name, way, size_bytes / GIB) for name, way in ways.items()]


def _timed(name: str, way: Callable[[], Ending], size_gib: float) -> Side:
    """A side that gives GiB a second, and a CPU second; what `way` returns is called off the clock."""

    def side() -> Mapping[str, float]:
        # Nobody is to pay for what others have left in the page cache.
        os.sync()
        begin_cpu_s, start_s = cpu_s(), time.perf_counter()
        end = way()
        took_s, took_cpu_s = time.perf_counter() - start_s, cpu_s() - begin_cpu_s
        end()
        return {name: size_gib / took_s, f"{name} CPU": size_gib / took_cpu_s}

    side()
    return side


def cpu_s() -> float:
    """Of this process, all its threads, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def alone_in_a_group() -> Iterator[None]:
    """A process group of this process alone, which frameworks ask for."""
    store = dist.HashStore()  # type: ignore[attr-defined] # documented, but not in torch's stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def folder_for_files() -> Iterator[Path]:
    """A folder for what is written, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    asked_gib = float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_BYTES / GIB
    for ratio in measure(repetitions=5, size_bytes=int(asked_gib * GIB)):
        print(ratio.line(None))
