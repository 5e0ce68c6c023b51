"""Archives of torch.save: each tensor's range and each value are read, and no code runs."""

import argparse
import io
import os
import struct
import sys
import zipfile
from collections import OrderedDict
from typing import Any

import pytest

from penstock.checkpoint.formats.torch_save import TorchSaveArchive, is_plain, read_archive, row_major
from penstock.errors import DataDamaged, UsageError

torch = pytest.importorskip("torch")


def saved(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def opened(content: bytes) -> TorchSaveArchive:
    return read_archive(lambda offset, size: content[offset : offset + size], len(content), "x.pt", "here")


def tensors_in(content: bytes) -> dict[str, bytes]:
    """Every tensor's bytes, by ranges of the file."""
    archive = opened(content)
    stored, found = archive.index.stored, {}
    for row, facts in enumerate(archive.index.tensors):
        item = content[stored.item_offset[row] : stored.item_offset[row] + stored.item_bytes[row]]
        if stored.packed[row]:
            item = bytes(row_major(archive.strided[row], memoryview(item)))
        found[facts.name] = item
    return found


def test_a_training_state_is_a_list_of_ranges_and_values() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    # As AdamW's own state is; torch imports its compiler, which takes a second, before the first optimizer.
    moments = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.full_like(weight, 0.5 + number)}
        for number, weight in enumerate(model.parameters())
    }
    groups = [{"lr": 0.25, "betas": (0.9, 0.999), "maximize": False, "params": list(moments)}]
    optimizer = {"state": moments, "param_groups": groups}
    state = {"model": model.state_dict(), "optim": optimizer, "step": 17, "when": (1.5, None)}
    content = saved(state)
    found = tensors_in(content)
    assert found["model.0.weight"] == model[0].weight.detach().numpy().tobytes()
    assert found["optim.state.3.exp_avg"] == moments[3]["exp_avg"].numpy().tobytes()
    archive = opened(content)
    assert (archive.values["step"], archive.values["when"]) == (17, (1.5, None))
    assert archive.values["optim.param_groups.0.lr"] == 0.25
    assert archive.index.paths["model.0.weight"] == ("model", "0.weight")
    shapes = {facts.name: (facts.dtype, facts.shape) for facts in archive.index.tensors}
    assert shapes["model.0.weight"] == ("float32", (4, 3))


def test_views_share_their_record_and_strided_ones_are_put_in_order() -> None:
    whole = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    views = {"whole": whole, "rows": whole[1:3], "columns": whole[:, 2:4], "turned": whole.t()}
    views["one"], views["none"] = whole[2, 3], whole[:0]
    content = saved(views)
    assert tensors_in(content) == {name: view.contiguous().numpy().tobytes() for name, view in views.items()}
    assert opened(content).index.stored.packed.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint32", "complex64", "bool"])
def test_every_kind_of_storage_is_read(dtype: str) -> None:
    tensor = torch.ones(5).to(getattr(torch, dtype))
    assert tensors_in(saved({"x": tensor}))["x"] == bytes(tensor.view(torch.uint8).numpy())


def test_parameters_and_subclasses_are_tensors_and_a_sole_value_has_a_name() -> None:
    assert tensors_in(saved(torch.nn.Parameter(torch.ones(2)))) == {"value": torch.ones(2).numpy().tobytes()}
    assert opened(saved(12)).values == {"value": 12}


class Runs:
    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


def test_no_code_runs_and_unknown_classes_are_named(tmp_path: Any) -> None:
    flag = tmp_path / "ran"
    values = {
        "bad": Runs(str(flag)),
        "args": argparse.Namespace(lr=1.0),
        "ordered": OrderedDict(a=1),
        "x": torch.ones(1),
    }
    archive = opened(saved(values))
    assert not flag.exists()
    assert repr(archive.values["bad"]) == "<posix.system>"
    assert repr(archive.values["args"]) == "<argparse.Namespace>"
    assert [is_plain(archive.values[name]) for name in ("bad", "args")] == [False, False]
    assert archive.values["ordered.a"] == 1
    assert len(archive.index.tensors) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        b"PK\x03\x04 but no more",
        b"\x80\x02not a zip",
        saved({"x": 1})[:-10],
        saved({"x": 1})[:300],
    ],
)
def test_incomplete_archives_are_damage(content: bytes) -> None:
    with pytest.raises(DataDamaged, match="here"):
        opened(content)


def test_an_archive_of_very_many_records_is_refused_before_they_are_parsed() -> None:
    directory_bytes = (32 << 20) + 1
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, directory_bytes, 4, 0)
    with pytest.raises(DataDamaged, match="its directory has 33,554,433 bytes, more than 33,554,432"):
        opened(b"PK\3\4" + bytes(directory_bytes) + end)


def test_files_before_the_zip_format_are_reported_as_old() -> None:
    with pytest.raises(DataDamaged, match=r"since 1\.6"):
        opened(saved({"x": torch.ones(1)}, _use_new_zipfile_serialization=False))


@pytest.mark.parametrize("value", [torch.ones(200), (torch.ones(200), "in an object")])
@pytest.mark.parametrize(
    "damage", [(b"K\xc8\x85", b"K\xf0\x85"), (b"K\x01\x85", b"J\xff\xff\xff\xff\x85"), (b"K\x01\x85", b")")]
)
def test_a_tensor_outside_of_its_record_is_damage(value: object, damage: tuple[bytes, bytes]) -> None:
    with zipfile.ZipFile(io.BytesIO(saved({"x": value}))) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    # The pickle says how large the tensor is, and its strides; the record does not grow with it.
    changed = {
        name: content.replace(*damage) if name.endswith(".pkl") else content
        for name, content in records.items()
    }
    assert changed != records
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in changed.items():
            archive.writestr(name, content)
    with pytest.raises(DataDamaged, match="outside of its record"):
        opened(file.getvalue())


@pytest.mark.parametrize("place", [lambda tensor: tensor, lambda tensor: (tensor, "in an object")])
def test_one_element_that_stands_for_gigabytes_is_refused(place: Any) -> None:
    expanded = torch.zeros(1).as_strided((1 << 30,), (0,))
    with pytest.raises(DataDamaged, match="or repeats it without end"):
        opened(saved({"x": place(expanded)}))
    assert len(tensors_in(saved({"x": torch.zeros(1).expand(1 << 24)}))["x"]) == 1 << 26


def test_numbers_of_a_big_endian_machine_are_refused() -> None:
    with pytest.raises(UsageError, match="big-endian"):
        opened(saved({"x": torch.ones(2)}).replace(b"little", b"biggie"))


def test_every_flipped_bit_of_the_directory_is_damage_or_harmless() -> None:
    content = saved({"x": torch.arange(5), "n": [1, 2]})
    for position in range(len(content) - 600, len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 16
        try:
            opened(bytes(flipped))
        except (DataDamaged, UsageError) as error:
            assert str(error)  # noqa: PT017 - either way is right, but no other error is


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_and_negative_views_are_resolved(dtype: Any) -> None:
    made = torch.arange(1.0, 25.0).reshape(2, 3, 4).to(dtype) + torch.tensor(0.5j, dtype=dtype)
    views = {
        "conj": made.conj(),
        "turned": made.conj().transpose(0, 2),
        "part": made.conj()[:, 1:, ::2],
        "neg": torch._neg_view(made),
        "both": torch._neg_view(made.conj()),
        "imag": made.clone().conj().imag,
        "none": made.conj()[:0],
        "plain": made,
    }
    found = tensors_in(saved(views))
    for name, view in views.items():
        expected = view.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        assert found[name] == expected.numpy().tobytes(), name


def test_a_tensor_with_unknown_notes_is_opaque() -> None:
    content = saved({"c": torch.ones(2, dtype=torch.complex64).conj()})
    archive = opened(content.replace(b"conj", b"what"))
    assert archive.index.tensors == ()
    assert not is_plain(archive.values["c"])


def test_state_and_items_of_unknown_classes_are_dropped() -> None:
    class Bag(list[int]):
        pass

    globals()["Bag"] = Bag
    Bag.__qualname__ = "Bag"
    bag = Bag([1, 2])
    bag.note = "kept outside"  # type: ignore[attr-defined]
    values = opened(
        saved({"bag": bag, "one": Bag([1]), "set": {1}, "bytes": b"abc", "size": torch.Size([2])})
    ).values
    assert repr(values["bag"]) == f"<{__name__}.Bag>"
    assert (values["set"], values["bytes"], values["size"]) == ({1}, b"abc", (2,))


def test_references_to_anything_but_records_are_damage() -> None:
    from penstock.checkpoint.formats.restricted_pickle import read_torch_pickle

    for pickled in (
        b"\x80\x02X\x01\x00\x00\x00xQ.",
        b"\x80\x02(X\x07\x00\x00\x00storageK\x01K\x01K\x01K\x01tQ.",
    ):
        with pytest.raises(DataDamaged, match="not a record of its archive"):
            read_torch_pickle(pickled, "here")


def test_many_elements_that_stand_for_gigabytes_together_are_refused() -> None:
    expanded = torch.zeros(1).expand(1 << 25)
    for held in ({str(n): expanded[n:] for n in range(4)}, {str(n): [expanded[n:]] for n in range(4)}):
        with pytest.raises(DataDamaged, match=r"repeat the .* bytes of the archive to .* elements"):
            opened(saved(held))


@pytest.mark.parametrize("wrap", [lambda number: number, lambda number: (number, "x")])
def test_keys_that_are_chosen_to_have_the_same_hash_are_refused(wrap: Any) -> None:
    alike = {wrap(number * sys.hash_info.modulus): None for number in range(1, 1200)}
    with pytest.raises(DataDamaged, match="its numbers are chosen to have the same hash"):
        opened(saved(alike))
    complexes = {wrap(complex(-1000003 * number, number)): None for number in range(1, 1200)}
    with pytest.raises(DataDamaged, match="its numbers are chosen to have the same hash"):
        opened(saved(complexes))
    scattered = {wrap(complex(number, number)): None for number in range(5000)}
    assert len(opened(saved(scattered)).value) == 5000
    various = {wrap((1 << 61) + number): None for number in range(5000)}
    assert len(opened(saved(various)).value) == 5000


def test_a_million_of_sets_in_a_megabyte_are_refused() -> None:
    from penstock.checkpoint.formats.restricted_pickle import read_metadata_pickle, read_torch_pickle

    for read in (read_torch_pickle, read_metadata_pickle):
        assert read(b"\x80\x04](" + b"\x8f" * 1000 + b"e.", "here") == [set()] * 1000
        with pytest.raises(DataDamaged, match="it has too many parts"):
            read(b"\x80\x04](" + b"\x8f" * ((1 << 20) + 1) + b"e.", "here")


@pytest.mark.parametrize("part", [b"]", b"}", b"K\x01\x85", b"(t", b"(l"])
def test_pickles_of_millions_of_small_parts_are_refused(part: bytes) -> None:
    from penstock.checkpoint.formats.restricted_pickle import read_metadata_pickle, read_torch_pickle

    # The limit of .metadata grows with its length.
    in_metadata = 9 << (19 if len(part) > 2 else 18)
    for read, number in ((read_metadata_pickle, in_metadata), (read_torch_pickle, (1 << 21) + 1)):
        assert len(read(b"\x80\x04](" + part * 1000 + b"e.", "here")) == 1000
        with pytest.raises(DataDamaged, match="it has too many parts"):
            read(b"\x80\x04](" + part * number + b"e.", "here")
