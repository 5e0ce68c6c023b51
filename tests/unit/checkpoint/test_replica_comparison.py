"""What several ranks hold is compared before any of it is written; ranks are threads here."""

from collections.abc import Mapping, Sequence
from unittest.mock import patch

import pytest
import torch
import xxhash
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint import replica_comparison
from penstock.checkpoint.plan.save_plan import HeldObject, Holdings
from penstock.checkpoint.replica_comparison import compare_replicas, sum_bytes, sum_on_device
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.checkpoint.state.tensors import LocalShard, LocalState
from penstock.errors import RankError

Held = Mapping[str, tuple[int, torch.Tensor]]
"""By name, rows of a tensor of eight rows, and the first of them."""


def state_of(held: Held, own: Sequence[str] = ()) -> LocalState:
    shards = {name: [LocalShard((begin, 0), tuple(rows.shape), rows)] for name, (begin, rows) in held.items()}
    facts = tuple(TensorFacts(name, "float32", (8, rows.shape[1]), 4) for name, (_, rows) in held.items())
    regions = [(number, shard.offsets, shard.sizes) for number, (shard,) in enumerate(shards.values())]
    apart = tuple(HeldObject(name=name, size_bytes=1, digest=b"") for name in own)
    holdings = Holdings(tensors=facts, regions=Regions.from_rows(regions), objects=(), compared=apart)
    return LocalState(leaves=(), holdings=holdings, shards=shards, objects={})


def told(states: Sequence[LocalState]) -> set[str]:
    """What the ranks are told; "" if it is nothing."""

    def rank(comm: ThreadComm) -> str:
        try:
            compare_replicas(states[comm.rank], comm)
        except RankError as error:
            return str(error)
        return ""

    return set(on_ranks(len(states), rank))


def hsdp(rank: int, *, changed: int | None = None) -> Held:
    """Two replicas of two shards, and a norm that all hold."""
    rows = torch.arange(24.0).reshape(8, 3)[4 * (rank % 2) : 4 * (rank % 2) + 4].clone()
    if rank == changed:
        rows[2, 1] += 1
    return {"w": (4 * (rank % 2), rows), "norm": (0, torch.ones(8, 2))}


def test_equal_replicas_are_saved() -> None:
    assert told([state_of(hsdp(rank)) for rank in range(4)]) == {""}


def test_a_changed_shard_is_named_with_its_ranks_on_all_of_them() -> None:
    (error,) = told([state_of(hsdp(rank, changed=3)) for rank in range(4)])
    assert "w[4:8, 0:3] differs between rank 1 and rank 3" in error
    assert "norm" not in error


def test_what_a_few_ranks_share_is_compared_beside_what_they_do_not() -> None:
    """As norms are shared by ranks of tensor parallelism whose weights differ."""
    states = [hsdp(rank) for rank in range(4)]
    (error,) = told(
        [
            state_of({**held, "norm": (0, torch.full((8, 2), 1.0 + rank // 2))})
            for rank, held in enumerate(states)
        ]
    )
    assert "norm differs between ranks 0, 1 and ranks 2, 3" in error


def test_tensors_of_which_each_rank_keeps_its_own_are_not_compared() -> None:
    states = [{"rng": (0, torch.full((8, 1), float(rank)))} for rank in range(3)]
    assert told([state_of(held, own=["rng"]) for held in states]) == {""}
    assert told([state_of(held) for held in states]) != {""}


def sum_at_once(memory: torch.Tensor) -> int:
    """As on a device that sums each tensor, however small."""
    with patch.object(replica_comparison, "FEW_BYTES", -1):
        return sum_on_device([memory])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
def test_sums_see_each_bit_and_each_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(3 * 7).reshape(3, 7).to(dtype)
    content = tensor.view(torch.uint8).numpy().tobytes()
    assert sum_bytes(tensor) == xxhash.xxh3_64_intdigest(content)
    assert sum_bytes(tensor.t().contiguous().t()) == sum_bytes(tensor)
    flipped, turned = tensor.clone(), tensor.flip(0)
    flipped.view(torch.uint8)[2, -1] ^= 1
    different = [tensor, flipped, turned, tensor[:2], tensor[:1]]
    for sums in (
        [sum_bytes(each) for each in (*different, tensor[:0])],
        sum_on_device([*different, tensor[:0]]),
        [sum_at_once(each) for each in different],
    ):
        assert len(set(sums)) == len(sums)
    for sum_of in (sum_at_once, lambda memory: sum_on_device([memory])[0]):
        assert sum_of(tensor.t().contiguous().t()) == sum_of(tensor)
