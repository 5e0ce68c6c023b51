"""Element types of tensors: names, widths, and what `torch.save` archives and safetensors call them.

Inside the engine a type is torch's name without the `torch.` prefix. This table needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.errors import UsageError
from penstock.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type. Names that a format has no word for are None."""

    name: str
    size_bytes: int
    typed_storage: str | None
    """The class in `torch` that archives name for its storage; None: torch archives it as plain bytes."""
    safetensors: str | None


def _table(*rows: tuple[str, int, str | None, str | None]) -> Mapping[str, ElementType]:
    return MappingProxyType({row[0]: ElementType(*row) for row in rows})


ELEMENT_TYPES: Mapping[str, ElementType] = _table(
    ("float32", 4, "FloatStorage", "F32"),
    ("float64", 8, "DoubleStorage", "F64"),
    ("float16", 2, "HalfStorage", "F16"),
    ("bfloat16", 2, "BFloat16Storage", "BF16"),
    ("int8", 1, "CharStorage", "I8"),
    ("int16", 2, "ShortStorage", "I16"),
    ("int32", 4, "IntStorage", "I32"),
    ("int64", 8, "LongStorage", "I64"),
    ("uint8", 1, "ByteStorage", "U8"),
    ("bool", 1, "BoolStorage", "BOOL"),
    ("complex64", 8, "ComplexFloatStorage", "C64"),
    ("complex128", 16, "ComplexDoubleStorage", None),
    ("complex32", 4, None, None),
    ("uint16", 2, None, "U16"),
    ("uint32", 4, None, "U32"),
    ("uint64", 8, None, "U64"),
    ("float8_e4m3fn", 1, None, "F8_E4M3"),
    ("float8_e5m2", 1, None, "F8_E5M2"),
    ("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", 1, None, "F8_E8M0"),
    ("float4_e2m1fn_x2", 1, None, None),
    ("bits8", 1, None, None),
    ("bits16", 2, None, None),
    ("bits1x8", 1, None, None),
    ("bits2x4", 1, None, None),
    ("bits4x2", 1, None, None),
)
"""By name. Types that torch itself cannot save (its sub-byte and bare quantized ones) are not here."""

BY_STORAGE: Mapping[str, ElementType] = MappingProxyType(
    {kind.typed_storage: kind for kind in ELEMENT_TYPES.values() if kind.typed_storage}
)
BY_SAFETENSORS: Mapping[str, ElementType] = MappingProxyType(
    {kind.safetensors: kind for kind in ELEMENT_TYPES.values() if kind.safetensors}
)


def element_type(name: str) -> ElementType:
    """The type of this name, with or without `torch.` before it; `UsageError` names the nearest."""
    bare = name.removeprefix("torch.")
    kind = ELEMENT_TYPES.get(bare)
    if kind is None:
        hint = did_you_mean(bare, ELEMENT_TYPES).strip() or f"Known: {', '.join(ELEMENT_TYPES)}."
        raise UsageError(f"No tensor element type is called {name!r}", fix=hint)
    return kind


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor; as torch counts them where a dimension is 0."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
