"""torch's metadata and ours are equal however they are read, and reading runs no code."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.description import (
    MetadataWriter,
    metadata_bytes,
    read_metadata,
    torch_metadata,
)
from penstock.checkpoint.state.regions import (
    ELEMENT_TYPES,
    UNKNOWN,
    CheckpointIndex,
    Regions,
    StoredRegions,
    TensorFacts,
)
from penstock.errors import DataDamaged, UsageError

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata as stock  # noqa: E402 - torch may be missing
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


@st.composite
def stock_metadata(draw: st.DrawFn) -> stock.Metadata:
    """Some metadata of torch's own, whose tensors are cut along their first dimension."""
    state: dict[str, Any] = {}
    storage: dict[stock.MetadataIndex, _StorageInfo] = {}
    offset = draw(st.sampled_from([0, 300, 1 << 33]))

    def placed(transforms: list[str] | None = None) -> _StorageInfo:
        nonlocal offset
        length = draw(st.integers(0, 1 << 40))
        info = _StorageInfo(f"__{draw(st.integers(0, 3))}_0.distcp", offset, length, transforms)
        offset += length
        return info

    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        if draw(st.booleans()):
            state[name] = stock.BytesStorageMetadata()
            storage[stock.MetadataIndex(name)] = placed()
            continue
        rest = draw(st.lists(st.integers(0, 300), max_size=4))
        cuts = draw(st.lists(st.integers(1, 70000), min_size=1, max_size=3))
        chunks, row = [], 0
        for rows in cuts:
            chunks.append(
                stock.ChunkStorageMetadata(torch.Size([row, *(0 for _ in rest)]), torch.Size([rows, *rest]))
            )
            row += rows
        dtype = getattr(torch, draw(st.sampled_from(sorted(ELEMENT_TYPES))))
        size = torch.Size([row, *rest])
        if draw(st.booleans()):
            size, chunks = torch.Size([]), [stock.ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
        state[name] = stock.TensorStorageMetadata(stock.TensorProperties(dtype=dtype), size, chunks)
        for chunk in chunks:
            transforms = draw(st.sampled_from([None, None, ["stream.zstd/1"], ["a/1", "b@c/2"]]))
            storage[stock.MetadataIndex(name, chunk.offsets)] = placed(transforms)
    paths = {name: ("model", 3, name) for name in state}
    return stock.Metadata(state, paths, storage, stock.StorageMeta(), "1.0.0")


@given(theirs=stock_metadata())
def test_rewritten_metadata_is_equal_for_torch(theirs: stock.Metadata) -> None:
    read = read_metadata(pickle.dumps(theirs), "here")
    assert pickle.loads(metadata_bytes(read)) == theirs
    assert torch_metadata(read) == theirs


@given(theirs=stock_metadata())
def test_our_own_metadata_is_read_as_torch_s_is(theirs: stock.Metadata) -> None:
    first = read_metadata(pickle.dumps(theirs), "here")
    second = read_metadata(metadata_bytes(first), "here")
    assert all_of(first) == all_of(second)


def all_of(index: CheckpointIndex) -> list[object]:
    """Everything, by name and place, so that two can be compared."""
    stored = index.stored
    rows = []
    for row, tensor in enumerate(stored.regions.tensor.tolist()):
        facts, file = index.tensors[tensor], index.files[stored.file[row]]
        place = file, int(stored.item_offset[row]), int(stored.item_bytes[row]), index.transforms_of(row)
        rows.append((facts, *stored.regions.region(row, len(facts.shape)), *place))
    objects = [(held.name, index.files[held.file], held.offset, held.size_bytes) for held in index.objects]
    return [rows, objects, index.paths, stored.packed.tolist()]


def test_metadata_is_written_again_only_when_it_changes() -> None:
    index, writer = read_metadata(pickle.dumps(small_metadata()), "here"), MetadataWriter()
    first = writer.write(index)
    again = read_metadata(pickle.dumps(small_metadata()), "here")
    assert writer.write(again) is first
    moved = replace(again, stored=replace(again.stored, item_offset=again.stored.item_offset + 1))
    assert writer.write(moved) != first
    assert writer.write(replace(moved, paths={"w": ("a", "w")})) != writer.write(moved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_metadata_locates_every_item(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3, 4), "scalar": torch.tensor(2.5)}, "steps": [7, torch.arange(5)]}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    read = read_metadata((tmp_path / ".metadata").read_bytes(), "here")
    index = read
    by_name = {facts.name: (facts.dtype, facts.shape) for facts in index.tensors}
    assert by_name == {
        "model.w": ("float32", (3, 4)),
        "model.scalar": ("float32", ()),
        "steps.1": ("int64", (5,)),
    }
    assert [stored.name for stored in index.objects] == ["steps.0"]
    assert read.paths["steps.1"] == ("steps", 1)
    assert index.files == ("__0_0.distcp",)
    assert (index.stored.payload_offset == UNKNOWN).all()
    whole = index.stored.item_bytes.sum() + sum(stored.size_bytes for stored in index.objects)
    assert whole == (tmp_path / "__0_0.distcp").stat().st_size


def test_transformed_items_are_known_as_packed() -> None:
    theirs = small_metadata()
    index = next(iter(theirs.storage_data))
    theirs.storage_data[index].transform_descriptors = ["stream.zstd/1"]
    read = read_metadata(pickle.dumps(theirs), "here")
    assert read.stored.packed.tolist() == [True, False]
    assert [read.transforms_of(row) for row in (0, 1)] == [("stream.zstd/1",), ()]


def tensor_w(metadata: stock.Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


def small_metadata() -> stock.Metadata:
    """A tensor of two rows, each in an item of its own."""
    chunks = [stock.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in (0, 1)]
    about = stock.TensorStorageMetadata(stock.TensorProperties(), torch.Size([2, 4]), chunks)
    places = {
        stock.MetadataIndex("w", chunk.offsets): _StorageInfo("__0_0.distcp", 1000 * row, 900)
        for row, chunk in enumerate(chunks)
    }
    return stock.Metadata({"w": about}, None, places)


def test_metadata_of_older_versions_is_read() -> None:
    # torch 2.0 had its properties elsewhere, and neither storage_meta nor version.
    from torch.distributed._shard.sharded_tensor import metadata as older

    theirs = small_metadata()
    tensor_w(theirs).properties = older.TensorProperties(dtype=torch.float16)
    del theirs.__dict__["storage_meta"], theirs.__dict__["version"]
    read = read_metadata(pickle.dumps(theirs), "here")
    assert read.tensors[0].dtype == "float16"
    assert read.stored.item_offset.tolist() == [0, 1000]


def test_unsharded_tensors_without_offsets_are_located() -> None:
    theirs = small_metadata()
    about = tensor_w(theirs)
    about.chunks = [stock.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))]
    theirs.storage_data = {stock.MetadataIndex("w"): _StorageInfo("__0_0.distcp", 7, 900)}
    assert read_metadata(pickle.dumps(theirs), "here").stored.item_offset.tolist() == [7]


class Runs:
    """A value whose unpickling would run a program."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_without_running_it(tmp_path: Path, protocol: int) -> None:
    theirs = small_metadata()
    theirs.planner_data = Runs(tmp_path / "ran")
    with pytest.raises(DataDamaged, match=r"posix\.system"):
        read_metadata(pickle.dumps(theirs, protocol), "here")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "torch.load", "torch.hub.load", "torch.distributed.checkpoint.state_dict_loader.load"],
)
def test_names_outside_the_list_are_refused_even_in_torch(name: str) -> None:
    module, _, function = name.rpartition(".")
    with pytest.raises(DataDamaged, match=name):
        read_metadata(f"c{module}\n{function}\n.".encode(), "here")


def test_stand_ins_keep_no_state_between_files() -> None:
    # BUILD with a pair sets attributes, and a class can be its target.
    module = b"torch.distributed.checkpoint.metadata"
    spoil = b"\x80\x02c%s\nMetadata\nN}X\x04\x00\x00\x00kindX\x05\x00\x00\x00wrongs\x86b." % module
    with pytest.raises(DataDamaged):
        read_metadata(spoil, "here")
    assert read_metadata(pickle.dumps(small_metadata()), "here").files == ("__0_0.distcp",)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_metadata_is_damaged(share: float) -> None:
    whole = pickle.dumps(small_metadata())
    with pytest.raises(DataDamaged, match="here"):
        read_metadata(whole[: int(len(whole) * share)], "here")


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_flipped_bits_are_damage_or_other_values_but_no_other_error(position: int, bit: int) -> None:
    content = bytearray(pickle.dumps(small_metadata()))
    content[position % len(content)] ^= 1 << bit
    with suppress(DataDamaged, UsageError):
        read_metadata(content, "here")


def test_a_part_outside_its_tensor_is_refused() -> None:
    theirs = small_metadata()
    tensor_w(theirs).size = torch.Size([1, 4])
    with pytest.raises(
        DataDamaged, match=r"A region of w at \[1, 0\] of \[1, 4\] is outside its shape \[1, 4\]"
    ):
        read_metadata(pickle.dumps(theirs), "here")


def test_a_part_that_no_file_holds_is_named() -> None:
    theirs = small_metadata()
    del theirs.storage_data[stock.MetadataIndex("w", torch.Size([1, 0]))]
    with pytest.raises(DataDamaged, match=r"w at \[1, 0\] was not written"):
        read_metadata(pickle.dumps(theirs), "here")


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", ""])
def test_a_file_outside_the_checkpoint_is_refused(name: str) -> None:
    theirs = small_metadata()
    next(iter(theirs.storage_data.values())).relative_path = name
    with pytest.raises(DataDamaged, match="not in its folder"):
        read_metadata(pickle.dumps(theirs), "here")


def test_items_of_negative_length_are_refused() -> None:
    theirs = small_metadata()
    next(iter(theirs.storage_data.values())).length = -1
    with pytest.raises(DataDamaged, match="has -1 bytes"):
        read_metadata(pickle.dumps(theirs), "here")


def test_sparse_tensors_are_refused_by_name() -> None:
    theirs = small_metadata()
    tensor_w(theirs).properties.layout = torch.sparse_coo
    with pytest.raises(UsageError, match=r"w is stored as torch.sparse_coo"):
        read_metadata(pickle.dumps(theirs), "here")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_metadata_of_a_million_parts_round_trips() -> None:
    num_tensors, num_ranks = 1000, 1000
    chunks = [
        stock.ChunkStorageMetadata(torch.Size([rank * 16, 0]), torch.Size([16, 8]))
        for rank in range(num_ranks)
    ]
    about = stock.TensorStorageMetadata(stock.TensorProperties(), torch.Size([16 * num_ranks, 8]), chunks)
    names = [f"layers.{number}.weight" for number in range(num_tensors)]
    places = {
        stock.MetadataIndex(name, chunk.offsets): _StorageInfo(f"__{rank}_0.distcp", number * 4096, 1589)
        for number, name in enumerate(names)
        for rank, chunk in enumerate(chunks)
    }
    theirs = stock.Metadata(dict.fromkeys(names, about), None, places)
    first = read_metadata(pickle.dumps(theirs), "here")
    second = read_metadata(metadata_bytes(first), "here")
    assert len(first.stored) == num_tensors * num_ranks
    for column in ("file", "item_offset", "item_bytes"):
        assert np.array_equal(getattr(first.stored, column), getattr(second.stored, column))
    assert np.array_equal(first.stored.regions.offsets, second.stored.regions.offsets)


def test_what_the_pickler_forgets_is_written_again() -> None:
    shape = (4, 700)
    facts = tuple(TensorFacts(f"w{number}", "bfloat16", shape, 2) for number in range(3))
    parts = [
        (number, (row, column), (1, 1)) for number in range(3) for row in range(4) for column in range(700)
    ]
    rows = np.arange(len(parts))
    packed = np.zeros(len(parts), dtype=np.bool_)
    stored = StoredRegions(Regions.from_rows(parts), rows % 2, rows * 700, rows * 0 + 699, rows * 700, packed)
    index = CheckpointIndex(facts, stored, (), ("a", "b"), paths={"w0": ("w0",)})
    assert pickle.loads(metadata_bytes(index)) == torch_metadata(index)
    assert len(read_metadata(metadata_bytes(index), "here").stored) == len(parts)
