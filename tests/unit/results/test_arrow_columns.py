"""Columns made of numpy's arrays: what Arrow makes of the same values, and without pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.results.arrow_columns import encode_words, make_numbers, read_numbers


@given(words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3)))
def test_words_are_encoded_as_arrow_encodes_them(words: list[str]) -> None:
    made = encode_words(words)
    made.validate(full=True)
    assert made.equals(pa.array(words, pa.string()).dictionary_encode())


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float64])
@pytest.mark.parametrize("values", [[], [3], [5, -1, 2]])
def test_numbers_come_back_from_a_column_a_part_of_it_and_several_parts(
    kind: type[np.number], values: list[int]
) -> None:
    column = make_numbers(values, kind)
    assert column.equals(pa.array(np.array(values, kind)))
    for part in (column, column[1:], pa.chunked_array([column[1:], column], column.type)):
        assert read_numbers(part).tolist() == part.to_pylist()
        assert read_numbers(part).dtype == kind


def test_missing_values_read_as_arrow_reads_them() -> None:
    assert np.isnan(read_numbers(pa.array([1, None]))).tolist() == [False, True]


def test_the_tables_of_a_run_are_written_and_read_without_pandas() -> None:
    program = (
        "import sys, tempfile, pathlib\n"
        "from penstock.results.throughput_file import MovedBytes, RoundThroughput as Round\n"
        "from penstock.results.throughput_file import read_throughput, write_throughput\n"
        "from penstock.results.event_files import read_events, write_tables\n"
        "from tests.support.run_events import even_run\n"
        "rounds = [Round(direction='save', step=1, ranks=[MovedBytes(0.1, [1, 2])])]\n"
        "ranks = even_run()\n"
        "with tempfile.TemporaryDirectory() as name:\n"
        "    folder = pathlib.Path(name)\n"
        "    write_throughput(folder, rounds)\n"
        "    assert read_throughput(folder) == rounds\n"
        "    write_tables(folder, [rank.clock for rank in ranks], iter(ranks))\n"
        "    assert [rank.steps.tolist() for rank in read_events(folder)] == "
        "[rank.steps.tolist() for rank in ranks]\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
