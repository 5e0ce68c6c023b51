"""Every kind of damage is found and named: any flipped byte of ours, and of stock archives what has a sum."""

from __future__ import annotations

import io
import random
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil
import pytest

from penstock.checkpoint.tools.verify import Verification, verify
from penstock.errors import ObjectNotFound

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint._extension import (  # noqa: E402 - torch may be missing
    StreamTransformExtension,
    ZStandard,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as stock_save  # noqa: E402

from penstock.checkpoint.api import save  # noqa: E402 - needs torch
from penstock.progress import Progress  # noqa: E402 - likewise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.tools.verify import Damage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def some_state() -> dict[str, Any]:
    return {
        "w": torch.arange(300, dtype=torch.float32),
        "b": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "step": 12,
    }


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-7"
    save(some_state(), path)
    return path


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stock") / "checkpoint"
    stock_save(some_state(), checkpoint_id=path, no_dist=True)
    return path


class Counting(Progress):
    """Progress that adds up."""

    def __init__(self) -> None:
        self.total = 0.0
        self.done = 0.0

    def begin(self, phase: str, total: float) -> None:
        self.total = total

    def advance(self, amount: float) -> None:
        self.done += amount


def test_a_whole_checkpoint_is_whole_to_its_last_byte(ours: Path) -> None:
    progress: Progress = Counting()
    found = verify(ours, progress)
    assert found.is_whole
    assert found.damage == ()
    files = [path.stat().st_size for path in ours.iterdir() if path.name != "penstock.json"]
    assert found.checked_bytes == found.size_bytes == sum(files)
    assert isinstance(progress, Counting)
    assert progress.done == progress.total > 0


def flipped(folder: Path, spot: tuple[str, int]) -> Verification:
    """The verdict on a copy of a checkpoint with one byte flipped; the copy is put right again."""
    name, position = spot
    path = folder / name
    whole = path.read_bytes()
    spoiled = bytearray(whole)
    spoiled[position] ^= 0x10
    path.write_bytes(spoiled)
    try:
        return verify(folder)
    finally:
        path.write_bytes(whole)


def spots(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.iterdir()):
        yield from ((path.name, position) for position in range(path.stat().st_size))


def check_spot(folder: Path, spot: tuple[str, int]) -> None:
    found = flipped(folder, spot)
    assert any(damage.file == spot[0] and damage.begin <= spot[1] < damage.end for damage in found.damage), (
        f"{spot} is damaged and was not found"
    )


def test_a_flipped_byte_anywhere_is_found_where_it_is(ours: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ours, tmp_path / "copy"))
    every = list(spots(copy))
    for spot in random.Random(5).sample(every, 60):
        check_spot(copy, spot)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_flipped_byte_at_every_single_place_is_found(ours: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ours, tmp_path / "copy"))
    contents = {path.name: path.read_bytes() for path in copy.iterdir()}
    for name, position in spots(copy):
        # Far inside of a gap, which is pages of zeros, one byte in 64 will do.
        is_in_gap = not any(contents[name][max(position - 32, 0) : position + 32])
        if not is_in_gap or position % 64 == 0:
            check_spot(copy, (name, position))


def only(found: Verification) -> Damage:
    (damage,) = found.damage
    return damage


def test_damage_names_file_item_and_range(ours: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ours, tmp_path / "copy"))
    (name,) = {path.name for path in copy.glob("*_0.distcp")}
    payload = (copy / name).read_bytes().index(torch.arange(300, dtype=torch.float32).numpy().tobytes())
    damage = only(flipped(copy, (name, payload + 500)))
    assert (damage.file, damage.item, damage.what) == (name, "w", "its checksum differs")
    assert damage.begin < payload
    assert damage.end > payload + 1200


def test_damage_between_items_is_named(tmp_path: Path) -> None:
    # Large tensors are aligned, so there is a gap before one.
    save({"small": torch.ones(7), "large": torch.ones(20_000)}, tmp_path / "step-7")
    gaps = {path.name: path.read_bytes().find(bytes(500)) for path in (tmp_path / "step-7").glob("*.distcp")}
    name = next(name for name, gap in gaps.items() if gap >= 0)
    damage = only(flipped(tmp_path / "step-7", (name, gaps[name] + 100)))
    assert damage.what == "something was written between items"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_missing_and_cut_files_are_named(ours: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(ours, tmp_path / "copy"))
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[:-200])
    found = verify(copy)
    assert {damage.file for damage in found.damage} == {name}
    assert all(damage.end <= len(whole) for damage in found.damage)
    (copy / name).write_bytes(whole + b"\0")
    assert {damage.file for damage in verify(copy).damage} == {name}
    (copy / name).unlink()
    assert only(verify(copy)).what == "the file is missing"


def test_a_damaged_manifest_is_said_to_hide_the_rest(ours: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ours, tmp_path / "copy"))
    found = flipped(copy, ("penstock.json", 300))
    assert only(found).file == "penstock.json"
    assert "not checked" in found.notes[0]


def test_stock_checkpoints_are_held_to_the_sums_that_torch_ignores(stock: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stock, tmp_path / "copy"))
    found = verify(copy)
    assert found.is_whole
    assert 1_200 < found.checked_bytes < found.size_bytes
    assert "CRC-32" in found.notes[0]
    whole = (copy / "__0_0.distcp").read_bytes()
    payload = whole.index(torch.arange(300, dtype=torch.float32).numpy().tobytes())
    damage = only(flipped(copy, ("__0_0.distcp", payload + 500)))
    assert (damage.item, damage.what) == ("w", "its CRC-32 differs")
    assert damage.begin == payload


def test_a_stock_file_that_was_cut_names_the_items_that_are_lost(stock: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stock, tmp_path / "copy"))
    path = copy / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    assert only(verify(copy)).item in {"empty", "scalar", "b", "w"}
    path.unlink()
    assert "cannot be read" in only(verify(copy)).what


def test_damaged_stock_metadata_is_damage_too(stock: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stock, tmp_path / "copy"))
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:-50])
    assert not verify(copy).is_whole


def test_archives_of_torch_save_are_checked_record_by_record(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(some_state(), path)
    assert verify(path).is_whole
    whole = bytearray(path.read_bytes())
    whole[whole.index(torch.arange(300, dtype=torch.float32).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(whole)
    assert only(verify(path)).item.startswith("model/data/")


def test_the_headers_of_many_small_records_are_read_together(tmp_path: Path) -> None:
    torch.save({str(number): torch.ones(1) for number in range(3000)}, tmp_path / "many.pt")
    verify(tmp_path / "many.pt")
    begun = psutil.Process().io_counters().read_count
    assert verify(tmp_path / "many.pt").is_whole
    assert psutil.Process().io_counters().read_count - begun < 1000


def test_records_that_share_bytes_are_not_checked_once_for_each(tmp_path: Path) -> None:
    content, file = bytes(1 << 20), io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(50):
            archive.writestr(f"archive/data/{number:02}", content if number == 0 else b"")
        for info in archive.infolist()[1:]:
            # Each entry of the directory describes the first record.
            first = archive.infolist()[0]
            info.header_offset, info.CRC, info.file_size = first.header_offset, first.CRC, first.file_size
            info.compress_size = first.compress_size
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    (tmp_path / "x.pt").write_bytes(file.getvalue())
    verified = verify(tmp_path / "x.pt")
    assert "overlaps" in verified.damage[0].what
    assert verified.checked_bytes < 2 * len(content)


def test_safetensors_are_not_called_checked(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"w": torch.ones(4)}, tmp_path / "x.safetensors")
    found = verify(tmp_path / "x.safetensors")
    assert (found.is_whole, found.is_checked) == (True, False)
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-1])
    assert not verify(tmp_path / "x.safetensors").is_whole


def test_compressed_items_are_unpacked_and_their_records_checked(tmp_path: Path) -> None:
    path = tmp_path / "c"
    writer = FileSystemWriter(path, _extensions=[ZStandard()])
    stock_save({"w": torch.randn(5000), "n": {"x": [1, 2]}}, storage_writer=writer, no_dist=True)
    found = verify(path)
    assert found.is_whole
    assert found.checked_bytes == found.size_bytes > 0
    assert not any("Not checked" in note for note in found.notes)
    (file,) = path.glob("*.distcp")
    whole, chance = file.read_bytes(), random.Random(3)
    # The third of zstd's four streams holds payload alone. The fourth also holds the archive's directory,
    # which has no CRC, and holds it in its first bytes: these streams are read from their ends.
    for position in chance.sample(range(len(whole) // 2, len(whole) * 7 // 10), 12):
        spoiled = bytearray(whole)
        spoiled[position] ^= 1 << chance.randrange(8)
        file.write_bytes(spoiled)
        assert only(verify(path)).item == "w"
    file.write_bytes(whole)


class Reversed(StreamTransformExtension):
    """A transform that nobody but its own program knows."""

    @staticmethod
    def registry_name() -> str:
        return "stream.reversed"

    @staticmethod
    def from_descriptor(version: str) -> Reversed:
        assert version == "1"
        return Reversed()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return output

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return input


def test_items_of_an_unknown_transform_are_named_as_not_checked(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "c", _extensions=[Reversed()])
    state = {f"w{number}": torch.ones(50) for number in range(7)}
    stock_save(state, storage_writer=writer, no_dist=True)
    found = verify(tmp_path / "c")
    assert found.is_whole
    assert not found.is_checked
    (note,) = (each for each in found.notes if "Not checked" in each)
    assert "stream.reversed/1" in note
    assert "w0, w1" in note
    assert "and 2 more" in note


def test_nothing_there_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound):
        verify(tmp_path / "none")


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    save({"w": torch.zeros(48 << 20, dtype=torch.uint8)}, tmp_path / "step-1")
    tracemalloc.start()
    verify(tmp_path / "step-1")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20
