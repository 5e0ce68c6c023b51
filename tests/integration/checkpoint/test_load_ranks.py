"""Loading on several ranks: other meshes than at save, bytes read once, failures raised on all ranks."""

from __future__ import annotations

import shutil
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.comm_contract import check_comm
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.known_steps import find_checkpoint
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import penstock.checkpoint as pc
from penstock.checkpoint.api import load, save
from penstock.checkpoint.engine import LoadChoice, borrowed_comm, list_ranks, make_comm
from penstock.checkpoint.formats.checkpoint_source import open_together
from penstock.checkpoint.loader import CheckpointLoader
from penstock.checkpoint.torch_dcp import LoadPlanner, Reader
from penstock.errors import ObjectNotFound, PenstockError, RankFailed, UsageError
from penstock.storage.capabilities import prefer_direct_access, uses_page_cache
from penstock.storage.residency import evict_file

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

Told = dict[str, list[Any]]

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def values(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on every rank; any bit pattern that the dtype has."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape} {seed}".encode()))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


class Layout:
    """A random way to lay a fixed set of tensors out over ranks, drawn alike on all of them."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.rank = rank
        self.random = torch.Generator().manual_seed(seed)
        inner = [2, 1, size][self.draw(3)] if size > 1 else 1
        self.mesh = init_device_mesh("cpu", (size // inner, inner))

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (1,), generator=self.random))

    def placement(self, num_dims: int) -> Placement:
        choice = self.draw(num_dims + 1)
        return Replicate() if choice == num_dims else Shard(choice)

    def tensor(self, full: torch.Tensor) -> torch.Tensor:
        kind = self.draw(4)
        if kind == 0 or full.dim() == 0 or full.dtype == torch.float8_e4m3fn:
            plain = full.clone()
            return plain.t().contiguous().t() if kind == 1 and full.dim() == 2 else plain
        first, second = self.placement(full.dim()), self.placement(full.dim())
        if first == second and isinstance(first, Shard):
            second = Replicate()
        return distribute_tensor(full.clone(), self.mesh, [first, second])

    def state(self, seed: int) -> dict[str, Any]:
        return {
            "model": {
                f"w{number}": self.tensor(values(f"w{number}", shape, dtype, seed))
                for number, (shape, dtype) in enumerate(
                    (shape, DTYPES[(number + len(shape)) % len(DTYPES)])
                    for number, shape in enumerate(
                        [(16, 8), (7, 5), (33,), (4, 6, 5), (), (0, 4), (3, 1, 9), (64, 3)]
                    )
                )
            },
            "layers": [{"b": self.tensor(values("b", (12, 12), torch.float32, seed))}, {"name": f"n{seed}"}],
            "step": seed,
            "rng": torch.tensor([seed, self.rank]).tolist(),
        }


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(inner) for key, inner in value.items()}
    return [full(inner) for inner in value] if isinstance(value, list) else value


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected)]
        assert found.dtype == expected.dtype, where
        assert bits[0].equal(bits[1]), where
    elif isinstance(expected, dict):
        for key, inner in expected.items():
            assert_same(found[key], inner, f"{where}.{key}")
    elif isinstance(expected, list):
        for number, inner in enumerate(expected):
            assert_same(found[number], inner, f"{where}[{number}]")
    else:
        assert found == expected, where


def few_layouts(rank: int, root: Path) -> None:
    exchange_with_stock(rank, root, range(4))


def exchange_with_stock(rank: int, root: Path, seeds: range) -> None:
    size = dist.get_world_size()
    for seed in seeds:
        saved, other = Layout(seed, rank, size), Layout(seed + 1000, rank, size)
        state = saved.state(1)
        expected = full(state)
        save(state, root / f"ours-{seed}")
        stock_save(state, checkpoint_id=root / f"stock-{seed}")
        for name in ("ours", "stock"):
            found = other.state(2)
            if name == "stock":
                # Stock keeps the object of one rank only.
                found.pop("rng")
            load(found, root / f"{name}-{seed}")
            assert_same(full(found), {key: expected[key] for key in found}, f"{name} {seed} ")
        for name in ("ours", "stock"):
            found = other.state(2)
            found.pop("rng")
            reader = Reader(root / f"{name}-{seed}")
            stock_load(found, storage_reader=reader, planner=LoadPlanner())
            assert_same(full(found), {key: expected[key] for key in found}, f"Reader loads {name} {seed} ")
        found = other.state(2)
        found.pop("rng")
        stock_load(found, checkpoint_id=root / f"ours-{seed}")
        assert_same(full(found), {key: expected[key] for key in found}, f"stock loads ours {seed} ")


def test_any_layout_loads_into_any_other_and_stock_torch_agrees(told: Told) -> None:
    assert told["few_layouts"] == [None, None]


def manage(rank: int, root: Path) -> None:
    """Save, restore and fail on all ranks, whatever is unusual on one of them."""
    with pc.Manager(root) as manager:
        assert manager.should_save(1)
        state = {"w": torch.full((4,), 7.0), "rank": rank}
        manager.save(1, state)
        manager.save(2, state)
        found = {"w": torch.zeros(4), "rank": 0}
        assert manager.restore(found, step=1) == 1
        assert_same(found, state)
        with pytest.raises(PenstockError, match="'other'") as caught:
            manager.restore({**found, "other": 0} if rank == 2 else found)
        assert str(caught.value).count("failed:") == 1
        with manager.output("notes", checkpoint=False) as out:
            out.path(f"of-{rank}").write_text("seen", encoding="utf-8")
        assert out.is_committed
        with (
            pytest.raises(UsageError, match="of-all"),
            manager.output("others", checkpoint=False) as out,
        ):
            out.path("of-all" if rank > 1 else f"of-{rank}").write_text("seen", encoding="utf-8")
        dist.barrier()
        if rank == 0:
            for path in (root / "step-2").glob("*.distcp"):
                path.write_bytes(bytes(path.stat().st_size))
        dist.barrier()
        found = {"w": torch.zeros(4), "rank": 0}
        assert manager.restore(found) == 1
        assert_same(found, state)
        with pytest.raises(UsageError, match="different calls"):
            manager.save(3 + rank % 2, state)


def test_a_manager_agrees_on_what_is_unusual(tmp_path: Path) -> None:
    on_gloo_ranks(4, manage, tmp_path)


def read_once(rank: int, root: Path) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 1))
    plain = [values(f"w{number}", (256, 1024), torch.float32, 1) for number in range(16)]
    state: dict[str, DTensor] = {
        f"w{number}": distribute_tensor(each, mesh, [Replicate(), Shard(0)])
        for number, each in enumerate(plain)
    }
    save(state, root / "step")
    for each in state.values():
        each.to_local().zero_()
    before = _read_by_this_process()
    report = load(state, root / "step")
    read = _read_by_this_process() - before
    for number, expected in enumerate(plain):
        assert state[f"w{number}"].to_local().equal(expected)
    assert report.received_bytes == 8 << 20
    assert report.num_verified == 8
    alone = find_checkpoint(root / "step")
    with borrowed_comm() as comm:
        together = open_together(alone.storage, alone.committed.folder, alone.uri, comm)
    key = together.key(together.index.files[0])
    expected_access = uses_page_cache(prefer_direct_access(alone.storage, reads=key))
    assert uses_page_cache(together.storage_of_files()) == expected_access
    return report.read_bytes, read


def read_once_by_reader(rank: int, root: Path) -> int:
    expected = values("w", (512, 1024), torch.float32, 1)
    save({"w": expected.clone()}, root / "step")
    found = {"w": torch.zeros(512, 1024)}
    before = _read_by_this_process()
    stock_load(found, storage_reader=Reader(root / "step"), planner=LoadPlanner())
    assert found["w"].equal(expected)
    return _read_by_this_process() - before


def test_replicas_read_each_byte_once_through_stock_load_too(told: Told) -> None:
    for seen in told["read_once_by_reader"]:
        assert seen <= (1 << 20) + (1 << 19), "half of 2 MiB, and the checkpoint's description"


def _read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_replicas_read_each_byte_once_and_exchange_the_rest(told: Told) -> None:
    for planned, seen in told["read_once"]:
        assert planned <= 1.01 * (8 << 20)
        assert seen <= planned + (1 << 20), (
            "the checkpoint's description and the proc file itself come on top"
        )


def fail_together(rank: int, root: Path) -> list[str]:
    state = {"w": torch.zeros(1 << 16), "v": torch.ones(1 << 16), "note": "x"}
    save(state, root / "step")
    told = []

    def tell(**choice: Any) -> None:
        with pytest.raises(PenstockError) as caught:
            load(choice.pop("state"), root / "step", **choice)
        assert isinstance(caught.value, RankFailed | UsageError)
        told.append(str(caught.value))

    shape = (1 << 16) + rank
    tell(state={"w": torch.zeros(shape)})
    tell(state={"absent": torch.zeros(3)} if rank else {"w": torch.zeros(1 << 16)})
    dist.barrier()
    if rank == 0:
        for file in (root / "step").glob("*.distcp"):
            content = bytearray(file.read_bytes())
            if len(content) > 1 << 16:
                content[8192] ^= 1
                file.write_bytes(content)
    dist.barrier()
    tell(state=state)
    tell(state=state, only="nothing.*")
    own: dict[str, Any] = {"note": ""} if rank else {"w": torch.zeros(1 << 16)}
    load(own, root / "step", only="note")
    assert own.get("note", "x") == "x"
    return told


def test_a_failure_on_one_rank_is_raised_on_all(told: Told) -> None:
    first, second = told["fail_together"]
    assert first == second
    assert "Rank 1" in first[0]
    assert "[65537] in the state" in first[0]
    assert "does not hold 'absent'" in first[1]
    assert "its checksum differs" in first[2]
    assert "bytes" in first[2]
    assert "No part of the state matches only='nothing.*'" in first[3]


def disjoint_groups(rank: int, root: Path) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine, other = groups[rank], groups[1 - rank]
    state = {"w": torch.full((1000,), rank)}
    save(state, root / f"group-{rank}", process_group=mine)
    found = {"w": torch.zeros(1000, dtype=torch.int64)}
    load(found, root / f"group-{rank}", process_group=mine)
    assert found["w"].equal(state["w"])
    with pytest.raises(UsageError, match=f"Rank {rank} is not in the process group"):
        load(found, root / f"group-{rank}", process_group=other)


def test_groups_load_separately_and_an_outside_rank_gets_an_error(told: Told) -> None:
    assert told["disjoint_groups"] == [None, None]


def groups_again_and_again(rank: int, root: Path) -> None:
    for _ in range(5):
        comm = make_comm(list_ranks(None))
        check_comm(comm)
        comm.close()
    if rank == 0:
        # A rank that belongs to more groups than others still meets them.
        alone = dist.new_group([0], use_local_synchronization=True)
        assert make_comm(list_ranks(alone)).size == 1
    first, second = make_comm(list_ranks(None)), make_comm(list_ranks(None))
    assert first.gather(rank, awaiting="ranks") == second.gather(rank, awaiting="ranks") == [0, 1]


def test_separate_groups_can_be_made_repeatedly(told: Told) -> None:
    assert told["groups_again_and_again"] == [None, None]


def node_local_files(rank: int, root: Path) -> str:
    expected = [values(f"w{number}", (64, 1024), torch.float32, 1) for number in range(4)]
    save({f"w{number}": each for number, each in enumerate(expected)}, root / "shared")
    own = root / f"node{rank}"
    own.mkdir()
    for path in (root / "shared").iterdir():
        if path.suffix != ".distcp" or path.name.startswith(f"__{rank}_"):
            shutil.copy(path, own / path.name)
    dist.barrier()
    found = {f"w{number}": torch.zeros(64, 1024) for number in range(4)}
    here = tuple(path.name for path in own.glob("*.distcp"))
    with closing(CheckpointLoader()) as loader, borrowed_comm() as comm:
        stored = replace(find_checkpoint(own), readable=here)
        report = loader.load(found, stored, comm, LoadChoice())
        for number, each in enumerate(expected):
            assert found[f"w{number}"].equal(each)
        assert report.read_bytes <= 1.2 * report.received_bytes
        lost = replace(stored, readable=here if rank else ())
        with pytest.raises(ObjectNotFound) as caught:
            loader.load(found, lost, comm, LoadChoice())
    return str(caught.value)


def test_files_that_only_one_rank_can_open_are_sent_and_lost_ones_are_named(told: Told) -> None:
    first, second = (error.partition(" (")[0] for error in told["node_local_files"])
    assert first == second
    assert first.startswith("None of the 2 ranks can open __0_")


def cold_restores(rank: int, root: Path) -> list[float]:
    """Read bytes of all ranks beside those of the files: own parts, what all have, and a half of that."""
    own = {f"rank{rank}.w": values(f"own {rank}", (6, 1024, 1024), torch.float32, 1)}
    common = {f"w{number}": values(f"w{number}", (1024, 1024), torch.float32, 1) for number in range(12)}
    seen: list[float] = []
    for name, state, chosen in (("own", own, None), ("common", common, None), ("half", common, "w[0-5]")):
        with pc.Manager(root / name) as manager:
            manager.save(1, state)
            dist.barrier()
            for path in (root / name / "step-1").glob(f"__{rank}_*"):
                evict_file(str(path))
            found = {key: torch.zeros_like(each) for key, each in state.items()}
            dist.barrier()
            before = _device_bytes()
            manager.restore(found, only=chosen)
            seen.append(_device_bytes() - before)
            dist.barrier()
            size = sum(path.stat().st_size for path in (root / name / "step-1").glob("*.distcp"))
            seen[-1] /= size
            assert all(
                found[key].equal(each) for key, each in state.items() if not chosen or key[1:] in "012345"
            )
    return seen


def _device_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def test_cold_restores_read_each_wanted_byte_once(told: Told) -> None:
    own, common, half = (sum(shares) for shares in zip(*told["cold_restores"], strict=True))
    assert own == pytest.approx(1, abs=0.02)
    assert common == pytest.approx(1, abs=0.02)
    assert half == pytest.approx(0.5, abs=0.02)


def one_large_item(rank: int, root: Path) -> list[Any]:
    expected = values("w", (2048, 1024), torch.float32, 1)
    if rank == 0:
        save(
            {"w": expected}, root / "step", process_group=dist.new_group([0], use_local_synchronization=True)
        )
    dist.barrier()
    found = {"w": torch.zeros(2048, 1024)}
    report = load(found, root / "step")
    assert found["w"].equal(expected)
    dist.barrier()
    if rank == 0:
        (file,) = (root / "step").glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[-4096] ^= 1
        file.write_bytes(content)
    dist.barrier()
    for way in (
        lambda: load(found, root / "step"),
        lambda: stock_load(found, storage_reader=Reader(root / "step")),
    ):
        with pytest.raises(BaseException, match="w is not as it was written"):
            way()
    return [report.read_bytes, report.num_verified]


def test_an_item_that_ranks_read_in_parts_is_verified_in_memory(told: Told) -> None:
    (first_bytes, first_summed), (second_bytes, second_summed) = told["one_large_item"]
    assert first_summed + second_summed == 1
    assert first_bytes == pytest.approx(4 << 20, rel=0.01)
    assert second_bytes == pytest.approx(4 << 20, rel=0.01)


def sharded_tensors(rank: int, root: Path) -> None:
    def rows(first: int, count: int, fill: torch.Tensor) -> ShardedTensor:
        place = ShardMetadata([first, 0], [count, 4], f"rank:{rank}/cpu")
        return init_from_local_shards([TensorShard(fill, place)], (10, 4))

    whole = torch.arange(40.0).reshape(10, 4)
    mine = slice(0, 7) if rank == 0 else slice(7, 10)
    save({"s": rows(mine.start, mine.stop - mine.start, whole[mine].clone())}, root / "step")
    other = slice(0, 2) if rank == 0 else slice(2, 10)
    memory = torch.zeros(other.stop - other.start, 4)
    load({"s": rows(other.start, other.stop - other.start, memory)}, root / "step")
    assert memory.equal(whole[other])
    plain = {"s": torch.zeros(10, 4)}
    stock_load(plain, checkpoint_id=root / "step")
    assert plain["s"].equal(whole)


def test_sharded_tensors_are_loaded_by_other_cuts_than_they_were_saved(told: Told) -> None:
    assert told["sharded_tensors"] == [None, None]


def partial_sums(rank: int, root: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    sums = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    told = []
    for move in (save, load):
        with pytest.raises(PenstockError) as caught:
            move({"w": sums}, root / "step")
        told.append(str(caught.value))
    return told


def test_partial_sums_are_refused_on_all_ranks(told: Told) -> None:
    for error in (error for rank in told["partial_sums"] for error in rank[:1]):
        assert "'w' is a DTensor of partial sums" in error


def explained(rank: int, root: Path) -> str:
    mesh = init_device_mesh("cpu", (2, 1))
    full = torch.zeros(1024, 512)
    state = {
        "w": distribute_tensor(full, mesh, [Replicate(), Shard(0)]),
        "v": distribute_tensor(full, mesh, [Shard(0), Replicate()]),
        "seed": rank,
    }
    told = pc.dry_run(state)
    assert told.unique_bytes == 4 << 20
    assert {part.writes_bytes for part in told.ranks} == {2 << 20}
    assert {part.reads_bytes for part in told.ranks} == {2 << 20}
    assert {part.holds_bytes - part.reads_bytes - part.receives_bytes for part in told.ranks} == {0}
    assert told.objects == (("seed",), ("seed@rank1",))
    return str(told)


def test_a_dry_run_is_the_same_on_all_ranks(told: Told) -> None:
    first, second = told["explained"]
    assert first == second
    assert "rank 0 writes [0:512, :], 1 MiB" in first
    assert first.splitlines()[3].split() == ["0", "3", "MiB", "2", "MiB", "2", "MiB", "1", "MiB", "1"]


def own_objects(rank: int, root: Path) -> tuple[Any, Any]:
    save({"w": torch.ones(4), "rng": f"of rank {rank}", "step": 3}, root / "step")
    found: dict[str, Any] = {"w": torch.zeros(4), "rng": None, "step": None}
    load(found, root / "step")
    return found["rng"], found["step"]


def test_each_rank_gets_its_own_objects_back(told: Told) -> None:
    assert told["own_objects"] == [("of rank 0", 3), ("of rank 1", 3)]


class Sampler:
    """The order in which this rank draws, as far as it is known."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def state_dict(self) -> dict[str, Any]:
        return {} if self.order is None else {"order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order = state_dict["order"]


def own_tensors(rank: int, root: Path) -> bool:
    order = torch.randperm(40_000 + rank, generator=torch.Generator().manual_seed(rank))
    mixed, found = Sampler(order if rank else "not yet"), Sampler(None)
    save({"sampler": mixed}, root / "mixed")
    load({"sampler": found}, root / "mixed")
    assert torch.equal(found.order, order) if rank else found.order == "not yet"
    save({"sampler": Sampler(order)}, root / "step")
    for before in (None, torch.zeros(40_000 + rank, dtype=torch.int64)):
        found = Sampler(before)
        load({"sampler": found}, root / "step")
        if found.order is None or not torch.equal(found.order, order):
            return False
    return True


def test_each_rank_gets_the_tensors_of_its_own_parts_back(told: Told) -> None:
    assert told["own_tensors"] == [True, True]


def all_programs(rank: int, root: Path) -> dict[str, Any]:
    programs = (
        few_layouts,
        read_once,
        read_once_by_reader,
        fail_together,
        disjoint_groups,
        own_objects,
        own_tensors,
        groups_again_and_again,
        explained,
        node_local_files,
        cold_restores,
        one_large_item,
        sharded_tensors,
        partial_sums,
    )
    return {program.__name__: program(rank, root / program.__name__) for program in programs}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each program returned on each rank; all of them run in one job, whose start costs most."""
    first, second = on_gloo_ranks(2, all_programs, tmp_path_factory.mktemp("ranks"))
    return {name: [first[name], second[name]] for name in first}
