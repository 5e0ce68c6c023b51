"""What a data set may ask of a format, and what it is told when it asks for too much."""

from dataclasses import replace
from fractions import Fraction

import pytest

from penstock.dataset.formats import open_format
from penstock.errors import UsageError
from penstock.workload.enums import Compression, DataFormat
from penstock.workload.spec import Dataset, Hdf5, Parquet, ParquetColumn


@pytest.mark.parametrize("kind", list(DataFormat))
def test_every_format_can_be_opened(kind: DataFormat) -> None:
    plan = open_format(Dataset(format=kind), 1).plan(5, "train/five")
    assert plan.name == "train/five"
    assert plan.index == 5
    assert plan.num_samples == 1


@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        (DataFormat.NPY, Compression.ZIP),
        (DataFormat.NPZ, Compression.ZSTD),
        (DataFormat.HDF5, Compression.ZIP),
        (DataFormat.PARQUET, Compression.BZ2),
        (DataFormat.TFRECORD, Compression.GZIP),
        (DataFormat.JPEG, Compression.GZIP),
        (DataFormat.CSV, Compression.XZ),
        (DataFormat.INDEXED_BINARY, Compression.LZ4),
    ],
)
def test_a_compression_that_a_format_lacks_is_refused_with_those_it_has(
    kind: DataFormat, compression: Compression
) -> None:
    with pytest.raises(UsageError, match=f"{kind} cannot be compressed by {compression}") as caught:
        open_format(Dataset(format=kind, compression=compression), 1)
    assert "none" in caught.value.fix
    assert caught.value.where == "dataset.compression"


@pytest.mark.parametrize("kind", [DataFormat.JPEG, DataFormat.PNG])
def test_an_image_file_holds_one_sample(kind: DataFormat) -> None:
    with pytest.raises(UsageError, match="holds one image, not 3"):
        open_format(Dataset(format=kind, num_samples_per_file=3), 1)


@pytest.mark.parametrize("kind", [DataFormat.JPEG, DataFormat.PNG])
@pytest.mark.parametrize("size", [1, 80, 1 << 40])
def test_images_too_small_or_too_large_to_exist_are_refused(kind: DataFormat, size: int) -> None:
    with pytest.raises(UsageError, match="cannot have"):
        open_format(Dataset(format=kind, record_length_bytes=Fraction(size)), 1)


@pytest.mark.parametrize("kind", [DataFormat.JPEG, DataFormat.PNG])
def test_drawn_images_are_never_too_small_to_exist(kind: DataFormat) -> None:
    dataset = Dataset(
        format=kind, record_length_bytes=Fraction(2000), record_length_bytes_stdev=Fraction(5000)
    )
    opened = open_format(dataset, 1)
    sizes = [opened.plan(index, "x").sample_bytes for index in range(60)]
    assert 80 <= min(sizes) < 700
    assert sizes.count(min(sizes)) > 1
    assert max(sizes) > 5000


@pytest.mark.parametrize("kind", [DataFormat.JPEG, DataFormat.PNG])
def test_dimensions_of_an_image_say_its_size(kind: DataFormat) -> None:
    plan = open_format(Dataset(format=kind, record_dims=(50, 60)), 1).plan(0, "x")
    assert plan.parts[0].size_bytes == 3000


def test_numbers_that_text_cannot_say_are_refused() -> None:
    kind = open_format(Dataset(format=DataFormat.CSV, record_element_type="complex64"), 1)
    with pytest.raises(UsageError, match="complex"):
        kind.plan(0, "x")


def test_records_that_cannot_be_cut_into_datasets_are_refused() -> None:
    dataset = Dataset(format=DataFormat.HDF5, record_dims=(5, 4), hdf5=Hdf5(num_dset_per_record=2))
    with pytest.raises(UsageError, match="5 rows cannot be cut into 2"):
        open_format(dataset, 1)


def test_chunks_of_another_rank_are_refused() -> None:
    dataset = Dataset(format=DataFormat.HDF5, record_dims=(5, 4), hdf5=Hdf5(chunk_dims=(4,)))
    with pytest.raises(UsageError, match="does not fit the dimensions"):
        open_format(dataset, 1).plan(0, "x")


def test_chunks_are_at_most_as_large_as_the_data() -> None:
    dataset = Dataset(format=DataFormat.HDF5, record_dims=(5, 4), hdf5=Hdf5(chunk_dims=(99, 2, 99)))
    assert open_format(dataset, 1).plan(0, "x").block_samples == 1


PARQUET = Dataset(format=DataFormat.PARQUET)


def test_splitting_by_values_is_refused() -> None:
    with pytest.raises(UsageError, match="not split"):
        open_format(replace(PARQUET, parquet=Parquet(partition_by="c")), 1)


def test_columns_of_which_none_is_read_are_refused() -> None:
    with pytest.raises(UsageError, match="No column is read"):
        open_format(replace(PARQUET, parquet=Parquet(columns=(ParquetColumn(name="c", read=False),))), 1)


def test_types_that_parquet_lacks_are_refused() -> None:
    columns = (ParquetColumn(name="c", dtype="complex64"),)
    with pytest.raises(UsageError, match="Parquet has no complex64") as caught:
        open_format(replace(PARQUET, parquet=Parquet(columns=columns)), 1)
    assert "c" in caught.value.where


def test_parquet_rows_without_columns_have_the_size_drawn() -> None:
    dataset = replace(PARQUET, record_length_bytes=Fraction(900), record_length_bytes_stdev=Fraction(100))
    sizes = {open_format(dataset, 1).plan(index, "x").sample_bytes for index in range(20)}
    assert len(sizes) > 10
