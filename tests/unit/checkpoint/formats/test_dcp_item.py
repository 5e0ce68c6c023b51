"""Tensors in stock items are located or decoded, and packed items are exchanged with torch."""

import io
import operator
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.dcp_item import (
    HEAD_BYTES,
    ZSTD,
    apply_transforms,
    envelope,
    load_object,
    object_bytes,
    open_item,
    payload_in,
    tensor_bytes,
    undo_transforms,
)
from penstock.checkpoint.formats.saved_objects import names_beyond_data
from penstock.checkpoint.state.regions import ELEMENT_TYPES, element_type
from penstock.errors import DataDamaged, Unavailable, UsageError

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402 - torch may be missing


def stock_item(tensor: Any) -> bytes:
    item = io.BytesIO()
    torch.save(tensor, item)
    return item.getvalue()


def elements(dtype: str, shape: tuple[int, ...]) -> Any:
    raw = torch.arange(100_000, dtype=torch.int64).to(torch.uint8)
    width = element_type(dtype).size_bytes
    num_bytes = torch.Size(shape).numel() * width
    raw = raw[:num_bytes] % 2 if dtype == "bool" else raw[:num_bytes]
    return raw.clone().view(getattr(torch, dtype)).reshape(shape)


def bytes_of(tensor: Any) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@given(dtype=st.sampled_from(sorted(ELEMENT_TYPES)), shape=st.lists(st.integers(1, 6), max_size=4).map(tuple))
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_payload_of_a_stock_item_is_found_by_its_head(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = elements(dtype, shape)
    item = stock_item(tensor)
    at = payload_in(item[:HEAD_BYTES], len(item), dtype, shape)
    assert at is not None
    assert item[at : at + tensor.nbytes] == bytes_of(tensor)
    assert bytes(tensor_bytes(item, dtype, shape, where="here")) == bytes_of(tensor)


@pytest.mark.parametrize(
    "strange",
    [
        lambda whole: whole.t(),
        lambda whole: whole[:, 1:3],
        lambda whole: whole[1:3],
        lambda whole: whole[:, :1].expand(4, 5),
        lambda whole: whole[::2],
        torch.nn.Parameter,
    ],
)
def test_elements_in_another_order_or_among_others_are_decoded(strange: Any) -> None:
    tensor = strange(torch.arange(20.0).reshape(4, 5))
    item, shape = stock_item(tensor), tuple(tensor.shape)
    at = payload_in(item[:HEAD_BYTES], len(item), "float32", shape)
    content = bytes_of(tensor.detach())
    assert at is None or item[at : at + len(content)] == content
    assert bytes(tensor_bytes(item, "float32", shape, where="here")) == content


def test_payloads_of_empty_tensors_are_located() -> None:
    item = stock_item(torch.empty(0, 3))
    assert payload_in(item, len(item), "float32", (0, 3)) is not None
    assert bytes(tensor_bytes(item, "float32", (0, 3), where="here")) == b""


def test_our_own_items_are_found_by_their_head() -> None:
    made = envelope("bfloat16", (3, 5))
    item = made.prefix + bytes(30) + made.suffix
    assert payload_in(item[:HEAD_BYTES], len(item), "bfloat16", (3, 5)) == len(made.prefix)


def test_an_item_that_holds_another_tensor_is_damage() -> None:
    item = stock_item(torch.ones(3))
    with pytest.raises(DataDamaged, match=r"should hold float32\[4\] but holds float32\[3\]"):
        tensor_bytes(item, "float32", (4,), where="here")
    with pytest.raises(DataDamaged, match="holds no tensor"):
        tensor_bytes(stock_item(7), "float32", (4,), where="here")


@pytest.mark.parametrize("num_bytes", [0, 3, 29, 100, 500, 1000, 1500])
def test_a_truncated_item_is_damage(num_bytes: int) -> None:
    item = stock_item(torch.ones(30))[:num_bytes]
    assert payload_in(item, len(item), "float32", (30,)) is None or num_bytes > 800
    with pytest.raises(DataDamaged, match="here"):
        tensor_bytes(item, "float32", (30,), where="here")


def test_numbers_of_a_big_endian_machine_are_refused() -> None:
    item = stock_item(torch.ones(3)).replace(b"little", b"biggie")
    assert payload_in(item, len(item), "float32", (3,)) is None
    with pytest.raises(UsageError, match="big-endian"):
        tensor_bytes(item, "float32", (3,), where="here")


def test_compressed_items_are_exchanged_with_torch_both_ways() -> None:
    item = stock_item(torch.ones(1000))
    theirs = io.BytesIO()
    stream = ZStandard().transform_to(theirs)
    stream.write(item)
    stream.flush(1)  # type: ignore[call-arg]  # zstandard's own: ends the frame and leaves `theirs` open
    packed = theirs.getvalue()
    assert bytes(tensor_bytes(packed, "float32", (1000,), transforms=[ZSTD], where="here")) == bytes_of(
        torch.ones(1000)
    )
    assert ZStandard().transform_from(io.BytesIO(apply_transforms(item, [ZSTD]))).read() == item
    assert len(apply_transforms(item, [ZSTD])) < len(item) / 2


def test_unknown_transforms_and_damaged_frames_are_errors() -> None:
    with pytest.raises(Unavailable, match=r"'stream\.aes/3' is not supported"):
        undo_transforms(b"", ["stream.aes/3"], "here", at_most=None)
    with pytest.raises(UsageError, match=r"'stream\.zstd/2' is not supported"):
        apply_transforms(b"", ["stream.zstd/2"])
    with pytest.raises(DataDamaged, match="cannot be unpacked"):
        undo_transforms(b"no frame of zstd", [ZSTD], "here", at_most=None)


def test_a_compressed_item_unpacks_to_no_more_than_its_tensor_or_an_object_has() -> None:
    bomb = apply_transforms(bytes(300 << 20), [ZSTD])
    with pytest.raises(DataDamaged, match="unpacks to over 1048592 bytes"):
        tensor_bytes(bomb, "float32", (4,), transforms=[ZSTD], where="here")
    with pytest.raises(DataDamaged, match="unpacks to over 268435456 bytes"):
        load_object(bomb, "x", transforms=[ZSTD], trust=False, where="here")
    zeros = apply_transforms(stock_item(torch.zeros(1 << 24)), [ZSTD])
    assert len(tensor_bytes(zeros, "float32", (1 << 24,), transforms=[ZSTD], where="here")) == 1 << 26


def test_objects_come_back_and_classes_need_trust() -> None:
    value = {"lr": 0.5, "steps": [1, 2], "rng": torch.arange(3)}
    item = apply_transforms(object_bytes(value), [ZSTD])
    read = load_object(item, "x", transforms=[ZSTD], trust=False, where="here")
    assert (read["lr"], read["steps"], read["rng"].tolist()) == (0.5, [1, 2], [0, 1, 2])
    from fractions import Fraction

    item = object_bytes(Fraction(1, 3))
    with pytest.raises(UsageError, match=r"The object x is more than data: .*fractions\.Fraction"):
        load_object(item, "x", trust=False, where="here")
    assert load_object(item, "x", trust=True, where="here") == Fraction(1, 3)


@pytest.mark.parametrize("trust", [False, True])
def test_garbled_objects_are_damage(*, trust: bool) -> None:
    item = object_bytes([1, 2, 3])
    garbled = object_bytes("ab").replace(b"ab", b"\xff\xfe")
    for content in (item[:-30], b"", b"no archive at all", garbled):
        with pytest.raises((DataDamaged, UsageError), match="The object x"):
            load_object(content, "x", trust=trust, where="here")


def test_an_object_of_a_module_with_a_hyphen_needs_trust(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("conf-v2")
    exec("class Config:\n    lr = 0.1", vars(module))
    monkeypatch.setitem(sys.modules, "conf-v2", module)
    item = object_bytes(module.Config())
    with pytest.raises(UsageError, match=r"conf-v2\.Config"):
        load_object(item, "config", trust=False, where="here")
    assert names_beyond_data(open_item(item, "here")[0].value) == ["conf-v2.Config"]


@pytest.mark.parametrize(
    "value",
    [None, True, 0, 255, -1, 65536, -(1 << 70), 1 << 2000, -0.0, 2.5, "", "é\0q.", "PK\x07\x08"],
    ids=repr,
)
def test_scalars_of_any_kind_come_back(value: object) -> None:
    assert repr(load_object(object_bytes(value), "x", trust=False, where="here")) == repr(value)


class Outer:
    class Color(Enum):
        RED = 1


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (OrderedDict, ["a class or function"]),
        (Path, ["pathlib.Path"]),
        ({"act": torch.nn.functional.relu}, ["torch.nn.functional.relu"]),
        ([operator.add, 1 << 3000], ["operator.add"]),
        ([Path, 1 << 3000], ["pathlib.Path"]),
        ((1 << 3000, torch.ones(3).untyped_storage()), ["a class or function"]),
        (Outer.Color.RED, []),
    ],
)
def test_classes_and_functions_are_no_data_and_nothing_stands_in_for_them(
    value: Any, named: list[str]
) -> None:
    item = object_bytes(value)
    assert [
        name
        for name in named
        if not any(name in each for each in names_beyond_data(open_item(item, "here")[0].value))
    ] == []
    if not named:
        assert load_object(item, "x", trust=False, where="here") is value
    else:
        with pytest.raises(UsageError, match="The object x is more than data"):
            load_object(item, "x", trust=False, where="here")


def test_integers_of_any_size_are_data_also_next_to_tensors() -> None:
    others = {
        "dtypes": {torch.bfloat16, torch.qint8},
        "device": torch.device("cuda", 1),
        "size": torch.Size([2, 3]),
        "range": [range(3), slice(1, None), frozenset({1})],
    }
    item = object_bytes({"seed": 1 << 3000, "mean": torch.arange(3.0), **others})
    loaded = load_object(item, "state", trust=False, where="here")
    assert repr({name: loaded[name] for name in others}) == repr(others)
    assert loaded["seed"] == 1 << 3000
    assert torch.equal(loaded["mean"], torch.arange(3.0))
