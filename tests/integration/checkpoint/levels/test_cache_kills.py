"""A rank that dies at any call of its cache, while steps are saved and encoded: what is left restores."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.child_processes import FunctionRef
from tests.support.crash import Program, sweep
from tests.support.gloo_ranks import as_rank, on_gloo_ranks
from tests.support.known_states import blank_state, known_state, same_state
from tests.support.known_steps import files_below
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.checkpoint.levels.options import DoubleParity, Xor
from penstock.checkpoint.manager.manager import Manager
from penstock.storage.files.system_calls import FileCalls


def manager_of(rank: int, root: Path, size: int, cache: Any) -> Manager:
    return Manager(
        root / "durable",
        cache=cache,
        redundancy=Xor(group=size),
        failure_domain=f"host-{rank}",
        flush=None,
        timeout_s=60,
    )


def save_two(rank: int, calls: FileCalls, root: Path, size: int) -> None:
    cache = files_below(root / f"host-{rank}", calls)
    with manager_of(rank, root, size, cache) as manager:
        for step in (1, 2):
            manager.save(step, known_state(step, 1, rank))
            (root / f"rank-{rank}-saved-{step}").touch()


def save_as_rank(calls: FileCalls, *, root: Path, rank: int, size: int) -> None:
    as_rank(rank, size, f"{root}.meeting", FunctionRef.of(save_two), (calls, root, size))


def ranks_below(folder: Path, size: int, number: int) -> Sequence[Program]:
    root = folder / str(number)
    root.mkdir()
    return [partial(save_as_rank, root=root, rank=rank, size=size) for rank in range(size)]


def restore(rank: int, root: Path, size: int) -> int | None:
    state = blank_state(rank)
    with manager_of(rank, root, size, root / f"host-{rank}") as manager:
        step = manager.restore(state)
    assert step is None or same_state(state, known_state(step, 1, rank)), f"step {step} is not what was saved"
    return step


def check(folder: Path, size: int, number: int) -> None:
    """The newest step that any rank knew to be saved is there, or the one that was being saved."""
    root = folder / str(number)
    saved = max((int(path.name[-1]) for path in root.glob("rank-*-saved-*")), default=0)
    (step,) = set(on_gloo_ranks(size, restore, root, size))
    assert (step or 0) in (saved, saved + 1), f"killed at call {number}: {step} instead of {saved}"


def run_sweep(folder: Path, size: int, numbers: Sequence[int], victim: int) -> int:
    return sweep(partial(ranks_below, folder, size), partial(check, folder, size), numbers, victim=victim)


def restore_through(rank: int, calls: FileCalls, root: Path, size: int) -> None:
    with manager_of(rank, root, size, files_below(root / f"host-{rank}", calls)) as manager:
        manager.restore(blank_state(rank))


def restore_as_rank(calls: FileCalls, *, root: Path, rank: int, size: int) -> None:
    as_rank(rank, size, f"{root}.meeting", FunctionRef.of(restore_through), (calls, root, size))


def save_one(rank: int, root: Path, size: int) -> None:
    with manager_of(rank, root, size, root / f"host-{rank}") as manager:
        manager.save(1, known_state(1, 1, rank))


def rebuilders_below(folder: Path, size: int, number: int) -> Sequence[Program]:
    """Ranks that restore after the last one's host was lost."""
    root = folder / str(number)
    if not (folder / "saved").exists():
        on_gloo_ranks(size, save_one, folder / "saved", size)
        shutil.rmtree(folder / f"saved/host-{size - 1}")
    # A run that was moved: its caches name the place where it was.
    shutil.copytree(folder / "saved", root, ignore=shutil.ignore_patterns(".penstock-run"))
    return [partial(restore_as_rank, root=root, rank=rank, size=size) for rank in range(size)]


def check_rebuilt(folder: Path, size: int, number: int) -> None:
    root = folder / str(number)
    assert on_gloo_ranks(size, restore, root, size) == [1] * size, f"killed at call {number}"
    assert (root / f"host-{size - 1}/step-1/.metadata").exists()


def run_rebuilding_sweep(folder: Path, size: int, numbers: Sequence[int], victim: int) -> int:
    check = partial(check_rebuilt, folder, size)
    return sweep(partial(rebuilders_below, folder, size), check, numbers, victim=victim)


def test_a_rank_killed_while_a_step_is_rebuilt_costs_nothing(tmp_path: Path) -> None:
    assert run_rebuilding_sweep(tmp_path, 2, [25], victim=1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 3])
def test_killed_at_any_call_of_a_rebuild_no_rank_costs_anything(victim: int, tmp_path: Path) -> None:
    assert run_rebuilding_sweep(tmp_path, 4, range(1, 80, 2), victim=victim) > 10


def test_a_rank_killed_while_it_saves_or_encodes_costs_no_saved_step(tmp_path: Path) -> None:
    assert run_sweep(tmp_path, 2, [40, 102], victim=1) == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_killed_at_any_call_no_rank_costs_a_saved_step(victim: int, tmp_path: Path) -> None:
    assert run_sweep(tmp_path, 4, range(1, 241, 2), victim=victim) > 60


FEWER, MORE = [0, 3], [0, 3, 1, 2]
"""The hosts of a job's ranks when it starts again."""


def divided(step: int) -> dict[str, Any]:
    """The state of any number of ranks; zeros for step 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = (
        torch.randn(96, 33, generator=torch.Generator().manual_seed(step)) if step else torch.zeros(96, 33)
    )
    return {"sharded": distribute_tensor(values, mesh, [Shard(0)]), "common": torch.full((500,), step)}


def elastic(rank: int, root: Path, hosts: Sequence[int], calls: FileCalls | None = None) -> Manager:
    folder = root / f"host-{hosts[rank]}"
    return Manager(
        root / "durable",
        cache=folder if calls is None else files_below(folder, calls),
        redundancy=DoubleParity(group=4),
        failure_domain=folder.name,
        flush=None,
        timeout_s=60,
    )


def save_first(rank: int, root: Path, hosts: Sequence[int]) -> None:
    with elastic(rank, root, hosts) as manager:
        manager.save(1, divided(1))


def start_again(rank: int, calls: FileCalls, root: Path, hosts: Sequence[int]) -> None:
    with elastic(rank, root, hosts, calls) as manager:
        manager.restore(divided(0))
        manager.save(2, divided(2))


def start_again_as_rank(calls: FileCalls, *, root: Path, rank: int, hosts: Sequence[int]) -> None:
    as_rank(rank, len(hosts), f"{root}.meeting", FunctionRef.of(start_again), (calls, root, hosts))


def starters_below(
    folder: Path, before: Sequence[int], hosts: Sequence[int], number: int
) -> Sequence[Program]:
    """Ranks on other hosts than those that saved; what the hosts that are gone had is gone, too."""
    root = folder / str(number)
    if not (folder / "saved").exists():
        on_gloo_ranks(len(before), save_first, folder / "saved", before)
        for host in set(before) - set(hosts):
            shutil.rmtree(folder / f"saved/host-{host}")
    shutil.copytree(folder / "saved", root, ignore=shutil.ignore_patterns(".penstock-run"))
    return [partial(start_again_as_rank, root=root, rank=rank, hosts=hosts) for rank in range(len(hosts))]


def restore_elastic(rank: int, root: Path, hosts: Sequence[int]) -> int | None:
    state = divided(0)
    with elastic(rank, root, hosts) as manager:
        step = manager.restore(state)
    expected = divided(step or 0)
    assert torch.equal(state["sharded"].to_local(), expected["sharded"].to_local()), f"step {step} is another"
    assert torch.equal(state["common"], expected["common"]), f"step {step} is another"
    return step


def check_elastic(folder: Path, hosts: Sequence[int], number: int) -> None:
    (step,) = set(on_gloo_ranks(len(hosts), restore_elastic, folder / str(number), hosts))
    assert step in (1, 2), f"killed at call {number}: step {step}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("before", "hosts"), [([0, 1, 2, 3], FEWER), (FEWER, MORE)], ids=["fewer nodes", "more nodes"]
)
def test_killed_at_any_call_while_a_job_starts_on_other_nodes_nothing_is_lost(
    before: Sequence[int], hosts: Sequence[int], victim: int, tmp_path: Path
) -> None:
    begin, check = partial(starters_below, tmp_path, before, hosts), partial(check_elastic, tmp_path, hosts)
    assert sweep(begin, check, range(1, 400, 9), victim=victim) > 10
