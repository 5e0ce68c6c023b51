"""Damage in a Parquet file's schema is an error of that file, never the end of the process that reads it."""

import subprocess
import sys

PROGRAM = """
import struct
from contextlib import suppress
from fractions import Fraction
from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, write_file
from penstock.errors import StorageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import read_object, write_object
from penstock.workload.enums import DataFormat
from penstock.workload.spec import ParquetColumn, Dataset, Parquet

columns = (ParquetColumn(name="a", dtype="int8", size=7), ParquetColumn(name="b", dtype="int32"))
dataset = Dataset(
    format=DataFormat.PARQUET,
    num_samples_per_file=6,
    record_length_bytes=Fraction(11),
    parquet=Parquet(columns=columns, row_group_size=3),
)
kind = open_format(dataset, 1)
plan = kind.plan(0, "file")
storage = MemoryStorage()
write_file(kind, plan, storage, Content(1, 0), buffer_pool())
whole = read_object(storage, "file")
(footer_bytes,) = struct.unpack("<I", whole[-8:-4])
begin = len(whole) - 8 - footer_bytes
refused = 0
for place in range(begin, begin + 60):
    for value in (0, 1, 2, 3, 4, 0x7F, 0xFF):
        damaged = bytearray(whole)
        damaged[place] = value
        write_object(storage, "file", [bytes(damaged)])
        try:
            kind.survey(plan, storage.open("file"))
        except StorageError:
            refused += 1
print("refused", refused)
"""


def test_a_flipped_byte_in_a_schema_ends_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 100
