"""Saving to caches beside saving to the fast level alone, flushes beside their cap, on 4 ranks as 4 hosts.

Goals: training waits for a cached, protected, flushed save at most 1.15 times as long as for a plain one,
both in the background (a ratio of 0.87), while the flush of the save before is under way; a flush reaches 0.9
of its cap, as the daemon's own /proc/PID/io says, too; a training step beside it keeps 0.95 of its speed; a
cached save takes at most two system calls a file more than a plain one (1 or above; flushes have to read each
file, too); no rank holds much more than twice its state, rebuilding included. A blocking save with parity
takes at most 1.4 times as long as a plain one (a ratio of 0.71) where the device is the limit: its files are
a third larger, in groups of 4. Beside it stand CPU seconds, of which sending all bytes once is the most, and
bare loops: the least that a plain save and one with parity take, whose bytes travel over gloo as ours do, or
lie in memory that all ranks share, which ranks of different hosts do not have.

These rows alone: PYTHONPATH=. PENSTOCK_BENCH_DIR=/mnt/disk python benchmarks/checkpoint_levels.py parity
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

import penstock.trace
from harness import Ratio, compare, ratio_of
from parity import BareRank
from penstock.checkpoint import DoubleParity, Flush, Manager, Single, Xor
from penstock.checkpoint.commit.checkpoints import StepCatalog
from penstock.checkpoint.levels.flush import FlushFolder
from penstock.checkpoint.levels.options import Scheme
from penstock.storage.uri import open_here

NUM_RANKS = 4
NUM_TENSORS = 4
STATE_BYTES = 64 << 20
LARGE_STATE_BYTES = 128 << 20
"""Of the rows about memory: what does not grow with the state weighs less."""
NUM_TRIES = 3
"""The least of so many counts for what training waits: whatever else a machine does only ever adds to it."""
KEEP = 2 * (NUM_TRIES + 1)
"""Durable steps, so many that none is superseded before it is flushed."""
CAP_BYTES_PER_S = 32 << 20
"""Of one rank, which is a host here: four of them leave a small machine's disk and cores to saves."""
STEP_WORK_BYTES = 8 << 20
EVERY_RANK = Xor(group=NUM_RANKS)

Figures = dict[str, tuple[float, float]]
"""For each thing measured: ours and theirs, higher is better."""


def measure(repetitions: int) -> list[Ratio]:
    """All rows; those of system calls only where strace may trace."""
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")))
        undo.callback(shutil.rmtree, folder)
        ratios: list[Ratio] = []
        for by in ("trainer", "daemon"):
            seen = on_gloo_ranks(NUM_RANKS, on_levels, folder / by, repetitions, by)[0]
            ratios += [ratio_of(name, [each[name] for each in seen], unit_of(name)) for name in seen[0]]
        ratios += measure_parity(folder / "parity", repetitions)
        memory = on_gloo_ranks(NUM_RANKS, held_memory, folder / "memory")[0]
        ratios += [ratio_of(name, [pair], unit_of(name)) for name, pair in memory.items()]
        ratios += [ratio_of(name, [pair], unit_of(name)) for name, pair in system_calls(folder).items()]
        return ratios


PAIRS = (
    ("plain", "xor"),
    ("plain", "double parity"),
    ("bare plain", "plain"),
    ("bare plain", "bare xor over gloo"),
    ("bare plain", "bare xor in shared memory"),
    ("bare xor over gloo", "xor"),
)
"""Kinds of saves to compare; above 1, the second takes less."""


def measure_parity(folder: Path, repetitions: int) -> list[Ratio]:
    """Blocking saves with parity beside plain ones, and the least that each can take."""
    seen = on_gloo_ranks(NUM_RANKS, blocking_saves, folder, repetitions)[0]
    return [
        compare(seen, f"blocking save, {unit}: {one} / {other}", (f"{other} {unit}", f"{one} {unit}"), "1/s")
        for one, other in PAIRS
        for unit in ("wall", "CPU")
    ]


def blocking_saves(rank: int, folder: Path, repetitions: int) -> list[dict[str, float]]:
    """On one rank: how often a second the slowest rank could save, and all ranks' CPU seconds pay for it."""
    torch.set_num_threads(1)
    state, bare = state_of(rank, STATE_BYTES), BareRank(folder / "bare", rank, STATE_BYTES)
    schemes: dict[str, Scheme] = {"xor": EVERY_RANK, "double parity": DoubleParity(group=NUM_RANKS)}
    with ExitStack() as undo:
        managers = {"plain": undo.enter_context(plain(folder))}
        for name, scheme in schemes.items():
            managers[name] = undo.enter_context(leveled(folder / name, rank, None, scheme))
        saves: dict[str, Callable[[int], object]] = {
            name: partial(_save, manager, state) for name, manager in managers.items()
        }
        saves |= {
            "bare plain": lambda _: bare.plain(),
            "bare xor over gloo": lambda _: bare.over_gloo(),
            "bare xor in shared memory": lambda _: bare.in_shared_memory(),
        }
        order, found = list(saves), []
        for step in range(repetitions + 1):
            took = {}
            for name in order:
                took[name] = blocking_save(partial(saves[name], step))
                bare.clear_up()
                await_removal(folder)
            order.append(order.pop(0))
            if step:  # the first save touches the memory that others use again
                found.append(
                    {
                        f"{name} {unit}": 1 / seconds
                        for name, pair in took.items()
                        for unit, seconds in zip(("wall", "CPU"), pair, strict=True)
                    }
                )
    return found


def await_removal(folder: Path) -> None:
    """Return when nothing is left of what saves have hidden: they remove it when nobody waits for them."""
    while any(folder.rglob(".penstock-gone-*")):
        time.sleep(1e-3)


def _save(manager: Manager, state: dict[str, Any], step: int) -> None:
    manager.save(step, state)


def blocking_save(save: Callable[[], object]) -> tuple[float, float]:
    """The wall time of the slowest rank, and the CPU seconds of all ranks."""
    dist.barrier()
    began_s, used_s = time.perf_counter(), time.process_time()
    save()
    used = torch.tensor([time.process_time() - used_s], dtype=torch.float64)
    took_s = largest(time.perf_counter() - began_s)
    dist.all_reduce(used)
    return took_s, float(used)


def unit_of(name: str) -> str:
    """What the two sides are, by the row's first word."""
    words = {"flush": "MiB/s", "step": "1/s", "memory:": "MiB (theirs: measured)", "calls:": "1/calls"}
    return words.get(name.split(maxsplit=1)[0], "1/s")


def on_levels(rank: int, folder: Path, repetitions: int, by: Literal["trainer", "daemon"]) -> list[Figures]:
    """On one rank: every repetition's figures, of the slowest rank."""
    torch.set_num_threads(1)
    state = state_of(rank, STATE_BYTES)
    flush = Flush(bandwidth=CAP_BYTES_PER_S, by=by)
    with plain(folder) as alone, leveled(folder, rank, flush) as cached:
        background_save(alone, 1, state)
        background_save(cached, 1, state)
        await_durable(folder, [1])
        beside = Beside(folder, folder / f"host-{rank}", by)
        return [
            one_repetition(alone, cached, state, beside, 2 + (NUM_TRIES + 1) * number)
            for number in range(repetitions)
        ]


@dataclass(frozen=True)
class Beside:
    """Where flushes go, and who does them."""

    folder: Path
    cache: Path
    by: str

    def written_bytes(self) -> int:
        """What the daemon has given to devices, as the kernel counts it; 0 where there is none."""
        folder = FlushFolder(self.cache)
        pid = folder.progress().pid
        if self.by != "daemon" or not folder.is_locked():
            return 0
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def one_repetition(
    alone: Manager, cached: Manager, state: dict[str, Any], beside: Beside, step: int
) -> Figures:
    """Quiet plain saves, then a cached one, and more of them beside its flush."""
    folder, by = beside.folder, beside.by
    quiet_s, before_bytes = step_time(), beside.written_bytes()
    plain_s = least([background_save(alone, step + number, state) for number in range(NUM_TRIES)])
    background_save(cached, step, state)
    began_s = time.perf_counter()
    beside_s = step_time()
    cached_s = least([background_save(cached, step + 1 + number, state) for number in range(NUM_TRIES)])
    await_durable(folder, range(step, step + NUM_TRIES + 1))
    took_s, cap = time.perf_counter() - began_s, CAP_BYTES_PER_S / 2**20
    flushed_bytes = (NUM_TRIES + 1) * STATE_BYTES
    found = {
        "save_async: plain / cached": (1 / cached_s[0], 1 / plain_s[0]),
        "save to commit: plain / cached": (1 / cached_s[1], 1 / plain_s[1]),
        "flush / its cap": (flushed_bytes / largest(took_s) / 2**20, cap),
        "step of training: quiet / beside a flush": (1 / largest(beside_s), 1 / largest(quiet_s)),
    }
    if by == "daemon":
        written = beside.written_bytes() - before_bytes
        found["flush by /proc/PID/io / its cap"] = -largest(-written / took_s / 2**20), cap
    return {f"{name} ({by})": pair for name, pair in found.items()}


def held_memory(rank: int, folder: Path) -> Figures:
    """On one rank: twice its state beside the most memory that it took, saving and rebuilding."""
    torch.set_num_threads(1)
    state = state_of(rank, LARGE_STATE_BYTES)
    base_bytes = resident_bytes()
    with leveled(folder, rank, None) as manager:
        saving_bytes = peak_of(lambda: manager.save(1, state)) - base_bytes
    if rank == 0:
        shutil.rmtree(folder / "host-0")
    dist.barrier()
    with leveled(folder, rank, None) as manager:
        rebuilding_bytes = peak_of(lambda: manager.restore(state)) - base_bytes
    return {
        name: (2 * LARGE_STATE_BYTES / 2**20, largest((LARGE_STATE_BYTES + extra) / 2**20))
        for name, extra in (
            ("memory: 2 states / saved with parity", saving_bytes),
            ("memory: 2 states / rebuilt and restored", rebuilding_bytes),
        )
    }


def system_calls(folder: Path) -> Figures:
    """Calls on a checkpoint's data files: a plain save's and two more beside those of cached saves."""
    if shutil.which("strace") is None:
        return {}
    calls = {way: calls_of(folder / f"calls-{way}", way) for way in ("plain", "single", "parity", "flushed")}
    for way, counted in calls.items():
        print(f"  {way}: {', '.join(f'{op} {number:g}' for op, number in counted.items())} a file")
    allowed = sum(calls["plain"].values()) + 2
    return {
        f"calls: plain and 2 / {way}": (1 / sum(calls[way].values()), 1 / allowed)
        for way in ("single", "parity", "flushed")
    }


def calls_of(folder: Path, way: str) -> Mapping[str, float]:
    """System calls by name, a data file, of one save by two ranks under strace."""
    folder.mkdir()
    trace = folder / "calls.strace"
    program = [sys.executable, __file__, "one-save", str(folder), way]
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-ttt", "-T", "-y", "-o", str(trace)]
    command += ["-e", "trace=%file,%desc", *program]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    with penstock.trace.load(trace, where="path LIKE '%.distcp'") as run:
        rows = run.events.filter("NOT contains(path, '/durable/')" if way != "plain" else "true")
        counted = dict(rows.aggregate("name, count(*)").fetchall())
        (num_files,) = rows.aggregate("count(DISTINCT parse_filename(path))").fetchall()[0]
    return {name: number / num_files for name, number in sorted(counted.items())}


def one_save(rank: int, folder: Path, way: str) -> None:
    """What strace looks at: one save, and what follows it."""
    torch.set_num_threads(1)
    state = {f"rank_{rank}": torch.ones(1 << 18)}
    flush = Flush(by="trainer") if way == "flushed" else None
    scheme = Single() if way == "single" else EVERY_RANK
    with plain(folder) if way == "plain" else leveled(folder, rank, flush, scheme) as manager:
        manager.save(1, state)


@contextmanager
def plain(folder: Path) -> Iterator[Manager]:
    """A manager of the fast level alone."""
    with Manager(folder / "fast", keep=1) as manager:
        yield manager


@contextmanager
def leveled(folder: Path, rank: int, flush: Flush | None, scheme: Scheme = EVERY_RANK) -> Iterator[Manager]:
    """A manager with caches on the fast level, each rank a host."""
    with Manager(
        folder / "durable",
        keep=KEEP,
        cache=folder / f"host-{rank}",
        redundancy=scheme,
        flush=flush,
        keep_cached=1,
        failure_domain=f"host-{rank}",
    ) as manager:
        yield manager


def state_of(rank: int, size_bytes: int) -> dict[str, Any]:
    """Tensors that no other rank has."""
    elements = size_bytes // NUM_TENSORS // 4
    return {f"rank_{rank}_{number}": torch.randn(elements) for number in range(NUM_TENSORS)}


def background_save(manager: Manager, step: int, state: dict[str, Any]) -> tuple[float, float]:
    """How long training waits on the slowest rank, and until the step is committed."""
    dist.barrier()
    began_s = time.perf_counter()
    handle = manager.save_async(step, state)
    blocked_s = time.perf_counter() - began_s
    handle.result()
    return largest(blocked_s), largest(time.perf_counter() - began_s)


def least(tries: list[tuple[float, float]]) -> tuple[float, float]:
    """The shortest of both times."""
    return min(blocked for blocked, _ in tries), min(whole for _, whole in tries)


def await_durable(folder: Path, wanted: Iterable[int]) -> None:
    """Wait until all ranks see these steps on the durable level."""
    steps, missing = StepCatalog(open_here(folder / "durable")), set(wanted)
    end_s = time.monotonic() + 120
    while missing := missing - set(steps.committed()):
        assert time.monotonic() < end_s, f"steps {missing} were never flushed"
        time.sleep(0.01)
    dist.barrier()


def step_time() -> float:
    """The median of some steps of a training that sleeps and then touches memory."""
    work, took = np.ones(STEP_WORK_BYTES // 8, dtype=np.int64), []
    for _ in range(15):
        began_s = time.perf_counter()
        time.sleep(0.02)
        work += 1
        took.append(time.perf_counter() - began_s)
    return float(np.median(took))


def peak_of(work: Callable[[], object]) -> int:
    """The most memory that this process had while `work` ran."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    work()
    return status_bytes("VmHWM")


def resident_bytes() -> int:
    """What this process has now."""
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def largest(figure: float) -> float:
    """The largest of all ranks'."""
    found = torch.tensor([figure], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one-save"]:
        on_gloo_ranks(2, one_save, Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["parity"]:
        with tempfile.TemporaryDirectory(
            prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")
        ) as place:
            for ratio in measure_parity(Path(place), repetitions=15):
                print(ratio.line(None))
    else:
        for ratio in measure(repetitions=5):
            print(ratio.line(None))
