"""What a process holds beside its own state while a step is protected and rebuilt: blocks, no states."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.levels.options import DoubleParity, Scheme, Xor
from penstock.checkpoint.manager.manager import Manager

STATE_BYTES = 64 << 20
MOST_STATES = 2.3
"""About twice its own: a state of this size is small enough for blocks and buffers to show."""


def memory_bytes(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(each.split()[1]) << 10 for each in status.splitlines() if each.startswith(line))


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def state_of(rank: int, size_bytes: int = STATE_BYTES) -> dict[str, torch.Tensor]:
    return {f"own_{rank}": torch.full((size_bytes // 8,), rank, dtype=torch.int64)}


def manager_of(rank: int, root: Path, scheme: Scheme) -> Manager:
    host = f"host-{rank}"
    return Manager(
        root / "durable",
        cache=root / host,
        failure_domain=host,
        redundancy=scheme,
        flush=None,
        staging_bytes=STATE_BYTES // 2,
        timeout_s=120,
    )


def peaks(rank: int, root: Path, scheme: Scheme, lost: tuple[int, ...]) -> tuple[float, float]:
    """What a save, and a restore with a rebuild, held at most, in states."""
    # Little first: what is imported and compiled when it is needed is no part of the figures.
    peaks_of(state_of(rank, 4096), rank, root / "little", scheme, lost)
    before = forget_peak()
    saving, restoring = peaks_of(state_of(rank), rank, root / "large", scheme, lost)
    return (saving - before) / STATE_BYTES, (restoring - before) / STATE_BYTES


def peaks_of(
    state: dict[str, torch.Tensor], rank: int, root: Path, scheme: Scheme, lost: tuple[int, ...]
) -> tuple[int, int]:
    with manager_of(rank, root, scheme) as manager:
        manager.save_async(1, state)
    saving = memory_bytes("VmHWM")
    dist.barrier()
    if rank in lost:
        shutil.rmtree(root / f"host-{rank}")
    dist.barrier()
    state[f"own_{rank}"].fill_(-1)
    forget_peak()
    with manager_of(rank, root, scheme) as manager:
        assert manager.restore(state) == 1
    restoring = memory_bytes("VmHWM")
    assert bool((state[f"own_{rank}"] == rank).all())
    return saving, restoring


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "lost"),
    [(Xor(group=4), (2,)), (DoubleParity(group=4), (0, 3))],
    ids=["xor", "double parity"],
)
def test_no_process_holds_more_than_about_twice_its_own_state(
    scheme: Scheme, lost: tuple[int, ...], tmp_path: Path
) -> None:
    for saving, restoring in on_gloo_ranks(scheme.group, peaks, tmp_path, scheme, lost):
        assert saving < MOST_STATES
        assert restoring < MOST_STATES
