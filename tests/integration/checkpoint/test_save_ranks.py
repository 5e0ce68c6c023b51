"""Saves of several ranks: replicas share the work, differing objects are kept, failures reach all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.checkpoint.api import save
from penstock.checkpoint.torch_dcp import SavePlanner, Writer
from penstock.errors import RankFailed

if TYPE_CHECKING:
    from pathlib import Path

WAYS = ("save", "Writer")
WEIGHT_BYTES = 4 * 1000 * 300


def _weight() -> torch.Tensor:
    return torch.arange(1000 * 300, dtype=torch.float32).reshape(1000, 300)


def replicas(rank: int, root: Path) -> list[int]:
    """The bytes of the files that this rank wrote, each way."""
    return [save_replicas(rank, root / way, way) for way in WAYS]


def save_replicas(rank: int, root: Path, way: str) -> int:
    """Save what both ranks hold alike; the bytes of files that this rank wrote."""
    state = {"weight": _weight(), "small": torch.arange(5), "step": 3}
    if way == "save":
        stats = save(state, root / "step")
        assert len(stats) == dist.get_world_size()
    else:
        stock_save(state, storage_writer=Writer(root / "step"), planner=SavePlanner())
    dist.barrier()
    found: dict[str, Any] = {"weight": torch.zeros(1000, 300), "small": torch.zeros(5).long(), "step": 0}
    stock_load(found, checkpoint_id=root / "step")
    assert found["weight"].equal(_weight())
    assert found["small"].tolist() == [0, 1, 2, 3, 4]
    assert found["step"] == 3
    return sum(path.stat().st_size for path in (root / "step").glob(f"__{rank}_*.distcp"))


def test_replicas_divide_their_bytes_and_stock_torch_loads_them_on_both(both_ranks: Job) -> None:
    for each in both_ranks.told("replicas", 0) + both_ranks.told("replicas", 1):
        assert WEIGHT_BYTES / 2 <= each <= WEIGHT_BYTES / 2 + 64 * 1024


def shards_and_own_objects(rank: int, root: Path) -> list[str]:
    """What went wrong, each way: nothing, or this raises."""
    for way in WAYS:
        save_shards_and_own_objects(rank, root / way, way)
    return []


def save_shards_and_own_objects(rank: int, root: Path, way: str) -> None:
    """Save a sharded, a replicated and an uneven DTensor, and an object that differs from rank to rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "sharded": distribute_tensor(_weight(), mesh, [Shard(0)]),
        "columns": distribute_tensor(_weight(), mesh, [Shard(1)]),
        "uneven": distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]),
        "replicated": distribute_tensor(_weight(), mesh, [Replicate()]),
        "rng": torch.full((4,), rank).tolist(),
        f"only{rank}": torch.full((2,), float(rank)),
    }
    if way == "save":
        save(state, root / "step")
    else:
        stock_save(state, storage_writer=Writer(root / "step"), planner=SavePlanner())
    found = {
        name: DTensor.from_local(
            torch.zeros_like(value.to_local()),
            mesh,
            value.placements,
            shape=value.shape,
            stride=value.stride(),
            run_check=False,
        )
        for name, value in state.items()
        if isinstance(value, DTensor)
    }
    plain: dict[str, Any] = {"rng": None, "only0": torch.zeros(2), "only1": torch.zeros(2)}
    stock_load({**found, **plain}, checkpoint_id=root / "step")
    for name, value in found.items():
        assert value.to_local().equal(state[name].to_local()), name
    whole = {**plain, f"rng@rank{dist.get_world_size() - 1}": None}
    stock_load(whole, checkpoint_id=root / "step")
    assert whole["rng"] == [0, 0, 0, 0]
    assert whole["rng@rank1"] == [1, 1, 1, 1]
    assert whole["only0"].tolist() == [0.0, 0.0]
    assert whole["only1"].tolist() == [1.0, 1.0]


def test_shards_are_kept_and_so_is_each_ranks_own_object(both_ranks: Job) -> None:
    assert both_ranks.told("shards_and_own_objects", 0) == both_ranks.told("shards_and_own_objects", 1) == []


def one_cannot_pack(rank: int, root: Path) -> str:
    """One rank holds what cannot be packed."""
    state = {"weight": _weight(), "odd": (lambda: None) if rank == 1 else 0}
    with pytest.raises(RankFailed) as caught:
        save(state, root / "step")
    return str(caught.value)


def test_an_object_that_cannot_be_packed_fails_all_ranks_before_writing(both_ranks: Job) -> None:
    told = [both_ranks.told("one_cannot_pack", rank) for rank in range(2)]
    assert told[0] == told[1]
    assert "Rank 1" in told[0]
    assert not (both_ranks.root / "one_cannot_pack").exists()


def nothing_on_one(rank: int, root: Path) -> None:
    """Only rank 0 holds anything."""
    save({"small": torch.arange(5)} if rank == 0 else {}, root / "step")
    found = {"small": torch.zeros(5, dtype=torch.int64)}
    stock_load(found, checkpoint_id=root / "step")
    assert found["small"].tolist() == [0, 1, 2, 3, 4]


def test_a_rank_with_nothing_to_write_does_not_block_others(both_ranks: Job) -> None:
    written = (both_ranks.root / "nothing_on_one/step").glob("*.distcp")
    assert [path.name for path in written] == ["__0_0.distcp"]


def disjoint_groups(rank: int, root: Path) -> None:
    """Each rank saves in a group of its own."""
    groups = [dist.new_group([member]) for member in range(2)]
    save({"mine": torch.full((3,), rank)}, root / f"step-{rank}", process_group=groups[rank])


def test_disjoint_groups_save_at_the_same_time(both_ranks: Job) -> None:
    saved = (both_ranks.root / "disjoint_groups").iterdir()
    assert {path.name for path in saved} == {"step-0", "step-1"}


def torchs_async_save(rank: int, root: Path) -> bool:
    """Save by torch's own background save, and overwrite the state before it is done."""
    state: dict[str, Any] = {"weight": _weight() + rank, "step": 3}
    future = async_save(state, storage_writer=Writer(root / "step"), planner=SavePlanner())
    state["weight"].zero_()
    future.result()  # type: ignore[union-attr] # a future without a staging executor
    # Ranks disagree, so each has saved its own.
    name = f"weight@rank{rank}" if rank else "weight"
    found = {name: torch.zeros(1000, 300)}
    stock_load(found, checkpoint_id=root / "step")
    return torch.equal(found[name], _weight() + rank)


def test_torchs_async_save_through_the_writer_is_consistent(both_ranks: Job) -> None:
    assert both_ranks.told("torchs_async_save", 0)
    assert both_ranks.told("torchs_async_save", 1)


PROGRAMS = (
    replicas,
    shards_and_own_objects,
    one_cannot_pack,
    nothing_on_one,
    disjoint_groups,
    torchs_async_save,
)


def all_programs(rank: int, root: Path) -> dict[str, Any]:
    """What each program tells on this rank. One job for all: starting ranks takes longest."""
    return {program.__name__: program(rank, root / program.__name__) for program in PROGRAMS}


class Job:
    """What all programs told and left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._told = on_gloo_ranks(2, all_programs, root)

    def told(self, program: str, rank: int) -> Any:
        return self._told[rank][program]


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("ranks"))
