"""torch's metadata and ours are equal however they are read, and reading runs no code."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, read_pickle
from penstock.checkpoint.formats.metadata_rows import read_metadata, read_rows
from penstock.checkpoint.formats.metadata_writing import metadata_bytes
from penstock.checkpoint.state.regions import ELEMENT_TYPES, UNKNOWN
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
    meta = stock.StorageMeta(checkpoint_id="/ckpt/7", save_id="an id")
    return stock.Metadata(state, paths, storage, meta, "1.0.0")


@given(theirs=stock_metadata())
def test_rewritten_metadata_is_equal_for_torch(theirs: stock.Metadata) -> None:
    read = read_metadata(pickle.dumps(theirs), "here")
    again = pickle.loads(metadata_bytes(read))
    assert again == theirs


def all_of(read: DcpMetadata) -> list[object]:
    """Everything, so that two can be compared."""
    stored = read.index.stored
    columns: list[Any] = [stored.regions.tensor, stored.regions.offsets, stored.regions.sizes, stored.file]
    columns += [stored.item_offset, stored.item_bytes, stored.payload_offset, stored.packed]
    transforms = [read.descriptors(row) for row in range(len(stored))]
    others = (read.index.tensors, read.index.objects, read.index.files, read.paths, transforms)
    texts = (read.object_transforms, read.save_id, read.checkpoint_id, read.version)
    return [column.tolist() for column in columns] + [*others, *texts]


@given(theirs=stock_metadata(), at=st.integers(0), bit=st.integers(0, 7))
def test_our_own_metadata_is_the_same_read_as_rows_and_as_a_pickle(
    theirs: stock.Metadata, at: int, bit: int
) -> None:
    kinds = {tuple(info.transform_descriptors or ()) for info in theirs.storage_data.values()}
    ours = metadata_bytes(read_pickle(pickle.dumps(theirs), "here"))
    rows = read_rows(ours, "here")
    assert rows is not None or len(kinds - {()}) > 1
    assert rows is None or all_of(rows) == all_of(read_pickle(ours, "here"))
    damaged = bytearray(ours)
    damaged[at % len(ours)] ^= 1 << bit
    try:
        rows = read_rows(bytes(damaged), "here")
    except DataDamaged:
        with pytest.raises((DataDamaged, UsageError)):
            read_pickle(damaged, "here")
    else:
        assert rows is None or all_of(rows) == all_of(read_pickle(damaged, "here"))


def test_a_damaged_length_of_a_large_number_is_not_read_over() -> None:
    name, far = "rng", 1 << 40
    places = {stock.MetadataIndex(name): _StorageInfo("__0_0.distcp", far, 5)}
    theirs = stock.Metadata({name: stock.BytesStorageMetadata()}, {name: (name,)}, places)
    ours = metadata_bytes(read_pickle(pickle.dumps(theirs), "here"))
    number = b"\x8a\x08" + far.to_bytes(8, "little")
    assert ours.count(number) == 1
    assert read_rows(ours, "here") is not None
    damaged = ours.replace(number, b"\x8a\x0a" + number[2:])
    assert read_rows(damaged, "here") is None
    with pytest.raises(DataDamaged):
        read_metadata(damaged, "here")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_metadata_locates_every_item(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3, 4), "scalar": torch.tensor(2.5)}, "steps": [7, torch.arange(5)]}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    read = read_metadata((tmp_path / ".metadata").read_bytes(), "here")
    index = read.index
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
    assert read.save_id is not None
    assert read.checkpoint_id == str(tmp_path)


def test_transformed_items_are_known_as_packed() -> None:
    theirs = small_metadata()
    index = next(iter(theirs.storage_data))
    theirs.storage_data[index].transform_descriptors = ["stream.zstd/1"]
    read = read_metadata(pickle.dumps(theirs), "here")
    assert read.index.stored.packed.tolist() == [True, False]
    assert [read.descriptors(row) for row in (0, 1)] == [("stream.zstd/1",), ()]


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
    assert read.index.tensors[0].dtype == "float16"
    assert (read.version, read.save_id) == (None, None)
    assert read.index.stored.item_offset.tolist() == [0, 1000]


def test_unsharded_tensors_without_offsets_are_located() -> None:
    theirs = small_metadata()
    about = tensor_w(theirs)
    about.chunks = [stock.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))]
    theirs.storage_data = {stock.MetadataIndex("w"): _StorageInfo("__0_0.distcp", 7, 900)}
    assert read_metadata(pickle.dumps(theirs), "here").index.stored.item_offset.tolist() == [7]


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
    assert read_metadata(pickle.dumps(small_metadata()), "here").index.files == ("__0_0.distcp",)


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
    second = read_rows(metadata_bytes(first), "here")
    assert second is not None
    assert len(first.index.stored) == num_tensors * num_ranks
    for column in ("file", "item_offset", "item_bytes"):
        assert np.array_equal(getattr(first.index.stored, column), getattr(second.index.stored, column))
    assert np.array_equal(first.index.stored.regions.offsets, second.index.stored.regions.offsets)
