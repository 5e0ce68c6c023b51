"""Sizes known beforehand against what a format really lays, for files that no test could store."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.file_writer import FormatSink
from penstock.dataset.formats.format_protocol import COMPUTED
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset

RAW = [
    DataFormat.NPY,
    DataFormat.NPZ,
    DataFormat.TFRECORD,
    DataFormat.INDEXED_BINARY,
    DataFormat.MMAP_INDEXED_BINARY,
]


class Ruler(FormatSink):
    """A sink that only measures, and remembers where content begins."""

    def __init__(self) -> None:
        super().__init__(Content(1, 1))
        self.fills: list[tuple[int, int]] = []

    def raw(self, text: bytes | memoryview) -> None:
        self.offset += memoryview(text).nbytes

    def fill(self, size_bytes: int) -> None:
        self.fills.append((self.offset, size_bytes))
        self.offset += size_bytes

    def end_sum(self) -> int:
        return 0xFFFFFFFF

    def _window(self, wanted: int) -> memoryview:
        raise NotImplementedError

    def _take_text(self, window: memoryview, text: memoryview) -> None:
        raise NotImplementedError

    def _take_content(self, window: memoryview) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("kind_name", RAW)
@given(
    size=st.integers(1, 1 << 36),
    stdev=st.integers(0, 1 << 20),
    samples=st.integers(1, 300),
    element=st.sampled_from(["uint8", "int32", "float64"]),
)
def test_a_file_of_any_size_is_laid_as_large_as_planned(
    kind_name: DataFormat, size: int, stdev: int, samples: int, element: str
) -> None:
    dataset = Dataset(
        format=kind_name,
        num_samples_per_file=samples,
        record_length_bytes=Fraction(size),
        record_length_bytes_stdev=Fraction(stdev),
        record_element_type=element,
    )
    kind = open_format(dataset, 5)
    plan = kind.plan(12_345, "file")
    for part, planned in enumerate(plan.parts):
        ruler = Ruler()
        kind.emit(plan, part, ruler)
        assert ruler.offset == planned.size_bytes
        if part == 0:
            assert sum(length for _, length in ruler.fills) >= plan.num_samples * plan.sample_bytes


@pytest.mark.parametrize("gibibytes", [3, 4, 5, 300])
def test_a_zip_beyond_4_gib_is_measured_with_its_wide_records(gibibytes: int) -> None:
    dataset = Dataset(format=DataFormat.NPZ, record_length_bytes=Fraction(gibibytes << 30))
    kind, ruler = open_format(dataset, 5), Ruler()
    plan = kind.plan(0, "file")
    kind.emit(plan, 0, ruler)
    assert ruler.offset == plan.parts[0].size_bytes


@given(
    element=st.sampled_from(["uint8", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64"]),
    samples=st.integers(1, 9),
    size=st.integers(1, 600),
)
def test_rows_of_text_have_the_size_planned_and_end_with_lines(element: str, samples: int, size: int) -> None:
    class Keeping(Ruler):
        text = b""

        def raw(self, text: bytes | memoryview) -> None:
            super().raw(text)
            self.text += bytes(text)

    dataset = Dataset(
        format=DataFormat.CSV,
        num_samples_per_file=samples,
        record_length_bytes=Fraction(size),
        record_element_type=element,
    )
    kind, out = open_format(dataset, 5), Keeping()
    plan = kind.plan(0, "file")
    kind.emit(plan, 0, out)
    assert out.offset == plan.parts[0].size_bytes
    lines = out.text.decode("ascii").splitlines()
    assert len(lines) == samples
    assert out.text.endswith(b"\n")
    number = float if "float" in element else int
    parsed = np.array([[number(entry) for entry in line.split(",")] for line in lines], dtype=plan.dtype)
    expected = kind.expected(plan, out.content, range(samples))
    np.testing.assert_array_equal(parsed, expected)
    assert (expected >= 0).all()


@pytest.mark.parametrize("kind_name", [*RAW, DataFormat.CSV])
def test_a_file_of_fifty_million_is_known_alone(kind_name: DataFormat) -> None:
    dataset = Dataset(
        format=kind_name, record_length_bytes=Fraction(3000), record_length_bytes_stdev=Fraction(500)
    )
    plans = [open_format(dataset, 5).plan(49_999_999, "last") for _ in range(2)]
    assert plans[0] == plans[1]
    reads = list(open_format(dataset, 5).reads(plans[0], COMPUTED, range(1)))
    assert max(read.offset + read.size_bytes for read in reads if read.part == 0) <= (
        plans[0].parts[0].size_bytes or 0
    )
