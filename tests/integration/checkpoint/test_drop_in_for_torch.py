"""`pc.Writer`, `pc.Reader` and our planners where torch's own calls expect theirs."""

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as stock_async_save
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import penstock.checkpoint as pc
from penstock.checkpoint.adapters.async_writer import AsyncWriter
from penstock.checkpoint.tools.verify import verify
from penstock.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 5), value), "b": torch.full((7,), value)}, "step": int(value)}


def assert_loaded(path: Path, value: float, **options: Any) -> None:
    found = state_of(0)
    stock_load(found, storage_reader=pc.Reader(path), **options)
    assert torch.equal(found["model"]["w"], state_of(value)["model"]["w"])
    assert found["step"] == value


def test_writer_reader_and_planners_can_be_pickled_before_and_after_use(tmp_path: Path) -> None:
    writer, reader = pc.Writer(tmp_path / "one"), pc.Reader(tmp_path / "one")
    for value in (1, 2):
        writer, reader = pickle.loads(pickle.dumps(writer)), pickle.loads(pickle.dumps(reader))
        planners = pickle.loads(pickle.dumps((pc.SavePlanner(), pc.LoadPlanner())))
        stock_save(state_of(value), storage_writer=writer, planner=planners[0])
        found = state_of(0)
        stock_load(found, storage_reader=reader, planner=planners[1])
        assert found["step"] == value


def save_in_a_process(rank: int, path: Path, *, ours: bool) -> None:
    """Save as torch's own tests do, in a process beside the trainer."""
    stock_async_save(
        {**state_of(3), f"own{rank}": torch.full((9,), float(rank))},
        storage_writer=pc.Writer(path),
        planner=pc.SavePlanner() if ours else DefaultSavePlanner(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result()  # type: ignore[union-attr] # a future, unless a response was asked for


def save_with_our_planner(rank: int, path: Path) -> None:
    save_in_a_process(rank, path, ours=True)


def save_with_stock_planner(rank: int, path: Path) -> None:
    save_in_a_process(rank, path, ours=False)
    for value in (5, 6):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {**state_of(value), f"own{rank}": torch.ones(9)}
        stock_save(state, storage_writer=pc.Writer(f"{path}-{value}"), planner=planner)
        assert_loaded(Path(f"{path}-{value}"), value)


@pytest.mark.parametrize("program", [save_with_our_planner, save_with_stock_planner])
def test_async_save_in_a_process_writes_a_checkpoint(tmp_path: Path, program: Any) -> None:
    on_gloo_ranks(2, program, tmp_path / "saved")
    assert_loaded(tmp_path / "saved", 3)
    found = {"own1": torch.zeros(9)}
    pc.load(found, tmp_path / "saved")
    assert torch.equal(found["own1"], torch.ones(9))


def test_metadata_has_the_version_and_the_save_id_of_the_writer(tmp_path: Path) -> None:
    writer = pc.Writer(tmp_path / "saved")
    before = writer.storage_meta().save_id
    stock_save(state_of(1), storage_writer=writer)
    metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    assert metadata.version == "1.0.0"
    assert metadata.storage_meta.save_id == writer.storage_meta().save_id
    assert {UUID(before), UUID(metadata.storage_meta.save_id)}


def test_a_reader_tells_its_loads_apart(tmp_path: Path) -> None:
    writer = pc.Writer(tmp_path / "saved")
    stock_save(state_of(1), storage_writer=writer)
    reader = pc.Reader(tmp_path / "saved")
    first = reader.read_metadata().storage_meta
    assert first is not None
    assert (first.save_id, first.load_id) == (writer.storage_meta().save_id, reader.load_id)
    reader.reset()
    assert {UUID(reader.load_id), UUID(first.load_id)} > {UUID(first.load_id)}


def test_only_known_storages_are_valid(tmp_path: Path) -> None:
    for kind in (pc.Writer, pc.Reader, AsyncWriter):
        assert kind.validate_checkpoint_id(tmp_path / "new")
        assert kind.validate_checkpoint_id("mem://bucket/new")
        assert not kind.validate_checkpoint_id("abc://abc.abc")
        assert not kind.validate_checkpoint_id("abc://bucket/new")
        assert not kind.validate_checkpoint_id("")
    with pytest.raises(UsageError, match="Unsupported storage scheme 'abc'"):
        pc.save(state_of(1), "abc://abc.abc")


class PlanWithVoid(DefaultSavePlanner):
    """Plans two empty shards where another one begins, as Megatron does where a tensor has few rows."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        (item,) = (item for item in plan.items if item.index.fqn == "model.w")
        assert item.tensor_data is not None
        facts = replace(item.tensor_data, chunk=ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((0, 5))))
        index = MetadataIndex("model.w", torch.Size((0, 0)))
        void = replace(item, index=index, type=WriteItemType.SHARD, tensor_data=facts)
        return replace(plan, items=[*plan.items, void, void])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        is_void = write_item.tensor_data is not None and not write_item.tensor_data.chunk.sizes.numel()
        return data[:0] if is_void and isinstance(data, torch.Tensor) else data

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans


def test_empty_shards_at_the_place_of_another_one_are_not_written(tmp_path: Path) -> None:
    stock_save(state_of(3), storage_writer=pc.Writer(tmp_path / "saved"), planner=PlanWithVoid())
    assert verify(tmp_path / "saved").num_items == 3
    assert_loaded(tmp_path / "saved", 3)
    found = state_of(0)
    stock_load(found, checkpoint_id=tmp_path / "saved")
    assert torch.equal(found["model"]["w"], state_of(3)["model"]["w"])


def test_overwrite_can_be_forbidden(tmp_path: Path) -> None:
    stock_save(state_of(1), storage_writer=pc.Writer(tmp_path / "saved", overwrite=False))
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        stock_save(state_of(2), storage_writer=pc.Writer(tmp_path / "saved", overwrite=False))
    assert_loaded(tmp_path / "saved", 1)
    stock_save(state_of(2), storage_writer=pc.Writer(tmp_path / "saved"))
    assert_loaded(tmp_path / "saved", 2)


class Remaking(DefaultLoadPlanner):
    """Makes new plans with data of its own, as planners may."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [replace(LoadPlan(plan.items), storage_data=["mine"]) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        assert new_plan.storage_data == ["mine"]
        return super().finish_plan(new_plan)


class Forgetting(DefaultLoadPlanner):
    """Keeps nothing but the items of a finished plan, as planners may."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(new_plan.items)


@pytest.mark.parametrize("planner", [Remaking, Forgetting])
def test_planner_that_makes_new_plans_loads(tmp_path: Path, planner: type[DefaultLoadPlanner]) -> None:
    stock_save(state_of(4), storage_writer=pc.Writer(tmp_path / "saved"))
    assert_loaded(tmp_path / "saved", 4, planner=planner())


def test_caching_planner_saves_to_the_path_of_each_save(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for value in (1, 2, 3):
        stock_save(state_of(value), storage_writer=pc.Writer(tmp_path / str(value)), planner=planner)
    for value in (1, 2, 3):
        assert_loaded(tmp_path / str(value), value)


def test_planner_raises_what_torchs_own_raises(tmp_path: Path) -> None:
    stock_save(state_of(4), storage_writer=pc.Writer(tmp_path / "saved"))
    for wrong, kind, words in (
        ({"model": {"other": torch.zeros(2)}}, RuntimeError, "Missing key in checkpoint"),
        ({"model": {"w": torch.zeros(2)}}, ValueError, "Size mismatch"),
    ):
        for planner in (pc.LoadPlanner(), DefaultLoadPlanner()):
            with pytest.raises(CheckpointException) as raised:
                stock_load(wrong, storage_reader=pc.Reader(tmp_path / "saved"), planner=planner)
            assert isinstance(raised.value.failures[0][0], kind)
            assert str(raised.value.failures[0][0]).startswith(words)


def test_planner_replaces_no_tensor_by_a_value(tmp_path: Path) -> None:
    stock_save({"note": 5}, storage_writer=pc.Writer(tmp_path / "saved"))
    state = {"note": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="'note' is a tensor in the state, but 'note' is an object"):
        stock_load(state, storage_reader=pc.Reader(tmp_path / "saved"), planner=pc.LoadPlanner())
    assert torch.equal(state["note"], torch.zeros(3))
