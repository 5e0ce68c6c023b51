"""Items that we write are valid archives for torch and for other readers of ZIP files."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.dcp_item import (
    ALIGNED_BYTES,
    PAYLOAD_ALIGNMENT,
    Envelope,
    directory,
    envelope,
    item_start,
    tensor_pickle,
)
from penstock.checkpoint.formats.torch_save import ZipRecord
from penstock.checkpoint.state.regions import ELEMENT_TYPES, element_type
from penstock.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")

DTYPES = st.sampled_from(sorted(ELEMENT_TYPES))
SHAPES = st.lists(st.integers(0, 7), max_size=5).map(tuple)


def some_payload(dtype: str, shape: tuple[int, ...]) -> bytes:
    size_bytes = math.prod(shape) * element_type(dtype).size_bytes
    raw = torch.arange(size_bytes, dtype=torch.int64).to(torch.uint8)
    return bytes((raw % 2 if dtype == "bool" else raw).numpy())


def item_of(made: Envelope, payload: bytes) -> bytes:
    return made.prefix + payload + made.suffix


class ArgumentsReader(pickle.Unpickler):
    """Gives back what a tensor would be rebuilt from."""

    def persistent_load(self, pid: object) -> object:
        return pid

    def find_class(self, module: str, name: str) -> Any:
        return dict if name == "OrderedDict" else lambda *arguments: arguments


@given(dtype=DTYPES, shape=SHAPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_reads_an_item_as_the_tensor_it_is(dtype: str, shape: tuple[int, ...]) -> None:
    made, payload = envelope(dtype, shape), some_payload(dtype, shape)
    item = item_of(made, payload)
    tensor = torch.load(io.BytesIO(item), weights_only=True)
    assert len(item) == made.item_bytes
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    if payload:
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == payload


@given(dtype=DTYPES, shape=SHAPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_pickle_inside_is_torchs_own_to_the_byte(dtype: str, shape: tuple[int, ...]) -> None:
    stock = io.BytesIO()
    torch.save(torch.empty(shape, dtype=getattr(torch, dtype)), stock)
    theirs = zipfile.ZipFile(stock).read("archive/data.pkl")
    assert tensor_pickle(element_type(dtype), shape) == theirs


@pytest.mark.parametrize("extent", [1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40])
def test_lengths_of_every_width_are_pickled_right(extent: int) -> None:
    pickled = io.BytesIO(tensor_pickle(element_type("int8"), (extent, 2)))
    storage, offset, shape, strides, *_ = ArgumentsReader(pickled).load()
    assert storage[4] == extent * 2
    assert (offset, shape, strides) == (0, (extent, 2), (2, 1))


def test_an_item_beyond_4_gib_is_read_by_torch(tmp_path: Path) -> None:
    num_elements = (1 << 30) + 17
    made = envelope("float32", (num_elements,))
    path = tmp_path / "item"
    with path.open("wb") as file:
        file.write(made.prefix)
        file.seek(len(made.prefix) + made.payload_bytes - 4)
        file.write(b"\x00\x00\x80\x3f")  # 1.0, the last element of a file with a hole
        file.write(made.suffix)
    assert path.stat().st_size == made.item_bytes
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (num_elements,)
    assert (tensor[0], tensor[-1]) == (0.0, 1.0)


def test_records_behind_4_gib_of_others_are_listed_where_they_are() -> None:
    big = ZipRecord("archive/data/0", 100, (1 << 32) + 5)
    last = ZipRecord("archive/data/1", (1 << 32) + 300, 7)
    listed = zipfile.ZipFile(io.BytesIO(directory((big, last), 0))).infolist()
    assert [(info.header_offset, info.file_size) for info in listed] == [
        (100, (1 << 32) + 5),
        ((1 << 32) + 300, 7),
    ]


@given(position=st.integers(0, 1 << 45), dtype=DTYPES, shape=SHAPES)
def test_large_payloads_are_placed_at_whole_pages_and_small_ones_without_waste(
    position: int, dtype: str, shape: tuple[int, ...]
) -> None:
    around = envelope(dtype, shape)
    step = PAYLOAD_ALIGNMENT if around.payload_bytes >= ALIGNED_BYTES else 64
    start = item_start(position, around)
    assert (start + len(around.prefix)) % step == 0
    assert position <= start < position + step


def test_unknown_element_type_error_suggests_a_similar_one() -> None:
    with pytest.raises(UsageError, match="Did you mean float8_e4m3fn"):
        envelope("float8_e4m3", (1,))
