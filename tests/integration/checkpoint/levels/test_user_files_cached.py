"""Files that programs write themselves, in caches: protected, rebuilt, brought home, fetched, flushed."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.levels.options import Flush, Xor
from penstock.checkpoint.manager.manager import Manager
from penstock.errors import ObjectNotFound
from penstock.storage.in_memory import MemoryStorage

RANKS = 4


def content(rank: int, step: int) -> bytes:
    return bytes([step, rank]) * (1000 * (rank + 1))


def manager_of(rank: int, root: Path, host: int, flush: Flush | None, **choices: Any) -> Manager:
    return Manager(
        root / "durable",
        cache=root / f"host-{host}",
        failure_domain=f"host-{host}",
        redundancy=Xor(group=4),
        flush=flush,
        timeout_s=60,
        **choices,
    )


def write(manager: Manager, rank: int, steps: int) -> None:
    for step in range(1, steps + 1):
        with manager.output(f"step-{step}") as out:
            out.path(f"rank_{rank}.bin").write_bytes(content(rank, step))
            out.path(f"rank_{rank}.txt").write_text(f"rank {rank} of step {step}")


def restart(rank: int, root: Path, host: int) -> tuple[int | None, str, list[str]]:
    """The step, the folder that paths lead to, and what was passed over."""
    with manager_of(rank, root, host, None) as manager, manager.restart() as found:
        if found.step is None:
            return None, "", []
        path = found.path(f"rank_{rank}.bin")
        assert path.read_bytes() == content(rank, found.step)
        assert found.path(f"rank_{rank}.txt").read_text() == f"rank {rank} of step {found.step}"
        return found.step, str(path.relative_to(root)), [each.reason for each in manager.skipped_steps]


def lose(root: Path, *hosts: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for host in hosts:
            shutil.rmtree(root / f"host-{host}")
    dist.barrier()


def in_all_ways(rank: int, root: Path) -> list[Any]:
    told: list[Any] = []
    with manager_of(rank, root, rank, Flush(every=2, by="trainer"), keep_cached=2) as manager:
        write(manager, rank, 3)
        with manager.output("fields", checkpoint=False) as out:
            out.path(f"part-{rank}").write_bytes(content(rank, 9))
    if rank == 0:
        shutil.rmtree(root / "durable/step-3")
    dist.barrier()
    told.append(restart(rank, root, rank))
    # One host is lost; then the ranks move by one, so that each finds its files on another's node.
    lose(root, 2)
    told.append(restart(rank, root, rank))
    told.append(restart(rank, root, (rank + 1) % RANKS))
    # One flipped byte is found before anybody gets a path, and rebuilt.
    if rank == 0:
        victim = root / "host-1/step-3/rank_0.bin"
        victim.write_bytes(content(0, 3)[:-1] + b"!")
    dist.barrier()
    told.append(restart(rank, root, (rank + 1) % RANKS))
    # After the move each share lies on two hosts. Three lost hosts are too many for the newest step, and the
    # one before is fetched and protected again.
    lose(root, 0, 1, 2)
    told.append(restart(rank, root, rank))
    lose(root, 3)
    told.append(restart(rank, root, rank))
    with manager_of(rank, root, rank, None) as manager, manager.restart() as found:
        try:
            found.path(f"rank_{(rank + 1) % RANKS}.bin")
        except ObjectNotFound as error:
            told.append(str(error))
    return told


def test_sets_of_files_survive_losses_moves_and_damage(tmp_path: Path) -> None:
    for rank, told in enumerate(on_gloo_ranks(RANKS, in_all_ways, tmp_path)):
        moved = (rank + 1) % RANKS
        assert told[0] == told[1] == (3, f"host-{rank}/step-3/rank_{rank}.bin", [])
        assert told[2] == told[3] == (3, f"host-{moved}/step-3/rank_{rank}.bin", [])
        step, path, reasons = told[4]
        assert (step, path) == (2, f"host-{rank}/step-2/rank_{rank}.bin")
        assert "lost their files" in reasons[0]
        assert told[5][:2] == (2, f"host-{rank}/step-2/rank_{rank}.bin")
        assert f"is on the node of rank {moved}, not on that of rank {rank}" in told[6]
    assert (tmp_path / "durable/step-2/penstock.json").exists()
    assert not (tmp_path / "durable/step-3").exists()
    assert (tmp_path / "durable/fields/part-3").read_bytes() == content(3, 9)


def test_from_an_object_store_files_come_back_through_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    durable = MemoryStorage("mem://own-files")
    with Manager(durable, cache=cache) as manager:
        write(manager, 0, 1)
    shutil.rmtree(cache)
    with Manager(durable, cache=cache) as manager, manager.restart() as found:
        assert found.path("rank_0.bin").read_bytes() == content(0, 1)
        assert found.path("rank_0.bin").is_relative_to(cache)
