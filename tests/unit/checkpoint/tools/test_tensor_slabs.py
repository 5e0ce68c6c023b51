"""Slabs are all of a tensor in order, however it is stored; shards and headers are as readers want them."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.checkpoint_source import open_checkpoint
from penstock.checkpoint.formats.dcp_item import envelope, item_start
from penstock.checkpoint.formats.description import metadata_bytes
from penstock.checkpoint.state.regions import UNKNOWN, CheckpointIndex, Regions, StoredRegions, TensorFacts
from penstock.checkpoint.tools.convert import build_header, plan_shards
from penstock.checkpoint.tools.tensor_slabs import SlabReader, cut_into_slabs
from penstock.errors import DataDamaged

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(shape=SHAPES, item_bytes=st.sampled_from([1, 2, 8]), most_bytes=st.integers(8, 200))
def test_slabs_follow_one_another_and_are_all_of_a_tensor(
    shape: tuple[int, ...], item_bytes: int, most_bytes: int
) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape or (1,))
    found = []
    for (prefix, begin, end), num_bytes in cut_into_slabs(shape, item_bytes, most_bytes):
        part = whole[prefix][begin:end]
        assert part.size * item_bytes == num_bytes <= max(most_bytes, item_bytes)
        found += part.ravel().tolist()
    assert found == list(range(math.prod(shape)))


def test_empty_tensors_have_no_slabs_and_scalars_have_one() -> None:
    assert list(cut_into_slabs((3, 0, 2), 4, 100)) == []
    assert list(cut_into_slabs((), 4, 100)) == [(((), 0, 1), 4)]


Cuts = list[tuple[tuple[int, ...], tuple[int, ...]]]


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Cuts]:
    """A shape, and a grid of boxes that are all of it."""
    shape = draw(SHAPES)
    edges = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape]
    regions: Cuts = [((), ())]
    for along in edges:
        spans = list(pairwise(along))
        regions = [((*begin, a), (*size, b - a)) for begin, size in regions for a, b in spans]
    return shape, draw(st.permutations(regions))


def write_boxes(folder: Path, whole: np.ndarray[tuple[int, ...], np.dtype[np.int16]], cuts: Cuts) -> None:
    """A checkpoint of one tensor without a manifest, cut as `cuts` say."""
    content, offsets, sizes = b"", [], []
    for begin, extent in cuts:
        around = envelope("int16", extent)
        content += bytes(item_start(len(content), around) - len(content))
        part = whole[tuple(slice(a, a + n) for a, n in zip(begin, extent, strict=True))]
        offsets.append(len(content))
        sizes.append(around.item_bytes)
        content += around.prefix + part.tobytes() + around.suffix
    rows = np.zeros(len(cuts), dtype=np.int64)
    stored = StoredRegions(
        Regions.from_rows([(0, begin, extent) for begin, extent in cuts]),
        file=rows,
        item_offset=np.array(offsets, dtype=np.int64),
        item_bytes=np.array(sizes, dtype=np.int64),
        payload_offset=rows + UNKNOWN,
        packed=rows.astype(np.bool_),
    )
    contents = CheckpointIndex((TensorFacts("x", "int16", whole.shape, 2),), stored, (), ("__0_0.distcp",))
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(metadata_bytes(contents))


@given(cut=cut_tensors(), most_bytes=st.integers(2, 300))
def test_slabs_are_assembled_from_any_regions(
    tmp_path_factory: pytest.TempPathFactory, cut: tuple[tuple[int, ...], Cuts], most_bytes: int
) -> None:
    shape, cuts = cut
    whole = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    folder = tmp_path_factory.mktemp("cut") / "checkpoint"
    write_boxes(folder, whole, cuts)
    opened = open_checkpoint(folder)
    elements = SlabReader(opened)
    elements.require_whole(0)
    found = b""
    for slab, num_bytes in cut_into_slabs(shape, 2, most_bytes):
        target = bytearray(num_bytes)
        elements.read_slab(0, slab, memoryview(target))
        found += target
    elements.close()
    assert found == whole.tobytes()


def test_a_tensor_that_lacks_a_part_is_damage(tmp_path: Path) -> None:
    whole = np.arange(6, dtype=np.int16).reshape(2, 3)
    write_boxes(tmp_path / "x", whole, [((0, 0), (1, 3))])
    elements = SlabReader(open_checkpoint(tmp_path / "x"))
    with pytest.raises(DataDamaged, match="3 elements of x are stored, but it has 6"):
        elements.require_whole(0)


@given(sizes=st.lists(st.integers(0, 50), max_size=12), most_bytes=st.integers(1, 60))
def test_shards_hold_every_tensor_once_in_order_and_no_more_than_they_may(
    sizes: list[int], most_bytes: int
) -> None:
    tensors = [TensorFacts(str(number), "int8", (size,), 1) for number, size in enumerate(sizes)]
    shards = plan_shards(tensors, range(len(sizes)), most_bytes)
    assert [number for numbers in shards.values() for number in numbers] == list(range(len(sizes)))
    for numbers in shards.values():
        held = [sizes[number] for number in numbers if sizes[number]]
        assert sum(held) <= most_bytes or len(held) == 1


def test_shards_are_named_as_hugging_face_names_them() -> None:
    tensors = [TensorFacts(str(number), "int8", (10,), 1) for number in range(3)]
    assert list(plan_shards(tensors, range(3), 20)) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert list(plan_shards(tensors, range(3), 30)) == ["model.safetensors"]


def test_payloads_of_safetensors_begin_at_a_page() -> None:
    header = build_header([TensorFacts("x", "bfloat16", (3, 2), 2), TensorFacts("é", "int64", (), 8)])
    assert len(header) % 4096 == 0
    document = json.loads(header[8:])
    assert document["x"] == {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]}
    assert document["é"]["data_offsets"] == [12, 20]
