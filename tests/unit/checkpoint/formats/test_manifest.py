"""The manifest round-trips, detects every flipped bit, and must agree with the metadata."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.description import (
    SUM_BYTES,
    Manifest,
    ManifestFile,
    WrittenFile,
    build_manifest,
    checksum_of,
    join_manifest,
    manifest_bytes,
    read_manifest,
)
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
)
from penstock.errors import DataDamaged, Unavailable, UsageError

METADATA = b"the metadata"


def columns(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def some_contents() -> CheckpointIndex:
    """Two tensors, one in two parts, and an object, in two files."""
    tensors = (TensorFacts("w", "float32", (4, 2), 4), TensorFacts("b", "int8", (3,), 1))
    regions = Regions.from_rows([(0, (0, 0), (2, 2)), (0, (2, 0), (2, 2)), (1, (0,), (3,))])
    stored = StoredRegions(
        regions,
        file=columns(0, 1, 1),
        item_offset=columns(500, 100, 9000),
        item_bytes=columns(600, 600, 587),
        payload_offset=columns(UNKNOWN, UNKNOWN, UNKNOWN),
        packed=np.zeros(3, dtype=np.bool_),
    )
    return CheckpointIndex(
        tensors, stored, (StoredObject("lr", 0, 0, 400),), ("__0_0.distcp", "__1_0.distcp")
    )


def sums(*texts: bytes) -> bytes:
    return b"".join(map(checksum_of, texts))


def some_files() -> tuple[WrittenFile, WrittenFile]:
    first = WrittenFile(
        name="__0_0.distcp",
        size_bytes=1100,
        item_offset=columns(0, 500),
        item_bytes=columns(400, 600),
        payload_offset=columns(0, 600),
        sums=sums(b"lr", b"w0"),
    )
    second = WrittenFile(
        name="__1_0.distcp",
        size_bytes=9587,
        item_offset=columns(100, 9000),
        item_bytes=columns(600, 587),
        payload_offset=columns(200, 9100),
        sums=sums(b"w1", b"b"),
    )
    return first, second


def some_manifest(**changes: Any) -> Manifest:
    made = build_manifest(
        some_contents(), some_files(), METADATA, step=7, world_size=2, mesh={"dp": 2}, facts={"why": "last"}
    )
    return replace(made, **changes)


def same(one: Manifest, other: Manifest) -> bool:
    return manifest_bytes(one) == manifest_bytes(other)


def test_a_manifest_comes_back_as_it_was_written() -> None:
    made = some_manifest()
    read = read_manifest(manifest_bytes(made), "here")
    assert same(read, made)
    assert (read.step, read.world_size, dict(read.mesh), dict(read.facts)) == (
        7,
        2,
        {"dp": 2},
        {"why": "last"},
    )
    assert (read.metadata_bytes, read.metadata_sum) == (len(METADATA), checksum_of(METADATA))
    assert read.size_bytes == 1100 + 9587
    assert [read.names[number] for number in read.files[1].item_name] == ["w", "b"]


@given(
    names=st.lists(st.text(), max_size=4),
    rows=st.lists(st.integers(0, 1 << 50), max_size=5),
    step=st.integers(0),
)
def test_any_manifest_comes_back(names: list[str], rows: list[int], step: int) -> None:
    if not names:
        rows = []
    offsets = np.cumsum([0, *rows], dtype=np.int64)
    file = ManifestFile(
        name="f",
        size_bytes=int(offsets[-1]),
        item_name=columns(*(row % len(names) for row in rows)),
        item_offset=offsets[:-1],
        item_bytes=columns(*rows),
        payload_offset=offsets[:-1],
        sums=bytes(SUM_BYTES * len(rows)),
    )
    made = Manifest(
        step=step % (1 << 60), metadata_bytes=0, metadata_sum=checksum_of(), names=tuple(names), files=(file,)
    )
    assert same(read_manifest(manifest_bytes(made), "here"), made)


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    whole = manifest_bytes(some_manifest())
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            with pytest.raises(DataDamaged, match="here"):
                read_manifest(flipped, "here")


@pytest.mark.parametrize("missing", [1, 10, 10_000])
def test_a_truncated_or_empty_manifest_is_damaged(missing: int) -> None:
    with pytest.raises(DataDamaged, match="own checksum"):
        read_manifest(manifest_bytes(some_manifest())[:-missing], "here")


def resummed(text: bytes) -> bytes:
    """A manifest that somebody changed, with a sum that is right."""
    head, rest = text[:44], text[76:]
    return head + checksum_of(head, rest).hex().encode() + rest


def test_a_manifest_of_millions_of_values_is_neither_read_nor_written() -> None:
    whole = manifest_bytes(some_manifest())
    for many in (b"0," * (1 << 24), b"[]," * (1 << 23)):
        with pytest.raises(DataDamaged, match="more than 16,777,216 values"):
            read_manifest(resummed(whole.replace(b'"path":[', b'"path":[' + many)), "here")
    facts = {"many": "," * (1 << 24)}
    with pytest.raises(UsageError, match="parts is too large: it has more than"):
        manifest_bytes(replace(some_manifest(), facts=facts))


def test_a_newer_version_is_unavailable_not_damaged() -> None:
    newer = resummed(manifest_bytes(some_manifest()).replace(b'"version":2', b'"version":3'))
    with pytest.raises(Unavailable, match="has version 3; this Penstock reads versions up to 2"):
        read_manifest(newer, "here")


def test_unknown_keys_are_refused_by_name() -> None:
    strange = resummed(manifest_bytes(some_manifest()).replace(b'"step":7', b'"step":7,"stepp":8'))
    with pytest.raises(DataDamaged, match="stepp"):
        read_manifest(strange, "here")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"item_offset": columns(100, 650)}, "overlap or reach outside"),
        ({"item_offset": columns(-1, 9000)}, "overlap or reach outside"),
        ({"size_bytes": 9586}, "overlap or reach outside"),
        ({"item_name": columns(0, 3)}, "overlap or reach outside"),
        ({"payload_offset": columns(99, 9100)}, "overlap or reach outside"),
        ({"payload_offset": columns(9100)}, "not equally long"),
        ({"sums": b""}, "not equally long"),
        ({"name": "../f"}, "not a plain path"),
    ],
)
def test_impossible_items_are_refused(change: dict[str, Any], complaint: str) -> None:
    first, second = some_manifest().files
    spoiled = some_manifest(files=(first, replace(second, **change)))
    with pytest.raises(DataDamaged, match=complaint):
        read_manifest(manifest_bytes(spoiled), "here")


def test_joining_adds_payload_positions_and_checksums_to_the_index() -> None:
    joined = join_manifest(some_contents(), some_manifest(), "here")
    assert joined.stored.payload_offset.tolist() == [600, 200, 9100]
    assert joined.sums is not None
    assert [bytes(row) for row in joined.sums] == [checksum_of(b"w0"), checksum_of(b"w1"), checksum_of(b"b")]
    assert joined.objects[0].sum == checksum_of(b"lr")


def test_metadata_and_manifest_of_different_checkpoints_do_not_join() -> None:
    index = some_contents()
    moved = replace(index.stored, item_offset=index.stored.item_offset + 1)
    with pytest.raises(DataDamaged, match=r"items of __0_0\.distcp"):
        join_manifest(replace(index, stored=moved), some_manifest(), "here")
    with pytest.raises(DataDamaged, match=r"does not list the file __9_0\.distcp"):
        join_manifest(replace(index, files=("__0_0.distcp", "__9_0.distcp")), some_manifest(), "here")


def test_a_file_or_an_item_that_was_not_written_stops_the_commit() -> None:
    first, second = some_files()
    with pytest.raises(DataDamaged, match=r"__1_0\.distcp"):
        build_manifest(some_contents(), (first,), METADATA)
    short = replace(second, item_offset=columns(100), item_bytes=columns(600), sums=sums(b"w1"))
    with pytest.raises(DataDamaged, match=r"items of __1_0\.distcp"):
        build_manifest(some_contents(), (first, short), METADATA)


def test_files_without_items_are_left_out() -> None:
    empty = WrittenFile(
        name="__2_0.distcp",
        size_bytes=0,
        item_offset=columns(),
        item_bytes=columns(),
        payload_offset=columns(),
        sums=b"",
    )
    assert len(build_manifest(some_contents(), (*some_files(), empty), METADATA).files) == 2


def test_the_index_in_a_manifest_is_the_one_in_the_metadata() -> None:
    index = replace(some_contents(), paths={"b": ("m", "b"), "w": ("m", 0), "lr": ("lr",), "gone": ("gone",)})
    made = build_manifest(index, some_files(), METADATA)
    read = read_manifest(manifest_bytes(made), "here").index
    joined = join_manifest(index, made, "here")
    assert read is not None
    assert (read.tensors, read.objects, read.files) == (joined.tensors, joined.objects, joined.files)
    assert list(read.paths.items()) == [("b", ("m", "b")), ("w", ("m", 0)), ("lr", ("lr",))]
    for column in ("file", "item_offset", "item_bytes", "payload_offset", "packed"):
        assert np.array_equal(getattr(read.stored, column), getattr(joined.stored, column))
    for column in ("tensor", "offsets", "sizes"):
        assert np.array_equal(getattr(read.stored.regions, column), getattr(joined.stored.regions, column))
    assert np.array_equal(np.asarray(read.sums), np.asarray(joined.sums))


def test_transformed_items_have_no_payload_in_the_index() -> None:
    index = some_contents()
    packed = replace(index.stored, packed=np.ones(3, dtype=np.bool_))
    objects = tuple(replace(held, transforms=("stream.zstd/1",)) for held in index.objects)
    index = replace(index, stored=packed, objects=objects, transforms=[("stream.zstd/1",)] * 3)
    read = read_manifest(manifest_bytes(build_manifest(index, some_files(), METADATA)), "here").index
    assert read is not None
    assert read.stored.payload_offset.tolist() == [UNKNOWN] * 3
    assert [read.transforms_of(row) for row in range(3)] == [("stream.zstd/1",)] * 3
    mixed = replace(index, transforms=[(), ("a/1",), ()])
    assert build_manifest(mixed, some_files(), METADATA).index is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ((b'"extent":[2,2]', b'"extent":[3,3]'), r"A region of w at \[0, 0\] of \[3, 3\] is outside"),
        ((b'"extent":[2,2]', b'"extent":[2]'), "differ in length"),
        ((b'"begin":[0,0]', b'"begin":[-1,0]'), "outside its shape"),
        ((b'"dtype":["float32"', b'"dtype":["posix.system"'), "is not an element type"),
        ((b'"shape":[[4,2]', b'"shape":[[4,2,1]'), "differ in length"),
        ((b'"names":["w","b"', b'"names":["w","w"'), "differ in length"),
        ((b'"order":[]', b'"order":[9]'), "zip"),
        ((b'"dtype":["float32","int8"]', b'"dtype":["float32"]'), "differ in length"),
    ],
)
def test_a_forged_index_is_refused(change: tuple[bytes, bytes], complaint: str) -> None:
    whole = manifest_bytes(some_manifest())
    assert whole.count(change[0]) == 1
    with pytest.raises(DataDamaged, match=complaint):
        read_manifest(resummed(whole.replace(*change)), "here")


def test_a_manifest_of_version_1_has_no_index_and_is_read() -> None:
    whole = json.loads(manifest_bytes(some_manifest()))
    del whole["index"]
    for file in whole["files"]:
        del file["items"]["begin"], file["items"]["extent"]
    whole["version"] = 1
    text = json.dumps(whole, separators=(",", ":")).encode() + b"\n"
    read = read_manifest(resummed(text), "here")
    assert read.index is None
    assert join_manifest(some_contents(), read, "here").stored.payload_offset.tolist() == [600, 200, 9100]
