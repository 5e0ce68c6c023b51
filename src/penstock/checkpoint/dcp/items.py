"""Items of `.distcp` files that others wrote: where a tensor's payload lies in one, or its bytes in order.

Stock items have their payload wherever their header ends, and elements in whatever order the tensor had.
Invariant: a position is only told where the bytes from there on are the tensor's own, in row-major order.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.dcp.envelope import tensor_pickle
from penstock.checkpoint.dcp.transforms import unpack
from penstock.checkpoint.dtypes import element_type
from penstock.checkpoint.foreign.torch_save import TorchSaveArchive, read_archive, row_major
from penstock.checkpoint.pieces import UNKNOWN
from penstock.errors import DataDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.sums import Bytes

HEAD_BYTES: Final = 4096
"""So much of an item's beginning tells its payload's position."""

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_SIGNATURE: Final = b"PK\x03\x04"


def payload_in(head: Bytes, item_bytes: int, dtype: str, shape: Sequence[int]) -> int | None:
    """Where in an item its payload begins, from the item's first `HEAD_BYTES`.

    None where only `tensor_bytes` of the whole item tells: elements in another order, a big-endian writer,
    or an archive that is laid out otherwise than torch does.
    """
    kind = element_type(dtype)
    head = bytes(head)
    pickled = tensor_pickle(kind, shape)
    content = _content_offset(head, 0)
    if content is None or head[content : content + len(pickled)] != pickled:
        return None
    at, is_little = content + len(pickled), True
    while (at := head.find(_SIGNATURE, at)) >= 0:
        content = _content_offset(head, at)
        if content is None:
            return None
        name = _name(head, at)
        if name.endswith(b"/byteorder"):
            is_little = head.startswith(b"little", content)
        if name.endswith(b"/data/0"):
            fits = content + math.prod(shape) * kind.size_bytes <= item_bytes
            return content if fits and is_little else None
        at = content
    return None


def _content_offset(head: bytes, at: int) -> int | None:
    """Where the bytes of the record begin whose local header is at `at`."""
    if not head.startswith(_SIGNATURE, at) or len(head) < at + _LOCAL.size:
        return None
    fields = _LOCAL.unpack_from(head, at)
    return at + _LOCAL.size + int(fields[9]) + int(fields[10])


def _name(head: bytes, at: int) -> bytes:
    length = int(_LOCAL.unpack_from(head, at)[9])
    return head[at + _LOCAL.size : at + _LOCAL.size + length]


def tensor_bytes(
    item: Bytes, dtype: str, shape: Sequence[int], *, descriptors: Sequence[str] = (), where: str
) -> memoryview:
    """A tensor's elements in row-major order, from its whole item; `DataDamaged` if it is another tensor."""
    plain = memoryview(unpack(item, descriptors, where) if descriptors else item)
    archive = open_item(plain, where)
    facts = archive.contents.tensors
    if [(one.dtype, one.shape) for one in facts] != [(dtype, tuple(shape))]:
        held = ", ".join(f"{one.dtype}{list(one.shape)}" for one in facts) or "no tensor"
        raise DataDamaged(f"An item should hold {dtype}{list(shape)} and holds {held}", where=where)
    stored = archive.contents.stored
    if stored.payload_offset[0] != UNKNOWN:
        begin = int(stored.payload_offset[0])
        return plain[begin : begin + facts[0].size_bytes]
    begin, size = int(stored.item_offset[0]), int(stored.item_bytes[0])
    return row_major(archive.strided[0], plain[begin : begin + size])


def open_item(item: Bytes, where: str) -> TorchSaveArchive:
    """An item, its transforms undone, as the archive of `torch.save` that it is."""
    view = memoryview(item)

    def read(offset: int, size: int) -> bytes:
        found = bytes(view[offset : offset + size])
        if len(found) != size:
            raise DataDamaged("An item ends too early", where=where)
        return found

    return read_archive(read, len(view), "", where)
