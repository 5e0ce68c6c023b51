"""Objects of a checkpoint that are no tensors: torch reads their pickles, and runs nothing of them.

Invariant: no code of a checkpoint runs unless the caller says `trust`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.checkpoint.dcp.transforms import pack, unpack
from penstock.checkpoint.foreign.torch_pickle import TensorRef
from penstock.errors import DataDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.checkpoint.sums import Bytes


def load_object(item: Bytes, name: str, *, descriptors: Sequence[str] = (), trust: bool, where: str) -> Any:
    """The object of one item. Without `trust`, a `UsageError` names what torch does not know as harmless."""
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
    item = io.BytesIO()
    torch.save(value, item)
    return pack(item.getvalue(), descriptors) if descriptors else item.getvalue()
