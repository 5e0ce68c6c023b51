"""How large a sample is: by columns, else by dimensions, else by its length."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from penstock.workload.enums import DataFormat
from penstock.workload.sizing import (
    column_bytes,
    parquet_row_bytes,
    read_bytes_per_sample,
    record_bytes,
)
from penstock.workload.spec import Dataset, Parquet, ParquetColumn

COLUMNS = st.lists(
    st.builds(
        ParquetColumn,
        name=st.text(min_size=1),
        dtype=st.sampled_from(["int8", "float16", "float32", "float64", "binary"]),
        size=st.integers(1, 1000),
        read=st.booleans(),
    ),
    min_size=1,
    max_size=20,
).map(tuple)


def test_the_length_counts_where_nothing_else_is_said() -> None:
    dataset = Dataset(record_length_bytes=Fraction("114660.07"))
    assert record_bytes(dataset) == read_bytes_per_sample(dataset) == Fraction("114660.07")


def test_dimensions_count_before_the_length() -> None:
    dataset = Dataset(record_dims=(10, 20, 3), record_element_type="float32")
    assert record_bytes(dataset) == read_bytes_per_sample(dataset) == 2400


def test_columns_count_in_parquet_alone() -> None:
    parquet = Parquet(
        columns=(ParquetColumn(name="a", dtype="float64", size=5), ParquetColumn(name="b", read=False))
    )
    assert record_bytes(Dataset(format=DataFormat.PARQUET, parquet=parquet, record_dims=(9,))) == 44
    assert read_bytes_per_sample(Dataset(format=DataFormat.PARQUET, parquet=parquet)) == 40
    assert parquet_row_bytes(Dataset(format=DataFormat.NPZ, parquet=parquet)) is None
    assert record_bytes(Dataset(format=DataFormat.NPZ, parquet=parquet)) == 65536


def test_parquet_without_columns_has_one_of_the_record_length() -> None:
    dataset = Dataset(format=DataFormat.PARQUET, record_length_bytes=Fraction(512))
    assert parquet_row_bytes(dataset) is None
    assert read_bytes_per_sample(dataset) == 512


@given(COLUMNS)
def test_what_is_read_and_what_is_not_make_the_row(columns: tuple[ParquetColumn, ...]) -> None:
    dataset = Dataset(format=DataFormat.PARQUET, parquet=Parquet(columns=columns))
    unread = sum(column_bytes(column) for column in columns if not column.read)
    assert read_bytes_per_sample(dataset) + unread == record_bytes(dataset) == parquet_row_bytes(dataset)
