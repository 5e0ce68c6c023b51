"""A data set is made, interrupted, gone on with and verified: the same bytes whatever happened on the way."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.command_line import run_command
from tests.support.s3.server import BUCKET

from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import KEY, DatasetRecipe, read_manifest, require_same
from penstock.dataset.generate import GenerationResult, generate
from penstock.dataset.verify import VerificationResult, verify
from penstock.errors import DataDamaged, OutOfSpace, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import Storage, open_storage
from penstock.storage.files.file_storage import FileStorage
from penstock.storage.files.folders import VerifiedFolders
from penstock.storage.in_memory import MemoryStorage
from penstock.testing.faults import FailAfter
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.support.s3.server import S3Server

SMALL = Dataset(
    format=DataFormat.NPZ,
    num_files_train=12,
    num_files_eval=3,
    record_length_bytes=Fraction(50_000),
    record_length_bytes_stdev=Fraction(9_000),
)
RECIPE = DatasetRecipe(dataset=SMALL, seed=7, reduction=IRREDUCIBLE)


def _generate(storage: Storage, recipe: DatasetRecipe = RECIPE) -> GenerationResult:
    return generate(recipe, storage, comm=SoloComm(), threads=3, progress=Progress())


def _verify(storage: Storage, recipe: DatasetRecipe = RECIPE) -> VerificationResult:
    return verify(recipe, storage, comm=SoloComm(), threads=3, progress=Progress())


def _at(folder: Path) -> Storage:
    return open_storage(str(folder), {})


def _sums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.np?")
    }


def test_files_have_their_names_and_numpy_opens_them(tmp_path: Path) -> None:
    made = _generate(_at(tmp_path))
    assert (made.num_files, made.written_files, made.kept_files) == (15, 15, 0)
    names = set(_sums(tmp_path))
    assert "train/img_00_of_12.npz" in names
    assert "valid/img_2_of_3.npz" in names
    assert len(names) == 15
    with np.load(tmp_path / "train" / "img_11_of_12.npz") as file:
        assert file["x"].shape[-1] == 1
        assert len(file["y"]) == 1


def test_the_same_recipe_makes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, recipe in (("a", RECIPE), ("b", RECIPE), ("c", replace(RECIPE, seed=8))):
        _generate(_at(tmp_path / name), recipe)
    assert _sums(tmp_path / "a") == _sums(tmp_path / "b")
    assert not set(_sums(tmp_path / "a").values()) & set(_sums(tmp_path / "c").values())


def test_no_block_of_4_kib_occurs_twice(tmp_path: Path) -> None:
    recipe = replace(
        RECIPE, dataset=replace(SMALL, format=DataFormat.NPY, record_length_bytes_stdev=Fraction(0))
    )
    _generate(_at(tmp_path), recipe)
    content = b"".join(path.read_bytes()[128:] for path in sorted(tmp_path.rglob("*.npy")))
    blocks = [content[start : start + 4096] for start in range(0, len(content) - 4096, 4096)]
    assert len(set(blocks)) == len(blocks) > 100


def test_each_folder_is_synced_once_after_its_files_and_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    recipe = replace(RECIPE, dataset=replace(SMALL, num_subfolders_train=2))
    real = VerifiedFolders.sync_folder

    def sync(folders: VerifiedFolders, path: str) -> None:
        synced.append((path, len(list(tmp_path.rglob("*.npz")))))
        real(folders, path)

    monkeypatch.setattr(VerifiedFolders, "sync_folder", sync)
    _generate(_at(tmp_path / "made"), recipe)
    with_all = [path for path, num_files in synced if num_files == 15]
    for folder in ("train/0", "train/1", "train", "valid"):
        assert with_all.count(str(tmp_path / "made" / folder)) == 1
    assert synced[-1][0] == str(tmp_path / "made")  # the manifest's


@pytest.mark.parametrize(("size_bytes", "are_together"), [(50_000, True), (1_000_000, False)])
def test_only_small_files_are_made_in_memory_to_become_durable_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, *, are_together: bool
) -> None:
    taken: list[str] = []
    real = FileStorage.write_at_once

    def write(storage: FileStorage, objects: Iterable[tuple[str, memoryview]]) -> None:
        def noted() -> Iterator[tuple[str, memoryview]]:
            for key, content in objects:
                taken.append(key)
                yield key, content

        real(storage, noted())

    monkeypatch.setattr(FileStorage, "write_at_once", write)
    dataset = replace(SMALL, record_length_bytes=Fraction(size_bytes), record_length_bytes_stdev=Fraction(0))
    made = _generate(_at(tmp_path), replace(RECIPE, dataset=dataset))
    assert made.written_files == 15
    assert bool(taken) is are_together


def test_a_second_call_keeps_what_is_whole_and_writes_what_is_missing(tmp_path: Path) -> None:
    _generate(_at(tmp_path))
    before = _sums(tmp_path)
    (tmp_path / "train" / "img_03_of_12.npz").unlink()
    os.truncate(tmp_path / "valid" / "img_1_of_3.npz", 100)
    made = _generate(_at(tmp_path))
    assert (made.written_files, made.kept_files) == (2, 13)
    assert _sums(tmp_path) == before


def test_a_failed_generation_says_so_and_the_next_one_completes_it() -> None:
    storage = MemoryStorage()
    with pytest.raises(StorageError):
        _generate(FailAfter(storage, 300_000))
    manifest = read_manifest(storage)
    assert manifest is not None
    assert manifest["complete"] is False
    made = _generate(storage)
    assert 0 < made.kept_files < 15
    assert _verify(storage).num_wrong == 0
    manifest = read_manifest(storage)
    assert manifest is not None
    assert manifest["complete"] is True


def test_another_data_set_at_the_same_place_is_refused_with_what_differs(tmp_path: Path) -> None:
    _generate(_at(tmp_path))
    other = replace(RECIPE, seed=8, dataset=replace(SMALL, num_files_train=13))
    with pytest.raises(UsageError) as caught:
        _generate(_at(tmp_path), other)
    assert "dataset.num_files_train (12 there, 13 requested)" in str(caught.value)
    assert "seed (7 there, 8 requested)" in str(caught.value)
    assert len(_sums(tmp_path)) == 15


def test_what_does_not_matter_for_the_bytes_may_differ(tmp_path: Path) -> None:
    _generate(_at(tmp_path))
    same = replace(RECIPE, dataset=replace(SMALL, keep_files=False, listing_threads=9))
    assert _generate(_at(tmp_path), same).kept_files == 15


def test_a_data_set_that_does_not_fit_fails_before_its_first_file(tmp_path: Path) -> None:
    huge = replace(RECIPE, dataset=replace(SMALL, num_files_train=1 << 40))
    with pytest.raises(OutOfSpace, match="This data set takes"):
        _generate(_at(tmp_path), huge)
    assert list(tmp_path.iterdir()) == []  # not even a manifest, which would keep another data set away


@pytest.mark.parametrize(
    "damage", [b"{", b'{"manifest_version": 1}', b'{"manifest_version": 99, "recipe": {"dataset": {}}}']
)
def test_a_manifest_that_cannot_be_understood_is_an_error_that_names_it(
    tmp_path: Path, damage: bytes
) -> None:
    (tmp_path / KEY).write_bytes(damage)
    with pytest.raises(StorageError, match="manifest"):
        _generate(_at(tmp_path))


def test_a_manifest_of_any_size_costs_no_memory(tmp_path: Path) -> None:
    with (tmp_path / KEY).open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(DataDamaged, match=f"4,398,046,511,104 bytes.*{KEY}"):
        require_same(_at(tmp_path), RECIPE)


def test_verification_needs_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no generated data set"):
        require_same(_at(tmp_path), RECIPE)


def test_every_kind_of_damage_is_found_and_named(tmp_path: Path) -> None:
    _generate(_at(tmp_path))
    assert _verify(_at(tmp_path)).num_wrong == 0
    flipped = tmp_path / "train" / "img_05_of_12.npz"
    content = bytearray(flipped.read_bytes())
    content[20_000] ^= 1
    flipped.write_bytes(content)
    os.truncate(tmp_path / "train" / "img_06_of_12.npz", 10_000)
    (tmp_path / "valid" / "img_0_of_3.npz").unlink()
    seen = _verify(_at(tmp_path))
    told = {wrong.name: wrong.what for wrong in seen.wrong}
    assert seen.num_wrong == 3
    assert "byte 20000" in told["train/img_05_of_12.npz"]
    assert "10000" in told["train/img_06_of_12.npz"]
    assert "valid/img_0_of_3.npz" in told


def test_objects_are_made_and_verified_like_files(moto: S3Server) -> None:
    storage = open_storage(f"s3://{BUCKET}/{random.randrange(1 << 40)}", moto.environment)
    assert _generate(storage).written_files == 15
    assert _verify(storage).num_wrong == 0
    assert _generate(storage).kept_files == 15


WORDS = (
    *("unet3d", "--set", "dataset.num_files_train=60"),
    *("--set", "dataset.record_length_bytes=2MiB", "--set", "dataset.record_length_bytes_stdev=0"),
)


def _penstock(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "training", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The checksums of the data set that one rank makes without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    made = run_command("training", "generate", *WORDS, "--data", folder)
    assert made.returncode == 0, made.stderr
    return _sums(folder)


@pytest.mark.parametrize("delay_s", [0.05, 0.2])
def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, whole: dict[str, str], delay_s: float
) -> None:
    command = [sys.executable, "-m", "penstock", "training", "generate", *WORDS]
    running = subprocess.Popen([*command, "--data", str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("killed/train/*.npz")) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay_s)
    running.send_signal(signal.SIGKILL)
    running.wait()
    resumed = run_command("training", "generate", *WORDS, "--data", tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert _sums(tmp_path / "killed") == whole


def test_what_a_killed_attempt_had_begun_is_removed_by_the_next(tmp_path: Path) -> None:
    _generate(_at(tmp_path))
    old, new = (tmp_path / "train" / f".penstock-{digit * 16}.unfinished" for digit in "12")
    for path in (old, new):
        path.write_bytes(b"begun")
    os.utime(old, (0, 0))
    assert _generate(_at(tmp_path)).kept_files == 15
    # What was written to a moment ago may be another process's.
    assert (old.exists(), new.exists()) == (False, True)


def test_ranks_share_the_work_and_verify_together(tmp_path: Path, whole: dict[str, str]) -> None:
    shared = _penstock("generate", *WORDS, "--data", str(tmp_path / "two"), "--ranks", "2")
    assert shared.returncode == 0, shared.stderr
    assert _sums(tmp_path / "two") == whole
    os.truncate(tmp_path / "two" / "train" / "img_31_of_60.npz", 5)
    seen = _penstock("verify", *WORDS, "--data", str(tmp_path / "two"), "--ranks", "2", "--json")
    assert seen.returncode == 1, seen.stderr
    assert '"num_wrong": 1' in seen.stdout
    assert "img_31_of_60.npz" in seen.stdout
