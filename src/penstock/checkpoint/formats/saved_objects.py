"""Rebuilds the objects in archives from parts that were checked.

This module decides what in an object is data: plain values of Python and torch; numpy's arrays, numbers
and generators; `BytesIO`; and the program's own enums, named tuples and dataclasses, if their module is
already imported and rebuilding them runs no code of theirs. The same rules are applied when an object is
saved, to report what will need `trust`.

Invariants: nothing is imported because a checkpoint names it, and no code from it runs; no type, position or
length from a checkpoint reaches numpy or torch before it was compared with the bytes that exist.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any, Final

import numpy as np

from penstock.checkpoint.formats.restricted_pickle import (
    DeviceName,
    Opaque,
    QuantizedRef,
    TensorRef,
    TorchName,
    TorchSize,
)
from penstock.checkpoint.formats.torch_save import PLAIN, inside, require_in_record
from penstock.checkpoint.state.regions import require

_LARGEST_SHARED = 1024
_MOST_ENTROPY = 1024
"""The largest number of words in the pool of a `SeedSequence`, whose size the checkpoint gives."""
_MOST_SEED_BITS = 1 << 15
"""The longest seed; numpy's time grows with the square of its length."""


def names_beyond_data(value: object) -> list[str]:
    """Return the classes and functions in an archive's value for which a load needs `trust`."""
    kinds, beyond = set(), set()
    for found in inside(value):
        if isinstance(found, Opaque) or (isinstance(found, type) and issubclass(found, Opaque)):
            kinds.add(found.kind)
        elif type(found) not in PLAIN:
            beyond.add("a class or function of torch or Python")
    beyond |= {kind for kind in kinds if _find_data(kind) is None}
    return sorted(beyond)


class Rebuilding:
    """Rebuilds one object with its tensors and instances; `record` reads a tensor's whole record.

    Every part is rebuilt once, so what was shared is shared again.
    """

    def __init__(self, record: Callable[[TensorRef], bytearray]) -> None:
        self._record = record
        self._records: dict[str, bytearray] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        self._used: set[int] = set()
        self._kinds: dict[str, Any] = {}

    def made(self, value: Any) -> Any:
        """Rebuild a value, or return it if it was rebuilt before."""
        if value is None or type(value) in (str, int, float, bool, bytes):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, list):
            items: list[Any] = []
            self._made[id(value)] = value, items
            items.extend(map(self.made, value))
            return items
        if isinstance(value, dict):
            entries = type(value)()
            self._made[id(value)] = value, entries
            entries.update((self.made(key), self.made(inner)) for key, inner in value.items())
            if hasattr(value, "__dict__"):
                # torch keeps the versions of modules in an attribute of an `OrderedDict`.
                vars(entries).update(self.made(vars(value)))
            return entries
        rebuilt = self._rebuilt(value)
        # The value is kept alive so that no other value gets the same id.
        self._made[id(value)] = value, rebuilt
        return rebuilt

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            return self._tensor(value)
        if isinstance(value, QuantizedRef):
            return _quantized(value, self._tensor(value.integers), self.made(value.quantizer[1:]))
        if isinstance(value, TorchName | DeviceName | TorchSize):
            import torch  # noqa: PLC0415 - other tools than loads do without it

            if isinstance(value, TorchName):
                return getattr(torch, value)
            return torch.device(value) if isinstance(value, DeviceName) else torch.Size(value)
        if isinstance(value, tuple | set | frozenset):
            return type(value)([self.made(inner) for inner in value])
        if isinstance(value, slice):
            return slice(self.made(value.start), self.made(value.stop), self.made(value.step))
        if isinstance(value, Opaque):
            return self._instance(value)
        if isinstance(value, type) and issubclass(value, Opaque):
            return _known(value.kind)
        return value

    def _instance(self, value: Opaque) -> Any:
        make = _MAKERS.get(_plain_kind(value.kind))
        if make is not None:
            self._require_own_contents(value)
            return make(self.made(value.arguments), self.made(value.state))
        if value.kind not in self._kinds:
            self._kinds[value.kind] = _known(value.kind)
        kind = self._kinds[value.kind]
        if not isinstance(kind, type) or value.kind in _TYPES:
            require(False, f"{value.kind} is called with invalid arguments")  # noqa: FBT003
        if issubclass(kind, enum.Enum):
            require(len(value.arguments) == 1, f"{value.kind} is a member of an enum without a value")
            member = self.made(value.arguments[0])
            # The enum's own error would show any other value, which may run code of the value's class.
            is_plain = type(member) in (str, int, float, bool, bytes)
            known = kind._member_map_.values()
            require(
                is_plain or any(member == one._value_ for one in known), f"{value.kind} has no such member"
            )
            return kind(member)
        if issubclass(kind, tuple):
            fields: tuple[str, ...] = kind._fields
            require(len(value.arguments) == len(fields), f"{value.kind} has {len(fields)} fields")
            return tuple.__new__(kind, self.made(value.arguments))
        require(not value.arguments, f"{value.kind} is made with arguments")
        made = object.__new__(kind)
        self._made[id(value)] = value, made
        _set_fields(made, kind, self.made(value.state))
        return made

    def _require_own_contents(self, value: Opaque) -> None:
        """Refuse shared contents: numpy copies what arrays contain, so sharing would multiply memory.

        Also refuse instances of other classes, except in an array or Counter: numpy and torch call methods of
        what they get.
        """
        state = value.state if isinstance(value.state, tuple) else (value.state,)
        for part in (*value.arguments, *state):
            is_content = isinstance(part, list | dict) and _plain_kind(value.kind) in _CONTAINERS
            # The contents of an instance are checked when it is rebuilt.
            held = () if is_content else (part,) if isinstance(part, Opaque) else inside(part)
            is_plain = all(not isinstance(one, Opaque) or _plain_kind(one.kind) in _MAKERS for one in held)
            require(is_plain, f"{value.kind} is made of other instances")
            if isinstance(part, bytes | list) and len(part) > _LARGEST_SHARED:
                require(id(part) not in self._used, f"two objects share the contents of {value.kind}")
                self._used.add(id(part))

    def _tensor(self, tensor: TensorRef) -> Any:
        import torch  # noqa: PLC0415 - as above

        key = tensor.storage.key
        if key not in self._records:
            self._records[key] = self._record(tensor)
        record, dtype = self._records[key], getattr(torch, tensor.dtype)
        require_in_record(tensor, len(record))
        require(tensor.subclass in _TENSORS, f"{tensor.subclass} is a class of tensors")
        count = len(record) // dtype.itemsize
        if 0 in tensor.shape or not count:
            made = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        else:
            flat = torch.frombuffer(record, dtype=dtype, count=count)
            made = flat.as_strided(tensor.shape, tensor.strides, tensor.offset)
        if tensor.is_conjugate:
            made = made.conj()
        if tensor.is_negative:
            made = torch._neg_view(made)  # noqa: SLF001 - the only way to make what was saved
        if tensor.is_parameter:
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_() if tensor.requires_grad else made


_TENSORS: Final = ("", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_TYPES: Final = frozenset(
    f"builtins.{name}" for name in ("bytes", "dict", "float", "int", "list", "str", "tuple", "type")
)
"""Types that may themselves be values, for example the type of a dataclass field."""
_BIT_GENERATORS: Final = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}
_NUMPY_TYPES: Final = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.random.bit_generator.SeedSequence": np.random.SeedSequence,
    **{f"numpy.random.{of}.{name}": getattr(np.random, name) for name, of in _BIT_GENERATORS.items()},
}


def _plain_kind(kind: str) -> str:
    """Return the name `kind` with numpy's core module called as before numpy 2.0."""
    return kind.replace("numpy._core.", "numpy.core.", 1)


def _known(kind: str) -> Any:
    found = _find_data(kind)
    require(found is not None, f"{kind} is more than data")
    return found


def _find_data(name: str) -> Any:
    """Return the class or function to which a pickle's name refers, if it is data; None for anything else."""
    if name in _NUMPY_TYPES:
        return _NUMPY_TYPES[name]
    if _plain_kind(name) in _MAKERS:
        return _MAKERS[_plain_kind(name)]
    steps = name.split(".")
    found: Any = None
    length = len(steps)
    # The longest prefix that is a module already imported: nothing is imported for a pickle.
    for length in range(len(steps) - 1, 0, -1):
        if (found := sys.modules.get(".".join(steps[:length]))) is not None:
            break
    for step in steps[length:]:
        # Only modules and classes are looked into, and not by their own methods, which may import something.
        is_open = issubclass(type(found), type | ModuleType)
        found = object.__getattribute__(found, "__dict__").get(step) if is_open else None
    is_data = issubclass(type(found), type) and (name in _TYPES or _is_data_class(found))
    return found if is_data else None


_USED: Final = frozenset(
    {
        *("__hash__", "__eq__", "__del__", "__setstate__", "__reduce__", "__reduce_ex__"),
        *("__getattribute__", "__getattr__", "__setattr__", "__class__", "__dict__"),
    }
)
"""What Python may call in an instance that is made, hashed, compared or read."""


def _is_data_class(kind: type) -> bool:
    if _runs_code(type(kind), {"__call__", "__getattribute__", "__getattr__"}):
        return False
    if issubclass(kind, enum.Enum):
        # New combinations of flags are made like members.
        flags = {"__new_member__"} if issubclass(kind, enum.Flag) else set()
        return not _runs_code(
            kind, (_USED | flags | {"_missing_"}) - {"__reduce__", "__reduce_ex__"}
        ) and not any(
            _runs_code(type(member._value_), {"__hash__", "__eq__"}) for member in kind._member_map_.values()
        )
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        return not _runs_code(kind, _USED)
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    # A field may be computed by a descriptor of the class.
    own = (vars(base).get(field.name) for field in dataclasses.fields(kind) for base in kind.__mro__)
    is_plain = all(
        type(one) in (MemberDescriptorType, FunctionType) or not hasattr(type(one), "__get__") for one in own
    )
    return is_plain and not _runs_code(kind, _USED | {"__new__", "__init__", "__post_init__"})


def _runs_code(kind: type, names: Collection[str]) -> bool:
    """Return True if a class or a base of it defines one of the `names` with code that is not Python's."""
    for base in kind.__mro__:
        for name in vars(base).keys() & names:
            found = vars(base)[name]
            if type(found) is classmethod:
                found = found.__func__
            is_pythons = type(found) in _IN_C or (
                type(found) is FunctionType
                and (
                    found.__globals__.get("__name__") in ("dataclasses", "enum", "typing")
                    # `dataclass` generates methods inside a function of this name.
                    or found.__code__.co_qualname.startswith("__create_fn__.")
                )
            )
            if not is_pythons:
                return True
    return False


_IN_C: Final = (
    *(WrapperDescriptorType, MethodDescriptorType, BuiltinFunctionType, GetSetDescriptorType),
    NoneType,
)


def _set_fields(made: Any, kind: type, state: Any) -> None:
    """Set the fields with which a dataclass was saved; slots only through their own descriptors."""
    values, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if isinstance(state, list):
        # Frozen dataclasses with slots save the values of their fields.
        names = [field.name for field in dataclasses.fields(kind)]
        values, slots = None, dict(zip(names, state, strict=True))
    require(
        all(part is None or isinstance(part, dict) for part in (values, slots)),
        f"{kind.__qualname__} has no such state",
    )
    if values:
        require(hasattr(made, "__dict__"), f"{kind.__qualname__} has slots")
        vars(made).update({str(name): value for name, value in values.items()})
    for name, value in (slots or {}).items():
        slot = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        require(isinstance(slot, MemberDescriptorType), f"{kind.__qualname__} has no slot {name!r}")
        object.__setattr__(made, name, value)


def _bytes_io(arguments: tuple[Any, ...], state: Any) -> io.BytesIO:
    require(arguments == () and isinstance(state, tuple), "a BytesIO is not as Python saves it")
    content, position, *_ = state
    made = io.BytesIO(content)
    made.seek(position)
    return made


def _counter(arguments: tuple[Any, ...], _: Any) -> Counter[Any]:
    (counts,) = arguments
    require(isinstance(counts, dict), "a Counter is not as Python saves it")
    return Counter(counts)


_CONTAINERS: Final = ("collections.Counter", "numpy.core.multiarray._reconstruct")
"""Classes that keep any values, and call methods of these only to hash and compare them."""
_TYPE_CODE: Final = re.compile(r"[biufcOSUVMm][0-9]{1,9}")
_UNIT: Final = re.compile(r"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic")


def _dtype(arguments: tuple[Any, ...], state: Any) -> np.dtype[Any]:
    """Return a dtype, created by numpy from its description: no flag, offset or size is set directly."""
    code: object = arguments[0]
    if not isinstance(code, str) or _TYPE_CODE.fullmatch(code) is None:
        raise ValueError(f"numpy has no type {code!r}")
    if state is None:
        return np.dtype(code)
    _, order, base, names, fields, size_bytes, _, flags, *rest = state
    if base is not None:
        inner, shape = base
        _require_shape(shape)
        require(isinstance(inner, np.dtype) and code[0] == "V", "a numpy dtype has parts of a different kind")
        require(math.prod(shape) * inner.itemsize == size_bytes, "a numpy dtype has the wrong size")
        made: np.dtype[Any] = np.dtype((inner, shape))
    elif names is not None:
        require(all(len(fields[name]) == 2 for name in names), "a numpy dtype has fields with titles")
        formats, offsets = [fields[name][0] for name in names], [fields[name][1] for name in names]
        require(all(isinstance(inner, np.dtype) for inner in formats), "a numpy dtype has no such fields")
        made = np.dtype(
            {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size_bytes},
            align=bool(flags & 0x80),
        )
    elif code[0] in "Mm" and rest:
        unit, count, *_ = rest[0][1]
        unit = bytes(unit).decode("ascii")
        require(_UNIT.fullmatch(unit) is not None and isinstance(count, int), f"numpy has no unit {unit!r}")
        made = np.dtype(code if unit == "generic" else f"{code}[{count}{unit}]")
    else:
        made = np.dtype(code)
    return np.dtype(made.newbyteorder(">") if order == ">" else made)


def _require_shape(shape: Any) -> None:
    is_shape = isinstance(shape, tuple) and len(shape) <= 64
    require(is_shape and all(type(size) is int and 0 <= size < 1 << 62 for size in shape), "it has no shape")


def _blank(arguments: tuple[Any, ...], state: Any) -> np.ndarray[Any, Any]:
    """Create an array: from a list if its elements are Python objects, otherwise from bytes."""
    require(arguments[0] is np.ndarray, "it is an array of a custom class")
    _, shape, dtype, is_by_columns, content = state
    _require_shape(shape)
    require(isinstance(dtype, np.dtype), "an array has no type")
    order: Any = "F" if is_by_columns else "C"
    count = math.prod(shape)
    if dtype.hasobject:
        require(isinstance(content, list) and len(content) == count, "an array of objects has other contents")
        flat = np.empty(count, dtype)
        for number, inner in enumerate(content):
            flat[number] = inner
        made = np.empty(shape, dtype, order=order)
        made[...] = flat.reshape(shape)
        return made
    require(
        isinstance(content, bytes) and len(content) == count * dtype.itemsize,
        f"an array of {count} elements of {dtype.itemsize} bytes has other contents",
    )
    return np.ndarray(shape, dtype, bytearray(content), order=order)


def _scalar(arguments: tuple[Any, ...], _: Any) -> Any:
    dtype, content = arguments
    is_whole = isinstance(dtype, np.dtype) and isinstance(content, bytes) and len(content) == dtype.itemsize
    require(is_whole and not dtype.hasobject, "a numpy scalar has the wrong contents")
    return np.ndarray((), dtype, bytearray(content))[()]


def _seeds_of(held: Any) -> Iterator[Any]:
    # Only plain containers are looked into, because others may run code of their classes.
    if type(held) in (list, tuple):
        for part in held:
            yield from _seeds_of(part)
    else:
        yield held


def _seed_sequence(arguments: tuple[Any, ...], state: Any) -> np.random.SeedSequence:
    require(arguments[0] is np.random.SeedSequence, "it is a SeedSequence of another class")
    entropy, num_spawned, _, pool_size, spawn_key = state
    require(4 <= pool_size <= _MOST_ENTROPY, "a SeedSequence has a pool of the wrong size")
    seeds = _seeds_of((entropy, spawn_key))
    is_short = all(seed.bit_length() <= _MOST_SEED_BITS for seed in seeds if type(seed) is int)
    require(is_short, f"a SeedSequence has a seed of over {_MOST_SEED_BITS} bits")
    return np.random.SeedSequence(
        entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=num_spawned
    )


def _bit_generator(arguments: tuple[Any, ...], state: Any) -> np.random.BitGenerator:
    (kind,) = arguments
    if kind in _BIT_GENERATORS:
        kind = getattr(np.random, kind)
    is_known = kind in _NUMPY_TYPES.values() and issubclass(kind, np.random.BitGenerator)
    require(is_known, "numpy has no such generator")
    state, seeds = state if isinstance(state, tuple) else (state, None)
    require(seeds is None or type(seeds) is np.random.SeedSequence, "a generator has no such seeds")
    made: Any = kind(seeds if seeds is not None else 0)
    made.state = _checked_state(state)
    assert isinstance(made, np.random.BitGenerator)
    return made


def _checked_state(state: Any) -> Any:
    """Return the state of a generator after checking that it is plain and that its positions are valid.

    numpy checks neither: it takes a position from anything that can be indexed by name, such as a record.
    """
    require(type(state) is dict and type(state.get("state")) is dict, "a numpy generator has no plain state")
    for name, value in [*state.items(), *state["state"].items()]:
        most = {"pos": 624, "buffer_pos": 4}.get(name)
        is_plain = type(value) in (dict, str, int, float, np.ndarray)
        is_there = most is None or (type(value) is int and 0 <= value <= most)
        require(is_plain and is_there, f"a numpy generator has an invalid {name!r:.50}")
    return state


def _own_bits(arguments: tuple[Any, ...], state: Any) -> Any:
    """Return the bit generator with which a generator was saved: itself or, before numpy 1.24, by name."""
    (bits,) = arguments
    if isinstance(bits, str):
        return _bit_generator(arguments, state)
    require(isinstance(bits, np.random.BitGenerator), "a generator has no bits")
    return bits


def _random_state(arguments: tuple[Any, ...], state: Any) -> np.random.RandomState:
    made = np.random.RandomState(_own_bits(arguments, state))
    if state is not None:
        made.set_state(_checked_state(state))
    return made


def _sparse(arguments: tuple[Any, ...], _: Any) -> Any:
    """Return a sparse tensor. torch itself checks its indices against its size."""
    import torch  # noqa: PLC0415 - as above

    layout, parts = arguments
    if layout is torch.sparse_coo:
        indices, values, size, *is_coalesced = parts
        flag = is_coalesced[0] if is_coalesced else None
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=flag)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)


def _nested(arguments: tuple[Any, ...], _: Any) -> Any:
    """Return a nested tensor after checking, as torch does not, that its parts are within its elements."""
    import torch  # noqa: PLC0415 - as above

    elements, *table = arguments
    sizes, strides, offsets = (part.long() for part in table)
    require(sizes.dim() == 2 and sizes.shape == strides.shape, "a nested tensor has no such parts")
    require(offsets.shape == sizes.shape[:1] and elements.dim() == 1, "a nested tensor has no such parts")
    for size, step, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        end = offset + 1 + sum((n - 1) * by for n, by in zip(size, step, strict=True)) if 0 not in size else 0
        require(min(*size, *step, offset) >= 0 and end <= len(elements), "a nested tensor has parts outside")
    return torch._nested_view_from_buffer(elements, sizes, strides, offsets)  # noqa: SLF001 - as torch.load


def _quantized(of: QuantizedRef, integers: Any, parameters: tuple[Any, ...]) -> Any:
    """Return a quantized tensor after checking, as torch does not, zero points and the number of scales."""
    import torch  # noqa: PLC0415 - as above

    # torch has no public function that takes scales per channel; archives name this one.
    rebuild_quantized: Any = torch._utils._rebuild_qtensor  # noqa: SLF001 - as above
    make_storage: Any = torch.storage.TypedStorage
    dtype = getattr(torch, of.dtype)
    whole = integers.contiguous()
    if of.quantizer[0] == "per_tensor_affine":
        scale, zero = parameters
        points = [zero]
    else:
        scale, zero, axis = parameters
        require(type(axis) is int and 0 <= axis < whole.dim(), "a quantized tensor has no such axis")
        require(
            scale.shape == zero.shape == whole.shape[axis : axis + 1],
            "a quantized tensor has the wrong number of scales",
        )
        # torch saves zero points that are floats under the same scheme; these may have any value.
        points = [] if zero.is_floating_point() else zero.tolist()
    limits = torch.iinfo(whole.dtype)
    require(
        all(type(point) is int and limits.min <= point <= limits.max for point in points),
        "a quantized tensor has a zero point that is not an element",
    )
    storage = whole.clone().untyped_storage()
    return rebuild_quantized(
        make_storage(wrap_storage=storage, dtype=dtype, _internal=True),
        storage_offset=0,
        size=whole.shape,
        stride=whole.stride(),
        quantizer_params=(getattr(torch, of.quantizer[0]), *parameters),
        requires_grad=False,
        backward_hooks={},
    )


_MAKERS: Final[Mapping[str, Callable[[tuple[Any, ...], Any], Any]]] = {
    "_io.BytesIO": _bytes_io,
    "collections.Counter": _counter,
    "numpy.core.multiarray._reconstruct": _blank,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.dtype": _dtype,
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random._pickle.__generator_ctor": lambda *made: np.random.Generator(_own_bits(*made)),
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_sparse_tensor": _sparse,
}
