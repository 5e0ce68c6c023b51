import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataset.formats.parquet import ParquetFormat, column_type
from penstock.workload.enums import DataFormat
from penstock.workload.sizing import column_bytes
from penstock.workload.spec import Dataset, Parquet, ParquetColumn

TYPES = [
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bool", "string", "binary"),
]


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=settings().max_examples // 3)
@given(size=st.integers(1, 9), num_rows=st.integers(1, 20), seed=st.integers(0, 1000))
def test_bytes_come_back_from_arrow_as_they_went_in(dtype: str, size: int, num_rows: int, seed: int) -> None:
    column = column_type(ParquetColumn(name="c", dtype=dtype, size=size))
    assert column.row_bytes == column_bytes(ParquetColumn(name="c", dtype=dtype, size=size))
    noise = np.random.default_rng(seed).integers(0, 256, (num_rows, column.row_bytes), dtype=np.uint8)
    rows = column.valid(noise)
    array = column.to_arrow(rows)
    array.validate(full=True)
    assert len(array) == num_rows
    assert array.null_count == 0
    np.testing.assert_array_equal(column.to_rows(pa.chunked_array([array])), rows)
    cut = num_rows // 2
    halves = pa.chunked_array([array[:cut], array[cut:]])
    np.testing.assert_array_equal(column.to_rows(halves), rows)


@pytest.mark.parametrize(
    ("dtype", "size", "kind", "encoding"),
    [
        ("int8", 1, pa.int8(), "DELTA_BINARY_PACKED"),
        ("uint8", 40, pa.binary(40), "PLAIN"),
        ("uint16", 2, pa.list_(pa.field("element", pa.uint16(), nullable=False), 2), "DELTA_BINARY_PACKED"),
        ("float32", 1, pa.float32(), "PLAIN"),
        ("float16", 3, pa.list_(pa.field("element", pa.float16(), nullable=False), 3), "PLAIN"),
        ("string", 5, pa.large_string(), "PLAIN"),
        ("binary", 5, pa.large_binary(), "PLAIN"),
    ],
)
def test_a_column_becomes_the_type_that_holds_it_in_the_fewest_bytes(
    dtype: str, size: int, kind: pa.DataType, encoding: str
) -> None:
    column = column_type(ParquetColumn(name="c", dtype=dtype, size=size))
    assert column.kind == kind
    assert column.encoding == encoding
    assert not column.field.nullable
    assert column.path == ("c.list.element" if pa.types.is_fixed_size_list(kind) else "c")


def test_texts_are_readable_and_different() -> None:
    column = column_type(ParquetColumn(name="c", dtype="string", size=12))
    noise = np.random.default_rng(1).integers(0, 256, (50, 12), dtype=np.uint8)
    words = column.to_arrow(column.valid(noise)).to_pylist()
    assert len(set(words)) == 50
    assert all(word.isascii() and word.isprintable() for word in words)


def test_texts_of_other_lengths_are_no_rows() -> None:
    column = column_type(ParquetColumn(name="c", dtype="string", size=3))
    with pytest.raises(ValueError, match="bytes long"):
        column.to_rows(pa.chunked_array([pa.array(["abc", "ab", "abcd"], pa.large_string())]))


def test_a_format_that_travels_to_another_process_still_knows_its_columns() -> None:
    columns = (
        ParquetColumn(name="latents", dtype="float32", size=5),
        ParquetColumn(name="label", dtype="int64", size=1),
    )
    dataset = Dataset(format=DataFormat.PARQUET, num_samples_per_file=4, parquet=Parquet(columns=columns))
    there = ParquetFormat(dataset, 7)
    travelled = pickle.loads(pickle.dumps(there))
    plan = there.plan(0, "train/img_0_of_1.parquet")
    assert travelled.plan(0, "train/img_0_of_1.parquet") == plan
    assert not there._columns[0].kind.value_field.nullable
    assert not travelled._columns[0].kind.value_field.nullable
