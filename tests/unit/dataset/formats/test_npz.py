import io
import zipfile
import zlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.content import Content
from penstock.dataset.formats.data_file_io import buffer_pool, write_file
from penstock.dataset.formats.file_objects import GrowingBuffer
from penstock.dataset.formats.format_protocol import Extent
from penstock.dataset.formats.npz import (
    Member,
    NpzFormat,
    directory_entry,
    end_of_archive,
    local_header,
    trailer,
)
from penstock.errors import StorageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import read_object
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset

LIMIT = 0xFFFFFFFF


@given(bodies=st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_what_is_zipped_comes_out_again(bodies: list[bytes]) -> None:
    archive, entries = bytearray(), []
    for number, body in enumerate(bodies):
        member = Member(f"member{number}", len(archive), len(body))
        archive += local_header(member) + body + trailer(member, zlib.crc32(body))
        entries.append((member, zlib.crc32(body)))
    directory = b"".join(directory_entry(*entry) for entry in entries)
    archive += directory + end_of_archive(len(entries), len(directory), len(archive))
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None
        assert [opened.read(name) for name in opened.namelist()] == bodies


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 1 << 40])
@pytest.mark.parametrize("offset", [0, LIMIT - 1, LIMIT, 1 << 41])
def test_a_directory_tells_sizes_and_offsets_of_any_width(size: int, offset: int) -> None:
    member = Member("x", offset, size)
    entry = directory_entry(member, 7)
    parsed = zipfile.ZipInfo()
    parsed.file_size = int.from_bytes(entry[24:28], "little")
    parsed.compress_size = int.from_bytes(entry[20:24], "little")
    parsed.header_offset = int.from_bytes(entry[42:46], "little")
    wide = iter(int.from_bytes(entry[at : at + 8], "little") for at in range(46 + 1 + 4, len(entry), 8))
    for field, value in (("file_size", size), ("compress_size", size), ("header_offset", offset)):
        short = getattr(parsed, field)
        assert (next(wide) if short == LIMIT else short) == value
    assert next(wide, None) is None
    assert len(trailer(member, 0)) == (24 if size >= LIMIT else 16)
    assert member.is_large is (size >= LIMIT)


@given(crcs=st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)), size=st.integers(0, 1 << 40))
def test_no_record_changes_its_length_with_a_sum(crcs: tuple[int, int], size: int) -> None:
    member = Member("x", 5, size)
    one, other = ((trailer(member, crc), directory_entry(member, crc)) for crc in crcs)
    assert [len(record) for record in one] == [len(record) for record in other]


def test_a_wrong_byte_has_another_sum_than_the_archive() -> None:
    kind = NpzFormat(Dataset(format=DataFormat.NPZ, record_length_bytes=Fraction(999)), 1)
    plan, storage = kind.plan(0, "a.npz"), MemoryStorage()
    write_file(kind, plan, storage, Content(1, 0), buffer_pool())
    whole = bytearray(read_object(storage, "a.npz"))
    kind.check_sums(plan, [Extent(0, bytes(whole))])
    whole[500] ^= 1
    with pytest.raises(StorageError, match=r"the CRC-32 of x\.npy is wrong"):
        kind.check_sums(plan, [Extent(0, bytes(whole))])


class _Taken:
    """What a pen was given."""

    def __init__(self) -> None:
        self.text = b""

    def raw(self, text: bytes | memoryview) -> None:
        self.text += bytes(text)


@given(texts=st.lists(st.one_of(st.binary(max_size=20), st.none())))
def test_an_outbox_hands_over_everything_once_and_in_order(texts: list[bytes | None]) -> None:
    outbox, out = GrowingBuffer(), _Taken()
    assert outbox.writable()
    written = b""
    for text in texts:
        if text is None:
            outbox.drain(out)  # type: ignore[arg-type]  # a drain calls literal() alone
            assert out.text == written
        else:
            assert outbox.write(text) == len(text)
            written += text
        assert outbox.tell() == len(written)
    outbox.drain(out)  # type: ignore[arg-type]
    assert out.text == written
