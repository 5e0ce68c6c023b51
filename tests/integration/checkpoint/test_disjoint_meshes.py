"""DTensors of meshes that share no rank: each half of a job holds tensors of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import penstock.checkpoint as pc
from penstock.errors import RankError

if TYPE_CHECKING:
    from pathlib import Path

ROWS = torch.arange(20.0).reshape(10, 2)


def half(rank: int, size: int) -> DeviceMesh:
    """The mesh of this rank's half of the job; making one is a collective call of all ranks."""
    numbers = torch.arange(size).reshape(2, -1)
    meshes = [DeviceMesh("cpu", row, mesh_dim_names=("shard",)) for row in numbers]
    return meshes[rank // numbers.shape[1]]


def cut(content: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(content, mesh, [Shard(0)], src_data_rank=None)


def save_halves(rank: int, root: Path) -> None:
    mesh = half(rank, 4)
    own = ROWS + 100 * (rank // 2)
    pc.save({"part": {f"w{rank // 2}": cut(own, mesh), "same": cut(ROWS, mesh)}}, root / "saved")


def load_halves(rank: int, root: Path, size: int) -> list[list[list[float]]]:
    mesh = half(rank, size)
    which = rank // (size // 2)
    state = {"part": {name: cut(torch.zeros(10, 2), mesh) for name in (f"w{which}", "same")}}
    pc.load(state, root / "saved")
    return [value.full_tensor().tolist() for value in state["part"].values()]


def load_other_halves(rank: int, root: Path) -> list[list[list[float]]]:
    mesh = half(rank, 2)
    names = ("w0", "w1", "same")
    part = {name: distribute_tensor(torch.zeros(10, 2), mesh, [Replicate()]) for name in names}
    pc.load({"part": part}, root / "saved")
    return [value.full_tensor().tolist() for value in part.values()]


def test_halves_with_meshes_of_their_own_come_back_on_as_many_ranks_and_on_fewer(tmp_path: Path) -> None:
    on_gloo_ranks(4, save_halves, tmp_path)
    for size in (4, 2):
        for rank, (own, same) in enumerate(on_gloo_ranks(size, load_halves, tmp_path, size)):
            assert own == (ROWS + 100 * (rank // (size // 2))).tolist()
            assert same == ROWS.tolist()
    for found in on_gloo_ranks(2, load_other_halves, tmp_path):
        assert found == [ROWS.tolist(), (ROWS + 100).tolist(), ROWS.tolist()]


def save_other_values(rank: int, root: Path) -> str:
    own = cut(ROWS + 100 * (rank // 2), half(rank, 4))
    with pytest.raises(RankError) as caught:
        pc.save({"part": {"w": own}}, root / "saved", replicas="compare")
    return str(caught.value)


def test_halves_with_other_values_under_one_name_are_refused_if_compared(tmp_path: Path) -> None:
    for told in on_gloo_ranks(4, save_other_values, tmp_path):
        assert "part.w[0:5, 0:2] differs between rank 0 and rank 2" in told
    assert not (tmp_path / "saved").exists()
