"""Conversions that stock torch and safetensors read back bit for bit, differences found, removals refused."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock.checkpoint.formats.checkpoint_source import Format, open_checkpoint
from penstock.checkpoint.tools.convert import convert
from penstock.checkpoint.tools.diff import Outcome, compare
from penstock.checkpoint.tools.inspection import list_checkpoints
from penstock.checkpoint.tools.verify import verify
from penstock.cli import main
from penstock.errors import DataDamaged, UsageError

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402 - torch may be missing
from torch.distributed.checkpoint.state_dict_loader import load as stock_load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as stock_save  # noqa: E402

import penstock.checkpoint as pc  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DCP, TORCH, SAFETENSORS = Format.DCP, Format.TORCH_SAVE, Format.SAFETENSORS


def tensors() -> dict[str, Any]:
    return {
        "w": torch.arange(1200, dtype=torch.float32).reshape(30, 40),
        "turned": torch.arange(12).reshape(3, 4).t(),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "unsigned": torch.arange(5).to(torch.uint16),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
    }


def state() -> dict[str, Any]:
    return {"model": tensors(), "list": [torch.ones(2), {"k": 3}], "rng": (1, torch.arange(3)), "step": 7}


def same_bits(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.numel():
        return True
    return bool(torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))))


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert same_bits(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, counterpart in zip(one, other, strict=True):
            assert_same(each, counterpart)
    else:
        assert one == other


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "state.pt")
    return tmp_path / "state.pt"


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    stock_save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_becomes_a_checkpoint_that_stock_torch_reads(
    archive: Path, tmp_path: Path, *, compress: bool
) -> None:
    done = convert(archive, tmp_path / "dcp", DCP, compress=compress)
    assert (done.num_tensors, done.num_objects, done.left_out) == (8, 3, ())
    assert bool(done.notes) == compress
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back.pt")
    assert_same(state(), torch.load(tmp_path / "back.pt", weights_only=True))
    found = verify(tmp_path / "dcp")
    assert found.is_whole
    assert found.checked_bytes == found.size_bytes
    stored = open_checkpoint(tmp_path / "dcp").index.stored
    assert stored.packed.all() if compress else (stored.payload_offset % 64 == 0).all()


def test_the_archive_of_a_model_and_its_optimizer_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    training: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 17}
    torch.save(training, tmp_path / "training.pt")
    convert(tmp_path / "training.pt", tmp_path / "dcp", DCP)
    convert(tmp_path / "dcp", tmp_path / "back.pt", TORCH)
    assert_same(training, torch.load(tmp_path / "back.pt", weights_only=True))


def test_keys_of_dicts_keep_their_types(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    odd: dict[str, Any] = {"shards": {"0": "a", "1": "b"}, "pairs": {(1, 2): 5}, "none": {None: 1}}
    pc.save({"optim": optimizer, "scheduler": scheduler, "odd": odd}, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "dcp", DCP)
    target: dict[str, Any] = {"odd": {}, "scheduler": {}}
    pc.load(target, tmp_path / "dcp", strict=False)
    assert target["odd"] == odd
    for source in ("saved", "dcp"):
        convert(tmp_path / source, tmp_path / f"{source}.pt", TORCH)
        loaded = torch.load(tmp_path / f"{source}.pt", weights_only=False)
        assert loaded["odd"] == odd
        assert dict(loaded["scheduler"]["milestones"]) == {3: 1, 5: 1}
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(loaded["optim"])
        assert_same(optimizer.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_archive_keeps_empty_dicts_and_the_types_of_keys(tmp_path: Path, kind: Any, steps: int) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = kind(model.parameters(), lr=0.25)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    odd: dict[str, Any] = {"empty": {}, "text": {"0": 1}, "numbers": {0: "a", 5: {}}, "pairs": {(1, 2): 3}}
    training = {"model": model.state_dict(), "optim": optimizer.state_dict(), "odd": odd}
    torch.save(training, tmp_path / "training.pt")
    convert(tmp_path / "training.pt", tmp_path / "dcp", DCP)
    convert(tmp_path / "dcp", tmp_path / "back.pt", TORCH)
    convert(tmp_path / "training.pt", tmp_path / "again.pt", TORCH)
    for path in (tmp_path / "training.pt", tmp_path / "dcp", tmp_path / "back.pt"):
        target: dict[str, Any] = {"odd": {}}
        pc.load(target, path, strict=False)
        assert target["odd"] == odd
        other = kind(model.parameters())
        pc.load({"model": model, "optim": other}, path)
        assert_same(optimizer.state_dict(), other.state_dict())
    for path in (tmp_path / "back.pt", tmp_path / "again.pt"):
        assert_same(training, torch.load(path, weights_only=True))


def test_a_stock_checkpoint_becomes_an_archive_and_goes_through_compression(
    stock: Path, tmp_path: Path
) -> None:
    convert(stock, tmp_path / "small", DCP, compress=True)
    convert(tmp_path / "small", tmp_path / "large", DCP)
    convert(tmp_path / "large", tmp_path / "back.pt", TORCH)
    assert_same(state(), torch.load(tmp_path / "back.pt", weights_only=True))
    assert verify(tmp_path / "back.pt").is_whole
    wanted = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}}
    stock_load(wanted, checkpoint_id=tmp_path / "large", no_dist=True)
    assert_same({"model": tensors()}, wanted)


def test_safetensors_are_written_with_an_index_that_their_library_agrees_with(
    stock: Path, tmp_path: Path
) -> None:
    done = convert(stock, tmp_path / "hf", SAFETENSORS, only=("model.*",), shard_bytes=3000)
    assert "rng" in done.left_out
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        part = library.load_file(tmp_path / "hf" / name)
        assert all(index["weight_map"][key] == name for key in part)
        found.update(part)
    assert_same({f"model.{name}": tensor for name, tensor in tensors().items()}, found)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    convert(tmp_path / "hf", tmp_path / "one.safetensors", SAFETENSORS)
    assert_same(found, library.load_file(tmp_path / "one.safetensors"))
    convert(tmp_path / "hf", tmp_path / "dcp", DCP)
    assert compare(stock, tmp_path / "dcp", only=("model.*",)).are_same


def test_what_a_format_cannot_hold_is_refused_by_name(stock: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only tensors, which these parts are not: "):
        convert(stock, tmp_path / "hf", SAFETENSORS)
    torch.save({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "z.pt")
    with pytest.raises(UsageError, match="does not support complex128, the type of z"):
        convert(tmp_path / "z.pt", tmp_path / "z.safetensors", SAFETENSORS)
    with pytest.raises(UsageError, match="torch has no compression"):
        convert(stock, tmp_path / "x.pt", TORCH, compress=True)
    with pytest.raises(UsageError, match=r"No name in .* matches nothing\*"):
        convert(stock, tmp_path / "x.pt", TORCH, only=("nothing*",))
    assert not (tmp_path / "hf").exists()


def test_classes_are_not_rebuilt_without_being_asked(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1.0), "w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="is more than data: it is made of argparse"):
        convert(tmp_path / "x.pt", tmp_path / "dcp", DCP)
    assert list_names(tmp_path) == ["x.pt"]
    done = convert(tmp_path / "x.pt", tmp_path / "dcp", DCP, tensors_only=True)
    assert done.left_out == ("args",)
    stock_save({"args": argparse.Namespace(lr=1.0)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(UsageError, match="args is more than data"):
        convert(tmp_path / "stock", tmp_path / "y.pt", TORCH)
    convert(tmp_path / "stock", tmp_path / "y.pt", TORCH, trust=True)
    assert torch.load(tmp_path / "y.pt", weights_only=False)["args"].lr == 1.0
    # Between distributed checkpoints an object moves as it is, and nobody looks into it.
    convert(tmp_path / "stock", tmp_path / "moved", DCP)
    assert compare(tmp_path / "stock", tmp_path / "moved").are_same


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_overwritten(archive: Path, stock: Path, tmp_path: Path) -> None:
    for target, to in ((archive, TORCH), (stock, DCP), (stock, SAFETENSORS), (stock, TORCH)):
        with pytest.raises(UsageError, match="exists already"):
            convert(stock, target, to)


def test_a_damaged_source_is_refused(stock: Path, tmp_path: Path) -> None:
    path = stock / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(tensors()["w"].numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataDamaged, match=r"damaged in 1 places; the first: __0_0\.distcp, model\.w"):
        convert(stock, tmp_path / "x.pt", TORCH)
    convert(stock, tmp_path / "x.pt", TORCH, verified=False)
    assert compare(stock, tmp_path / "x.pt").are_same


def test_differences_are_counted_by_element(tmp_path: Path) -> None:
    first, second = state(), state()
    second["model"]["w"][3, 4] += 2.5
    second["model"]["w"][0, 0] = -0.0
    second["model"]["scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    second["model"]["flags"] = torch.tensor([1, 0, 1])
    second["step"] = 8
    second["rng"] = (1, torch.arange(1, 4))
    del second["model"]["unsigned"]
    second["more"] = torch.ones(1)
    torch.save(first, tmp_path / "1.pt")
    torch.save(second, tmp_path / "2.pt")
    convert(tmp_path / "2.pt", tmp_path / "2", DCP)
    found = compare(tmp_path / "1.pt", tmp_path / "2")
    parts = {part.name: part for part in found.parts if part.outcome is not Outcome.SAME}
    assert {name: part.outcome for name, part in parts.items()} == {
        "model.w": Outcome.VALUES,
        "model.scalar": Outcome.VALUES,
        "model.flags": Outcome.FORM,
        "model.unsigned": Outcome.ONLY_FIRST,
        "more": Outcome.ONLY_SECOND,
        "step": Outcome.VALUES,
        "rng": Outcome.VALUES,
    }
    assert (parts["model.w"].different_elements, parts["model.w"].largest_difference) == (2, 2.5)
    assert parts["model.scalar"].largest_difference == 1.0
    assert (parts["step"].first, parts["step"].second) == ("7", "8")


def test_tensors_inside_objects_keep_their_shared_memory_and_come_along(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    inner = (shared, shared[2:4], torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2))
    stock_save({"x": inner}, checkpoint_id=tmp_path / "stock", no_dist=True)
    convert(tmp_path / "stock", tmp_path / "x.pt", TORCH)
    back = torch.load(tmp_path / "x.pt", weights_only=True)["x"]
    assert_same(inner, back)
    assert back[0].data_ptr() + 8 == back[1].data_ptr()
    assert compare(tmp_path / "stock", tmp_path / "x.pt").are_same


def quantized() -> dict[str, Any]:
    values, scales, zeros = (
        torch.arange(6.0).reshape(3, 2),
        torch.tensor([0.1, 0.2, 0.5]),
        torch.tensor([0, 1, 2]),
    )
    return {
        "whole": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "turned": torch.quantize_per_tensor(values, 0.5, 0, torch.quint8).t(),
        "rows": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint32),
        "floats": torch.quantize_per_channel(values, scales, zeros.float(), 0, torch.quint8),
        "inside": (torch.quantize_per_tensor(values, 0.1, 3, torch.qint8), 1),
    }


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning", "ignore:TypedStorage is deprecated")
def test_quantized_tensors_come_out_of_an_archive_and_go_into_one(tmp_path: Path, capsys: Any) -> None:
    archive, folder, back = tmp_path / "q.pt", tmp_path / "q", tmp_path / "back.pt"
    torch.save({"q": quantized(), "w": torch.ones(3)}, archive)
    state = {"q": dict.fromkeys(quantized()), "w": torch.zeros(3)}
    pc.load(state, archive)
    assert torch.equal(state["w"], torch.ones(3))
    for source, target in ((archive, folder), (folder, back)):
        assert main(["checkpoint", "convert", str(source), str(target)]) == 0
        assert main(["checkpoint", "diff", str(source), str(target)]) == 0
    for found in (state["q"], torch.load(back, weights_only=True)["q"]):
        pairs = [(found[name], made) for name, made in quantized().items() if name != "inside"]
        for one, other in [*pairs, (found["inside"][0], quantized()["inside"][0])]:
            assert one.qscheme() == other.qscheme()
            assert one.dtype == other.dtype
            assert torch.equal(one.dequantize(), other.dequantize())
    assert main(["checkpoint", "show", str(archive)]) == 0
    assert "<qint32 [3, 2]>" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_a_quantized_tensor_that_only_torch_reads_stops_nothing_else(tmp_path: Path) -> None:
    scales, zeros = torch.ones(3), torch.zeros(3)
    packed = torch.quantize_per_channel(torch.ones(3, 2), scales, zeros, 0, torch.quint4x2)
    torch.save({"packed": packed, "w": torch.ones(3)}, tmp_path / "q.pt")
    state = {"w": torch.zeros(3)}
    pc.load(state, tmp_path / "q.pt")
    assert torch.equal(state["w"], torch.ones(3))
    with pytest.raises(UsageError, match="is made of quantized tensor"):
        pc.load({"packed": None}, tmp_path / "q.pt")


def test_compressed_tensors_are_said_to_be_read_whole(archive: Path, tmp_path: Path, capsys: Any) -> None:
    convert(archive, tmp_path / "dcp", DCP, compress=True)
    assert main(["checkpoint", "show", str(tmp_path / "dcp"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {tensor["note"] for tensor in shown["tensors"]} == {"stream.zstd/1: read whole"}
    assert {one["name"]: one["value"] for one in shown["objects"]}["step"] == "7"


def test_equal_sums_spare_the_reading(archive: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(archive, tmp_path / name, DCP)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.are_same, found.read_bytes) == (True, 0)
    assert compare(tmp_path / "a", archive).read_bytes > 0


def test_the_command_line_converts_and_compares(archive: Path, tmp_path: Path, capsys: Any) -> None:
    target, single = str(tmp_path / "out") + "/", str(tmp_path / "m.safetensors")
    assert main(["checkpoint", "convert", str(archive), target]) == 0
    assert main(["checkpoint", "convert", target, single, "--only", "model.*", "--json"]) == 0
    assert main(["checkpoint", "diff", target, single, "--only", "model.*"]) == 0
    assert main(["checkpoint", "diff", target, single]) == 1
    text = capsys.readouterr().out
    for words in (
        "out: dcp, 8 tensors and 3 other values",
        '"left_out"',
        "7 of 7 parts are the same",
        "only in the",
    ):
        assert words in text


def test_the_last_whole_checkpoint_of_a_run_is_only_removed_when_told(archive: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        convert(archive, run / f"step-{step}", DCP)
    damaged = run / "step-2" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["checkpoint", "rm", str(run / "step-1")]) == 2
    assert main(["checkpoint", "rm", str(run / "step-2")]) == 0
    convert(archive, run / "step-3", DCP)
    assert main(["checkpoint", "rm", str(run / "step-3")]) == 0
    assert [one.name for one in list_checkpoints(run)] == ["step-1"]
    assert main(["checkpoint", "rm", str(run / "step-1"), "--even-last", "--json"]) == 0
    assert main(["checkpoint", "rm", str(run / "step-1")]) == 2
    assert list_names(run) == []


MEASURED = """
import sys
from penstock.checkpoint.tools.convert import Format, convert
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
before = peak()
convert(sys.argv[1], sys.argv[2], Format.SAFETENSORS)
print(peak() - before)
"""


def grown_bytes(folder: Path, payload_bytes: int) -> int:
    """How much a process grows that converts one tensor of this size."""
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [payload_bytes // 4], "data_offsets": [0, payload_bytes]}}
    )
    with (folder / "x.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + payload_bytes)
    words = [sys.executable, "-c", MEASURED, str(folder / "x.safetensors"), str(folder / "y.safetensors")]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=250)
    assert (folder / "y.safetensors").stat().st_size >= payload_bytes
    return int(done.stdout)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    assert grown_bytes(tmp_path, 192 << 20) < 128 << 20


@pytest.mark.slow
def test_memory_stays_bounded_for_4_gib(tmp_path: Path) -> None:
    assert grown_bytes(tmp_path, 4 << 30) < 128 << 20


def test_a_step_converted_to_the_name_of_another_step_is_that_step(tmp_path: Path) -> None:
    with pc.Manager(tmp_path / "run") as manager:
        manager.save(7, {"x": torch.ones(3)})
    convert(tmp_path / "run/step-7", tmp_path / "new/step-0", DCP)
    with pc.Manager(tmp_path / "new") as manager:
        assert manager.restore({"x": torch.zeros(3)}) == 0
