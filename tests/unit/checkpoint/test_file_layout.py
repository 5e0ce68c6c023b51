"""A file's layout: items where the format requires them, and exact bytes and checksums."""

import io
import math

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.file_layout import (
    FileLayout,
    LayoutFiller,
    Payload,
    lay_out_file,
    payload_of_bytes,
    payload_of_tensor,
    split_range,
)
from penstock.checkpoint.plan.save_plan import Bucket, PlacedObject
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.transfer.pipeline import PlannedObject

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.complex128),
]

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    content = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        content = content % 2
    return content.view(dtype).reshape(shape)


def _bucket(contents: list[bytes], tensors: list[torch.Tensor]) -> tuple[Bucket, tuple[TensorFacts, ...]]:
    facts = tuple(
        TensorFacts(f"t{number}", str(one.dtype).removeprefix("torch."), tuple(one.shape), one.dtype.itemsize)
        for number, one in enumerate(tensors)
    )
    regions = Regions.from_rows([(number, (0,) * one.dim(), one.shape) for number, one in enumerate(tensors)])
    objects = tuple(
        PlacedObject(name=f"o{number}", stored_name=f"o{number}", size_bytes=len(one))
        for number, one in enumerate(contents)
    )
    return Bucket(file="__0_0.distcp", objects=objects, regions=regions), facts


def _filled(
    layout: FileLayout, payloads: list[Payload], chunk_bytes: int, *, sums_hot: bool
) -> tuple[bytes, bytes]:
    """The file and its sums, filled in chunks into memory that was dirty before, then settled in chunks."""
    filler = LayoutFiller([layout], {layout.name: payloads}, device_streams={}, sums_hot=sums_hot)
    content = bytearray(b"\xee" * layout.size_bytes)
    planned = PlannedObject(layout.name, layout.size_bytes)
    for act in (filler.fill, filler.settle):
        for offset in range(0, layout.size_bytes, chunk_bytes):
            act(planned, offset, memoryview(content)[offset : offset + chunk_bytes])
    return bytes(content), filler.sums(layout.name)


@given(
    parts=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5),
    contents=st.lists(st.binary(max_size=300), max_size=3),
    chunk_pages=st.integers(1, 3),
    sums_hot=st.booleans(),
)
def test_torch_reads_each_item_and_checksums_match_the_file(
    *,
    parts: list[tuple[tuple[int, ...], torch.dtype]],
    contents: list[bytes],
    chunk_pages: int,
    sums_hot: bool,
) -> None:
    tensors = [_tensor(shape, dtype) for shape, dtype in parts]
    bucket, facts = _bucket(contents, tensors)
    layout = lay_out_file(bucket, facts)
    payloads = [*map(payload_of_bytes, contents), *map(payload_of_tensor, tensors)]
    content, sums = _filled(layout, payloads, chunk_pages * 4096, sums_hot=sums_hot)
    offsets, sizes, payload_offsets = layout.columns()
    items = [content[at : at + size] for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    assert sums == b"".join(xxhash.xxh3_128_digest(item) for item in items)
    assert items[: len(contents)] == contents
    for item, tensor in zip(items[len(contents) :], tensors, strict=True):
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        assert loaded.dtype == tensor.dtype
        assert loaded.shape == tensor.shape
        assert loaded.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert (payload_offsets[len(contents) :] % 64 == 0).all()
    covered = np.zeros(len(content), dtype=np.bool_)
    for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        assert not covered[at : at + size].any()
        covered[at : at + size] = True
    assert not np.frombuffer(content, dtype=np.uint8)[~covered].any()


@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    bounds=st.tuples(st.integers(0, 700), st.integers(0, 700)),
)
def test_a_range_is_split_into_pieces_in_order(shape: tuple[int, ...], bounds: tuple[int, int]) -> None:
    total = math.prod(shape)
    begin, end = (bound % (total + 1) for bound in sorted(bounds))
    if begin > end:
        begin, end = end, begin
    array = np.arange(total).reshape(shape)
    found = np.full(end - begin, -1)
    pieces = split_range(shape, begin, end)
    for index, place in pieces:
        found[place] = array[index].reshape(-1)
    assert found.tolist() == list(range(begin, end))
    assert len(pieces) <= max(1, 2 * len(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["transposed", "strided", "narrowed", "one row"])
def test_strided_elements_are_gathered_in_row_major_order(kind: str, dtype: torch.dtype) -> None:
    base = _tensor((70, 90), dtype)
    views = {
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "narrowed": base.narrow(1, 5, 60),
        "one row": base.t()[:1],
    }
    view = views[kind]
    payload = payload_of_tensor(view)
    expected = view.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    # Pieces begin and end within rows.
    content = bytearray(len(expected))
    step = 112
    for start in range(0, len(content), step):
        payload.copy_into(start, memoryview(content)[start : start + step])
    assert bytes(content) == expected


def test_conjugated_views_are_saved_as_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    content = bytearray(16)
    payload_of_tensor(value).copy_into(0, memoryview(content))
    assert torch.frombuffer(content, dtype=torch.complex64).tolist() == [1 - 2j, 3 + 4j]


def test_another_dtype_is_converted_while_copying() -> None:
    value = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()
    content = bytearray(48)
    payload = payload_of_tensor(value, torch.bfloat16)
    for start in (0, 20):
        payload.copy_into(start, memoryview(content)[start : start + 20 if start == 0 else None])
    assert torch.frombuffer(content, dtype=torch.bfloat16).tolist() == value.bfloat16().flatten().tolist()


def test_a_single_element_of_a_larger_memory_is_saved_alone() -> None:
    value = torch.arange(10, dtype=torch.int32)[3]
    content = bytearray(4)
    payload_of_tensor(value).copy_into(0, memoryview(content))
    assert int.from_bytes(content, "little") == 3


def test_a_file_without_items_is_empty() -> None:
    bucket, facts = _bucket([], [])
    layout = lay_out_file(bucket, facts)
    assert layout.size_bytes == 0
    assert [len(column) for column in layout.columns()] == [0, 0, 0]


@pytest.mark.parametrize("sums_hot", [True, False])
def test_empty_objects_have_checksums(*, sums_hot: bool) -> None:
    bucket, facts = _bucket([b"", b"", b"x", b""], [])
    layout = lay_out_file(bucket, facts)
    _, sums = _filled(
        layout, [payload_of_bytes(one) for one in (b"", b"", b"x", b"")], 4096, sums_hot=sums_hot
    )
    empty = xxhash.xxh3_128_digest(b"")
    assert sums == empty * 2 + xxhash.xxh3_128_digest(b"x") + empty
