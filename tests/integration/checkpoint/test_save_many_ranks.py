"""64 processes save together, and 16 load: more ranks than hear each other in one hop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import penstock.checkpoint as pc

LIMIT_S = 1500.0
NUM_TENSORS = 20


def values() -> dict[str, torch.Tensor]:
    """The whole tensors: sharded ones, of which not every rank has rows, and replicated ones."""
    random = torch.Generator().manual_seed(7)
    sharded = {f"w{number}": torch.rand(40 + number, 8, generator=random) for number in range(NUM_TENSORS)}
    return sharded | {f"norm{number}": torch.rand(33, generator=random) for number in range(NUM_TENSORS)}


def state_of(rank: int, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {
        name: distribute_tensor(value, mesh, [Shard(0)]) if name.startswith("w") else value.clone()
        for name, value in whole.items()
    }
    return {"model": model, "position": rank * 10, "step": 3}


def save(rank: int, folder: str) -> tuple[int, int]:
    """Save twice through a manager: the second time with the plan of the first."""
    with pc.Manager(folder) as manager:
        first = manager.save(1, state_of(rank, values()))
        second = manager.save(2, state_of(rank, values()))
    return first.payload_bytes, second.payload_bytes


def load(rank: int, folder: str) -> bool:
    whole = values()
    state = state_of(rank, {name: torch.zeros_like(value) for name, value in whole.items()})
    with pc.Manager(folder) as manager:
        manager.restore(state)
    same = [
        torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, whole[name])
        for name, value in state["model"].items()
    ]
    return all(same) and state["position"] == rank * 10 and state["step"] == 3


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_64_ranks_save_and_16_load_bit_for_bit(tmp_path: Path) -> None:
    saved = on_gloo_ranks(64, save, str(tmp_path), limit_s=LIMIT_S)
    num_bytes = sum(value.nbytes for value in values().values())
    assert set(saved) == {(num_bytes, num_bytes)}
    assert all(on_gloo_ranks(16, load, str(tmp_path), limit_s=LIMIT_S))
    stock = {"model": {name: torch.zeros_like(value) for name, value in values().items()}}
    newest = max(folder for folder in tmp_path.iterdir() if (folder / ".metadata").exists())
    load_by_torch(stock, checkpoint_id=newest, no_dist=True)
    assert all(torch.equal(stock["model"][name], value) for name, value in values().items())
