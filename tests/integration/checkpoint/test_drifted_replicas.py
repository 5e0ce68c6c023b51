"""Replicas that have drifted apart, as those of a model in two replicas of two shards, on gloo ranks."""

from pathlib import Path

import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock.checkpoint as pc
from penstock.errors import RankError

CHANGED = 3
"""The rank whose second shard is another one than rank 1's."""


def drifts(rank: int, root: Path) -> tuple[str, bool, float]:
    """What a save that compares says, whether it left a step, and what comparing equal replicas took."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    weights = model.state_dict()
    state = {"model": weights, "step": 7}
    with pc.Manager(root / "run", replicas="compare") as manager:
        compared_s = manager.save(1, state).ranks[rank].compare_s
        if rank == CHANGED:
            weights["1.weight"].to_local()[0, 0] += 1e-3
        try:
            manager.save(2, state)
        except RankError as error:
            told = str(error)
        else:
            told = "nothing"
        steps = manager.steps()
    pc.save(state, root / "mixed")
    return told, steps == [1], compared_s


def test_a_changed_replica_is_refused_by_name_when_asked_to_compare(tmp_path: Path) -> None:
    seen = on_gloo_ranks(4, drifts, tmp_path)
    (told,) = {told for told, _, _ in seen}
    assert "model.1.weight[2:4, 0:8] differs between rank 1 and rank 3" in told
    assert "model.0" not in told
    assert all(is_refused and compared_s > 0 for _, is_refused, compared_s in seen)
    assert (tmp_path / "mixed" / ".metadata").exists()


def statistics_of_ddp(rank: int, root: Path) -> tuple[list[float], list[float]]:
    """The running means of this rank when it saved, and those that it loads."""
    torch.manual_seed(1)
    norm = torch.nn.BatchNorm1d(4)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), norm))
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))
    assert norm.running_mean is not None
    own = norm.running_mean.tolist()
    pc.save({"model": model}, root / "saved", replicas="compare")
    pc.load({"model": model}, root / "saved")
    return own, norm.running_mean.tolist()


def test_buffers_of_ddp_are_those_of_its_first_rank(tmp_path: Path) -> None:
    (first, _), (second, _) = seen = on_gloo_ranks(2, statistics_of_ddp, tmp_path)
    assert first != second
    assert [loaded for _, loaded in seen] == [first, first]
