"""safetensors files are read as their own library reads them, and invalid ones are refused."""

import json
from typing import Any

import pytest

from penstock.checkpoint.formats.safetensors import build_index, check_index, read_header, read_index
from penstock.errors import DataDamaged, Unavailable

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")


def header_of(content: bytes) -> list[Any]:
    return read_header(lambda offset, size: content[offset : offset + size], len(content), "here")


def made(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_files_of_the_library_are_located() -> None:
    tensors = {
        "float8": torch.ones(3).to(torch.float8_e5m2),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "unsigned": torch.arange(3).to(torch.uint16),
    }
    content = library.save(tensors, metadata={"format": "pt"})
    found = {}
    for facts, offset in header_of(content):
        raw = content[offset : offset + facts.size_bytes]
        found[facts.name] = (facts.dtype, facts.shape, raw)
    assert found == {
        name: (
            str(tensor.dtype)[6:],
            tuple(tensor.shape),
            bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b"",
        )
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no header"),
        (b"\xff" * 8, "its header would have"),
        (made(b"not json"), "its header"),
        (made([1, 2]), "its header"),
        (made({"x": {"dtype": "F32"}}), "its header"),
        (
            made({"x": {"dtype": "not a tensor"}, "y": entry("F32", [1], 0, 4)}, bytes(4)),
            "shape of 'x' in its header: Field required",
        ),
        (made({"x": entry("F32", [2], 0, 4)}, bytes(4)), "range of x, 0 to 4"),
        (made({"x": entry("F32", [1], 4, 8)}, bytes(8)), "range of x, 4 to 8"),
        (made({"x": entry("F32", [-1], 0, 4)}, bytes(4)), "its header"),
        (made({"x": entry("F32", [1], 0, 4)}, bytes(5)), "it has"),
        (made({"x": entry("F32", [1], 0, 4)}, bytes(3)), "it has"),
        (
            made({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 2, 6)}, bytes(6)),
            "range of y, 2 to 6",
        ),
    ],
)
def test_files_that_the_format_forbids_are_refused(content: bytes, complaint: str) -> None:
    with pytest.raises(DataDamaged, match=complaint):
        header_of(content)


def test_millions_of_values_are_refused_unparsed() -> None:
    from penstock.checkpoint.formats.safetensors import read_index

    many = b'{"weight_map": [' + b"[[[]]]," * (1 << 20) + b"0]}"
    with pytest.raises(DataDamaged, match="more than 4,194,304 values"):
        header_of(made(many))
    with pytest.raises(DataDamaged, match="more than 4,194,304 values"):
        read_index(many, "here")


def test_element_types_that_torch_lacks_are_named() -> None:
    with pytest.raises(Unavailable, match="x has elements of type F6_E2M3"):
        header_of(made({"x": entry("F6_E2M3", [4], 0, 3)}, bytes(3)))


def test_several_files_are_one_checkpoint_if_the_index_agrees() -> None:
    first = header_of(library.save({"a": torch.ones(2)}))
    second = header_of(library.save({"b": torch.ones(3), "c": torch.ones(1)}))
    index = build_index([("1.safetensors", first), ("2.safetensors", second)], "here")
    assert [facts.name for facts in index.tensors] == ["a", "b", "c"]
    assert index.stored.file.tolist() == [0, 1, 1]
    file_of = {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}
    hugging_face_index = json.dumps({"metadata": {}, "weight_map": file_of}).encode()
    check_index(read_index(hugging_face_index, "here"), index, "here")
    with pytest.raises(DataDamaged, match="2 tensors are not in the files that the index names"):
        check_index({**file_of, "a": "2.safetensors", "d": "1.safetensors"}, index, "here")
    with pytest.raises(DataDamaged, match="a is in two of the files"):
        build_index([("1.safetensors", first), ("3.safetensors", first)], "here")


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"x": entry("F32", [2, -1], 0, 4)}, "shape.1 of 'x' in its header: Input should be greater"),
        (
            {"x": {**entry("F32", [1], 0, 4), "shape": [1.5]}},
            "shape.0 of 'x' in its header: Input should be a valid integer",
        ),
        ({"x": entry("F32", [1 << 70], 0, 4)}, "shape.0 of 'x' in its header: Input should be less than"),
        ({"x": {"dtype": "F32", "shape": [1]}}, "data_offsets of 'x' in its header: Field required"),
        ({"x": [1, 2]}, "the entry of 'x' in its header: Input should be a valid dictionary"),
        (
            {"__metadata__": [1]},
            "the entry of '__metadata__' in its header: Input should be a valid dictionary",
        ),
        (
            {"__metadata__": {"epoch": 3}},
            "epoch of '__metadata__' in its header is not text",
        ),
        (
            {"x": entry("F32", [1 << 61] * 65, 0, 4)},
            "shape of 'x' in its header: List should have at most 64 items",
        ),
        ({f"{number}": [0] * 1025 for number in range(4096)}, "more than 4,194,304 values"),
        (b"[" * 5000, "its header cannot be parsed: recursion limit exceeded"),
        (b'{"x": %s}' % (b"9" * 5000), "its header cannot be parsed: number out of range"),
    ],
)
def test_a_wrong_header_is_told_by_tensor(header: object, complaint: str) -> None:
    with pytest.raises(DataDamaged) as raised:
        header_of(made(header))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{}", "does not list a file for each tensor"),
        (b"[]", "does not list a file for each tensor"),
        (b'{"weight_map": []}', "does not list a file for each tensor"),
        (b'{"weight_map": {"a": 1}}', "does not list a file for 'a'"),
        (rb'{"weight_map": {"a": "\ud800.safetensors"}}', "cannot be parsed: unexpected end of hex escape"),
        (b"no json", "cannot be parsed: expected ident"),
        (b"[" * 200_000, "cannot be parsed: recursion limit exceeded"),
        (b'{"weight_map": ' + b'{"a": ' * 200_000, "cannot be parsed: recursion limit exceeded"),
    ],
)
def test_an_index_without_files_is_damage(content: bytes, complaint: str) -> None:
    with pytest.raises(DataDamaged, match=complaint):
        read_index(content, "here")
