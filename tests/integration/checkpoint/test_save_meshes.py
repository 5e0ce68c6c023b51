"""States of random meshes, placements and dtypes: saved by the engine, loaded by stock torch onto others."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.checkpoint.api import save
from penstock.checkpoint.torch_dcp import SavePlanner, Writer

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64),
    *(torch.int8, torch.int64, torch.bool, torch.complex64),
)


def _content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (math.prod(shape) * dtype.itemsize,)
    content = torch.randint(
        0, 2 if dtype is torch.bool else 256, size, generator=generator, dtype=torch.uint8
    )
    return content.view(dtype).reshape(shape)


def _placed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """The part of `whole` that this rank holds, as a view where it is one."""
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(dim, min(offset, local.size(dim)) if size == 0 else offset, size)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _placements(chance: random.Random, num_dims: int, mesh: DeviceMesh) -> list[Placement]:
    dims = list(range(num_dims))
    chance.shuffle(dims)
    # No dimension is sharded twice: in which order such shards lie is torch's affair.
    return [Shard(dims.pop()) if dims and chance.random() < 0.6 else Replicate() for _ in range(mesh.ndim)]


def random_states(rank: int, root: Path, shapes: list[tuple[int, ...]], seed: int) -> None:
    """Save a random state on each mesh, and load it onto other placements of it."""
    for number, mesh_shape in enumerate(shapes):
        chance = random.Random(f"{seed} {number}")
        mesh = init_device_mesh("cpu", mesh_shape)
        wholes = {
            f"t{each}": _content(
                tuple(chance.randint(0, 9) for _ in range(chance.randint(0, 3))), chance.choice(DTYPES), each
            )
            for each in range(8)
        }
        state: dict[str, Any] = {
            name: _placed(whole, mesh, _placements(chance, whole.dim(), mesh))
            for name, whole in wholes.items()
        }
        path = root / f"step-{number}"
        if number % 2:
            stock_save(state, storage_writer=Writer(path), planner=SavePlanner())
        else:
            save(state, path)
        found = {
            name: _placed(torch.zeros_like(whole), mesh, _placements(chance, whole.dim(), mesh))
            for name, whole in wholes.items()
        }
        stock_load(dict(found), checkpoint_id=path)
        for name, value in found.items():
            expected = _placed(wholes[name], mesh, list(value.placements)).to_local()
            where = f"{name} on {mesh_shape}, {value.placements}, rank {rank}"
            plain = [each.contiguous().reshape(-1).view(torch.uint8) for each in (value.to_local(), expected)]
            assert plain[0].equal(plain[1]), where


def test_random_states_of_two_ranks_are_loaded_by_stock_torch(tmp_path: Path) -> None:
    on_gloo_ranks(2, random_states, tmp_path, [(2,), (2, 1), (1, 2), (2,)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_states_of_four_ranks_are_loaded_by_stock_torch(tmp_path: Path, seed: int) -> None:
    on_gloo_ranks(4, random_states, tmp_path, [(4,), (2, 2), (4, 1), (1, 4), (2, 2), (2, 2)], seed)
