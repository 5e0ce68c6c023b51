"""Names by formula: DLIO's to the letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.data_files import NumberedFiles, evaluation_files, training_files
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset

sets = st.builds(
    NumberedFiles,
    folder=st.sampled_from(["train", "valid"]),
    count=st.integers(1, 50_000_000),
    suffix=st.sampled_from(["npz", "tfrecord", "csv.gz"]),
    prefix=st.sampled_from(["img", "part_1_of_2", "7", ""]),
    num_subfolders=st.sampled_from([0, 1, 2, 9, 10, 11, 100, 4096]),
)


@given(sets, st.data())
def test_every_file_has_a_name_of_its_own(files: NumberedFiles, data: st.DataObject) -> None:
    one, other = (data.draw(st.integers(0, files.count - 1)) for _ in range(2))
    assert (files.name(one) == files.name(other)) == (one == other)
    assert len(files) == files.count


@pytest.mark.parametrize(
    ("count", "num_subfolders", "index", "name"),
    [
        (168, 0, 0, "train/img_000_of_168.npz"),
        (168, 1, 167, "train/img_167_of_168.npz"),
        (1000, 0, 17, "train/img_0017_of_1000.npz"),
        (1000, 9, 17, "train/8/img_0017_of_1000.npz"),
        (1000, 10, 17, "train/07/img_0017_of_1000.npz"),
        (1000, 100, 17, "train/017/img_0017_of_1000.npz"),
        (50_000_000, 4096, 49_999_999, "train/0127/img_49999999_of_50000000.npz"),
        (1, 0, 0, "train/img_0_of_1.npz"),
    ],
)
def test_names_are_those_of_dlios_generator(count: int, num_subfolders: int, index: int, name: str) -> None:
    files = NumberedFiles(folder="train", count=count, suffix="npz", num_subfolders=num_subfolders)
    assert files.name(index) == name


def test_all_names_of_a_small_set_differ_and_fill_subfolders_in_turn() -> None:
    files = NumberedFiles(folder="valid", count=101, suffix="hdf5", prefix="part", num_subfolders=10)
    names = [files.name(index) for index in range(len(files))]
    assert len(set(names)) == 101
    assert [name.split("/")[1] for name in names[:12]] == [f"{i % 10:02}" for i in range(12)]


@pytest.mark.parametrize("index", [-1, 10])
def test_numbers_outside_of_the_set_have_no_name(index: int) -> None:
    with pytest.raises(IndexError, match="of 10"):
        NumberedFiles(folder="train", count=10, suffix="npz").name(index)


def test_an_empty_set_has_neither_names_nor_numbers() -> None:
    files = NumberedFiles(folder="valid", count=0, suffix="npz")
    assert len(files) == 0
    with pytest.raises(IndexError):
        files.name(0)


def test_a_workload_names_its_training_and_its_evaluation_files() -> None:
    dataset = Dataset(
        format=DataFormat.NPZ,
        num_files_train=100,
        num_files_eval=7,
        num_subfolders_train=3,
        num_subfolders_eval=2,
        file_prefix="case",
    )
    train, valid = training_files(dataset), evaluation_files(dataset)
    assert (len(train), len(valid)) == (100, 7)
    assert train.name(5) == "train/2/case_005_of_100.npz"
    assert valid.name(5) == "valid/1/case_5_of_7.npz"
