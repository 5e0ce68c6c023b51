"""A manifest has the device mesh of the state."""

from pathlib import Path

import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from penstock.checkpoint.api import save
from penstock.checkpoint.commit.protocol import MANIFEST_NAME
from penstock.checkpoint.formats.description import read_manifest


def save_on_a_mesh(_rank: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    state = {"w": distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(0)]), "plain": torch.ones(1)}
    save(state, path)


def test_the_mesh_of_a_state_is_in_its_manifest(tmp_path: Path) -> None:
    on_gloo_ranks(2, save_on_a_mesh, tmp_path / "saved")
    manifest = read_manifest((tmp_path / "saved" / MANIFEST_NAME).read_bytes(), "saved")
    assert dict(manifest.mesh) == {"replica": 2, "shard": 1}
    assert manifest.world_size == 2


def test_a_state_without_a_mesh_has_none_in_its_manifest(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "saved")
    manifest = read_manifest((tmp_path / "saved" / MANIFEST_NAME).read_bytes(), "saved")
    assert dict(manifest.mesh) == {}
