"""Cached steps restored elsewhere: by ranks on other nodes, by more or fewer of them, and rebuilt first."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.checkpoint.levels.options import DoubleParity, Partner, Scheme, Xor
from penstock.checkpoint.manager.manager import Manager

RANKS, PER_HOST = 8, 2


def full(step: int) -> torch.Tensor:
    return torch.randn(96, 33, generator=torch.Generator().manual_seed(step))


def state_on(group: Any, step: int) -> dict[str, Any]:
    of = group or dist.group.WORLD
    assert of is not None
    mesh = DeviceMesh.from_group(of, "cpu")
    values = full(step) if step else torch.zeros(96, 33)
    return {
        "sharded": distribute_tensor(values, mesh, [Shard(0)]),
        "common": torch.full((500,), step, dtype=torch.int64),
        "step": step,
    }


def manager_of(
    rank: int, group: Any, root: Path, scheme: Scheme | list[Scheme], hosts: list[int], **choices: Any
) -> Manager:
    """A manager of the ranks of `group`; rank R of it runs on host `hosts[R]`."""
    host = f"host-{hosts[rank]}"
    return Manager(
        root / "durable",
        cache=root / host,
        failure_domain=host,
        redundancy=scheme,
        process_group=group,
        timeout_s=60,
        **choices,
    )


def restored(
    ranks: list[int], group: Any, root: Path, hosts: list[int], scheme: Scheme
) -> tuple[int | None, list[str]]:
    rank = dist.get_rank()
    state = state_on(group, 0)
    with manager_of(ranks.index(rank), group, root, scheme, hosts, flush=None) as manager:
        step = manager.restore(state)
        if step is not None:
            sharded: DTensor = state["sharded"]
            assert torch.equal(sharded.full_tensor(), full(step))
            assert torch.equal(state["common"], torch.full((500,), step, dtype=torch.int64))
            assert state["step"] == step
        return step, [each.reason for each in manager.skipped_steps]


def save_by_all(root: Path, scheme: Scheme, flush: Any = None) -> None:
    hosts = [rank // PER_HOST for rank in range(RANKS)]
    with manager_of(dist.get_rank(), None, root, scheme, hosts, flush=flush) as manager:
        manager.save(1, state_on(None, 1))


def lose(root: Path, *hosts: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for host in hosts:
            shutil.rmtree(root / f"host-{host}")
    dist.barrier()


def many_ways(rank: int, root: Path) -> list[Any]:
    """One job of eight ranks that plays jobs of eight, four and two, on nodes of all kinds."""
    everybody, four, two = list(range(RANKS)), [0, 1, 2, 3], [0, 1]
    group_of_four, group_of_two = dist.new_group(four), dist.new_group(two)
    told: list[Any] = []
    scheme = DoubleParity(group=4)
    save_by_all(root / "a", scheme)
    # Ranks moved: the hosts are the same, in another order.
    told.append(restored(everybody, None, root / "a", [3, 3, 1, 1, 0, 0, 2, 2], scheme))
    # Half of the ranks on two of four hosts; the others' shares are rebuilt on these two.
    if rank in four:
        told.append(restored(four, group_of_four, root / "a", [0, 0, 1, 1], Xor(group=2)))
    lose(root / "a", 2, 3)
    # What was rebuilt there gives all of it to one pair, of which each rank speaks for a host.
    if rank in two:
        told.append(restored(two, group_of_two, root / "a", [0, 1], Xor(group=2)))
    dist.barrier()
    # Twice as many ranks as have saved, half of them on hosts that have never seen the step.
    if rank in four:
        state = state_on(group_of_four, 7)
        with manager_of(four.index(rank), group_of_four, root / "b", Xor(group=4), four, flush=None) as few:
            few.save(7, state)
    lose(root / "b", 2)
    told.append(restored(everybody, None, root / "b", [4, 4, 0, 1, 5, 3, 6, 2], Xor(group=4)))
    return told


def test_any_placement_and_number_of_ranks_restores_bit_for_bit(tmp_path: Path) -> None:
    results = on_gloo_ranks(RANKS, many_ways, tmp_path)
    assert results[0] == [(1, []), (1, []), (1, []), (7, [])]
    assert results[7] == [(1, []), (7, [])]
    assert not (tmp_path / "a/durable").exists() or not list((tmp_path / "a/durable").glob("step-*"))


class Told(logging.Handler):
    """The messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("penstock").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


STARTS = [([0, 1, 2, 3], (1, 2)), ([3, 0], (3,)), ([0], ()), ([2, 0, 1, 3], (0, 2)), ([2, 0, 3, 1], ())]
"""For each start of a job: the hosts of its ranks, and those that are lost when it ends."""


def one_script_on_any_nodes(rank: int, root: Path) -> list[str]:
    """At each start, restore what the one before has saved, and save the next step."""
    told = Told()
    for step, (hosts, lost) in enumerate(STARTS, start=1):
        ranks = list(range(len(hosts)))
        group = dist.new_group(ranks)
        if rank in ranks:
            state = state_on(group, 0)
            with manager_of(rank, group, root, DoubleParity(group=4), hosts, flush=None) as manager:
                assert manager.restore(state) == (step - 1 or None)
                if step > 1:
                    assert torch.equal(state["sharded"].full_tensor(), full(step - 1))
                    assert torch.equal(state["common"], torch.full((500,), step - 1, dtype=torch.int64))
                manager.save(step, state_on(group, step))
        lose(root, *lost)
    return [message for message in told.messages if "does not fit" in message]


def test_one_script_starts_on_four_two_one_and_four_nodes_and_restores_bit_for_bit(tmp_path: Path) -> None:
    on_two, on_one = on_gloo_ranks(4, one_script_on_any_nodes, tmp_path)[0]
    wanted = "Redundancy: double-parity in groups of 4 does not fit the failure domains of this job"
    assert on_two.startswith(f"{wanted}, 2 with 2 ranks (host-0, host-3)")
    assert "new checkpoints are protected by xor in groups of 2" in on_two
    assert on_one.startswith(f"{wanted}, 1 with 1 ranks (host-0)")
    assert "a single copy, which survives the loss of no host" in on_one


def one_too_many(_rank: int, root: Path, scheme: Scheme, hosts: tuple[int, ...]) -> list[Any]:
    """Restore by eight ranks on four hosts: after as many losses as the scheme survives, and one more."""
    everybody = list(range(RANKS))
    at_home = [rank // PER_HOST for rank in everybody]
    save_by_all(root, scheme)
    lose(root, *hosts[:-1])
    told: list[Any] = [restored(everybody, None, root, at_home, scheme)]
    full_again = [(root / f"host-{host}/step-1/.metadata").exists() for host in hosts]
    lose(root, *hosts)
    try:
        restored(everybody, None, root, at_home, scheme)
    except OSError as error:
        told.append(str(error))
    return [*told, full_again]


@pytest.mark.parametrize(
    ("scheme", "hosts"),
    [
        pytest.param(Xor(group=4), (1, 2), marks=pytest.mark.slow, id="xor"),
        pytest.param(Partner(group=4), (2, 3), marks=pytest.mark.slow, id="partner"),
        pytest.param(DoubleParity(group=4), (0, 2, 3), id="double parity", marks=pytest.mark.slow),
    ],
)
def test_hosts_of_several_ranks_come_back_and_one_loss_more_names_files_and_hosts(
    scheme: Scheme, hosts: tuple[int, ...], tmp_path: Path
) -> None:
    for result in on_gloo_ranks(RANKS, one_too_many, tmp_path, scheme, hosts):
        assert result[0] == (1, [])
        assert result[2] == [True] * len(hosts)
        assert "of one group lost their files (__" in result[1]
        assert f"saved on host-{hosts[0]}, host-{hosts[1]}" in result[1]
