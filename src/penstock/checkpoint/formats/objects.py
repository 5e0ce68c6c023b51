"""Items that are not plain tensors: pickled objects, and items behind stream transforms (compression).

An item behind a transform has no aligned payload and cannot be read in part. torch unpickles objects, and is
imported for that only. Invariant: no code of a checkpoint runs unless the caller says `trust`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.formats.restricted_pickle import TensorRef
from penstock.errors import DataDamaged, Unavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.formats.checksums import Bytes


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


def load_object(item: Bytes, name: str, *, descriptors: Sequence[str] = (), trust: bool, where: str) -> Any:
    """The object of one item. Without `trust`, a `UsageError` names what torch does not know as harmless."""
    import torch  # noqa: PLC0415 - the rest of this module serves programs without torch

    plain = io.BytesIO(unpack(item, descriptors, where) if descriptors else item)
    try:
        return torch.load(plain, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if trust:
            raise DataDamaged(f"The object {name} cannot be unpickled: {error}", where=where) from error
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().split("\n")[0]
        raise UsageError(
            f"The object {name} is more than data: {reason or error}",
            where=where,
            fix="If you trust whoever wrote this checkpoint, load it with trust=True: that runs its code.",
        ) from error
    except (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise DataDamaged(f"The object {name} cannot be read: {error}", where=where) from error


def with_tensors(value: Any, elements: Callable[[TensorRef], bytearray]) -> Any:
    """A value with real tensors for those it refers to; `elements` gives theirs in row-major order."""
    if isinstance(value, TensorRef):
        import torch  # noqa: PLC0415 - see `load_object`

        dtype = getattr(torch, value.dtype)
        content = elements(value)
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(value.shape)
    if isinstance(value, Mapping):
        return type(value)((key, with_tensors(inner, elements)) for key, inner in value.items())  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(inner, elements) for inner in value)
    return value


def object_bytes(value: Any, *, descriptors: Sequence[str] = ()) -> bytes:
    """An object as the item that stock torch reads."""
    import torch  # noqa: PLC0415 - see `load_object`

    item = io.BytesIO()
    torch.save(value, item)
    return pack(item.getvalue(), descriptors) if descriptors else item.getvalue()
