"""Stream transforms that torch's distributed checkpoints may put items through: compression, so far.

An item that went through one has no aligned payload and cannot be read in part. Invariant: what is packed by
a descriptor is unpacked by torch's own extension of that name, and the other way round.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from penstock.errors import DataDamaged, Unavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.sums import Bytes

ZSTD: Final = "stream.zstd/1"
"""The one transform that torch has built in."""


def pack(content: Bytes, descriptors: Sequence[str]) -> bytes:
    """`content` through the transforms in their order, the first one innermost."""
    packed = bytes(content)
    for descriptor in descriptors:
        _require_known(descriptor, UsageError)
        packed = _compressed(packed)
    return packed


def unpack(content: Bytes, descriptors: Sequence[str], where: str) -> bytes:
    """What `content` was before its transforms; `Unavailable` names one that is unknown here."""
    plain = bytes(content)
    for descriptor in descriptors:
        _require_known(descriptor, Unavailable)
        plain = _decompressed(plain, where)
    return plain


def require_known(descriptors: Sequence[str]) -> None:
    """Raise `UsageError` unless all can be written here."""
    for descriptor in descriptors:
        _require_known(descriptor, UsageError)


def _require_known(descriptor: str, error: type[UsageError | Unavailable]) -> None:
    name, _, version = descriptor.partition("/")
    if name != "stream.zstd" or version.partition(".")[0] != "1":
        raise error(
            f"The stream transform {descriptor!r} is unknown here",
            fix=f"Known is {ZSTD}. Load checkpoints of other extensions with torch and its extension.",
        )


def _compressed(content: bytes) -> bytes:
    import zstandard  # noqa: PLC0415 - takes 20 ms, and few checkpoints are compressed

    packed = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as stream:
        stream.write(content)
    return packed.getvalue()


def _decompressed(content: bytes, where: str) -> bytes:
    import zstandard  # noqa: PLC0415 - as above

    try:
        with zstandard.ZstdDecompressor().stream_reader(content) as stream:
            return stream.readall()
    except zstandard.ZstdError as error:
        raise DataDamaged(f"A compressed item cannot be unpacked: {error}", where=where) from error
