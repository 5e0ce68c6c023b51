"""64 processes save and 64 load, sharded by FSDP2 and by HSDP, each what the other has saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock.checkpoint as pc

if TYPE_CHECKING:
    from pathlib import Path

NUM_RANKS = 64
LIMIT_S = 900.0
MESHES = {"fsdp": (NUM_RANKS,), "hsdp": (8, 8)}
"""HSDP: 8 replicas of a model that is sharded over 8 ranks."""


def whole_model(*, is_filled: bool) -> torch.nn.Module:
    """A model with equal values on all ranks; some parameters have fewer rows than there are ranks."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(20, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 3))
    if not is_filled:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    return model


def state_of(rank: int, kind: str, *, is_filled: bool = True) -> dict[str, Any]:
    names = ("replicas", "shards")[-len(MESHES[kind]) :]
    mesh = init_device_mesh("cpu", MESHES[kind], mesh_dim_names=names)
    model = whole_model(is_filled=is_filled)
    fully_shard(model, mesh=mesh)
    return {
        "model": model.state_dict(),
        "scale": torch.full((33,), 0.5 * is_filled),
        "position": rank * 10 * is_filled,
        "step": 3 * is_filled,
    }


def save_and_load_crosswise(rank: int, folder: Path) -> list[str]:
    """Save twice with each kind of sharding, and load with the other; what is wrong afterwards."""
    wrong = []
    for kind, other in (("fsdp", "hsdp"), ("hsdp", "fsdp")):
        with pc.Manager(folder / kind) as manager:
            state = state_of(rank, kind)
            manager.save(1, state)
            # With the plan of the first.
            manager.save(2, state | {"step": 4})
            found = state_of(rank, other, is_filled=False)
            manager.restore(found)
        expected = whole_model(is_filled=True).state_dict()
        wrong += [
            f"{kind} to {other}: {name}"
            for name, value in found["model"].items()
            if not torch.equal(value.full_tensor(), expected[name])
        ]
        if not torch.equal(found["scale"], torch.full((33,), 0.5)):
            wrong.append(f"{kind} to {other}: scale")
        if (found["position"], found["step"]) != (rank * 10, 4):
            wrong.append(f"{kind} to {other}: position or step")
    dist.barrier()
    return wrong


@pytest.mark.timeout(2 * LIMIT_S)
def test_64_ranks_save_and_64_load_bit_for_bit(tmp_path: Path) -> None:
    wrong = on_gloo_ranks(NUM_RANKS, save_and_load_crosswise, tmp_path, limit_s=LIMIT_S)
    assert not any(wrong), wrong
    expected = whole_model(is_filled=True).state_dict()
    for kind in MESHES:
        found = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
        load_by_torch(found, checkpoint_id=tmp_path / kind / "step-2", no_dist=True)
        assert all(torch.equal(found["model"][name], value) for name, value in expected.items()), kind
