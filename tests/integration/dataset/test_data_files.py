"""A data set deleted again: all of its files, its manifest, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cluster.comm import SoloComm
from penstock.dataset.content import Reduction
from penstock.dataset.data_files import remove
from penstock.dataset.dataset_manifest import KEY, DatasetRecipe, read_manifest
from penstock.dataset.generate import data_files, generate
from penstock.progress import Progress
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import write_object
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset


def made(folder: Path, dataset: Dataset) -> tuple[DatasetRecipe, Storage]:
    recipe = DatasetRecipe(dataset=dataset, seed=1, reduction=Reduction())
    storage = open_storage(str(folder), {})
    generate(recipe, storage, comm=SoloComm("here"), threads=2, progress=Progress())
    return recipe, storage


def small(kind: DataFormat) -> Dataset:
    return replace(
        Dataset(), format=kind, num_files_train=5, num_files_eval=2, num_subfolders_train=2, file_prefix="x"
    )


@pytest.mark.parametrize("kind", [DataFormat.NPZ, DataFormat.INDEXED_BINARY])
def test_all_files_and_the_manifest_go_and_others_stay(kind: DataFormat, tmp_path: Path) -> None:
    recipe, storage = made(tmp_path, small(kind))
    write_object(storage, "train/notes.txt", [b"mine"])
    removed = remove(data_files(recipe), storage, comm=SoloComm("here"), threads=3)
    assert removed == 7
    assert [info.key for info in storage.list()] == ["train/notes.txt"]
    assert read_manifest(storage) is None


def test_files_that_are_gone_already_are_not_missed(tmp_path: Path) -> None:
    recipe, storage = made(tmp_path, small(DataFormat.NPY))
    files = data_files(recipe)
    storage.delete(files.plan(3).name)
    storage.delete(KEY)
    assert remove(files, storage, comm=SoloComm("here"), threads=1) == 6
    assert remove(files, storage, comm=SoloComm("here"), threads=1) == 0


def test_synthetic_samples_have_nothing_to_delete(tmp_path: Path) -> None:
    recipe = DatasetRecipe(dataset=small(DataFormat.SYNTHETIC), seed=1, reduction=Reduction())
    storage = open_storage(str(tmp_path), {})
    assert remove(data_files(recipe), storage, comm=SoloComm("here"), threads=1) == 0
