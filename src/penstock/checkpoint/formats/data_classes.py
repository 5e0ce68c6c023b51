"""Which objects of a checkpoint are data, so that unpickling them runs no code that anybody chose.

torch's `weights_only` allows tensors and Python's plain values. Added here: arrays, numbers and generators of
numpy, `BytesIO`, `frozenset`, and the program's own enums, named tuples and dataclasses, if their module is
already imported and they define no code of their own for this. The same rules apply when an object is
saved, to report then what will need `trust`. Invariant: nothing is imported because a checkpoint names it.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from penstock.checkpoint.formats.torch_save import is_plain, read_archive

_ONE_AT_A_TIME: Final = threading.Lock()
"""torch keeps the allowed classes of `weights_only` for the whole process."""

_PYTHON: Final = frozenset(
    {
        "_io.BytesIO",
        *(f"builtins.{name}" for name in ("bytes", "dict", "float", "frozenset", "int", "list", "range")),
        *(f"builtins.{name}" for name in ("set", "slice", "str", "tuple")),
    }
)
_BIT_GENERATORS: Final = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}
_NUMPY: Final = frozenset(
    {
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        *(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")),
        *("numpy.ndarray", "numpy.dtype"),
        *(f"numpy.random._pickle.__{name}_ctor" for name in ("generator", "randomstate", "bit_generator")),
        *(f"numpy.random.{module}.{name}" for name, module in _BIT_GENERATORS.items()),
        *(f"numpy.random.bit_generator.{name}" for name in ("__pyx_unpickle_SeedSequence", "SeedSequence")),
    }
)


def load_data(item: io.BytesIO) -> Any:
    """An object, by `torch.load`; `UnpicklingError` if it is more than data."""
    try:
        return torch.load(item, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        item.seek(0)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(item)
        allowed = [(found, name) for name in named if (found := _find_data(name)) is not None]
        if not allowed:
            raise
    item.seek(0)
    with _ONE_AT_A_TIME, torch.serialization.safe_globals([*allowed, *_numpy_types(named)]):
        return torch.load(item, map_location="cpu", weights_only=True)


def names_beyond_data(archive: bytes) -> list[str]:
    """The classes and functions in an archive of `torch.save` for which a load needs `trust`."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(archive))
    except pickle.UnpicklingError as error:
        # Of Python's own values, torch refuses integers of more than 255 bytes.
        found = read_archive(lambda begin, size: archive[begin : begin + size], len(archive), "", "an object")
        is_known = is_plain(found.value)
        return [] if is_known else [f"what torch cannot check ({error})"]
    return [name for name in named if _find_data(name) is None]


def _find_data(name: str) -> Any:
    """The object that a pickle means by this name, if it is data; None for anything else."""
    found = _find_imported(name)
    is_known = name in _PYTHON or name in _NUMPY
    return found if is_known or (isinstance(found, type) and _is_data_class(found)) else None


def _find_imported(name: str) -> Any:
    """The object of this name in a module that is already imported; None if there is none."""
    steps = name.split(".")
    for length in range(len(steps) - 1, 0, -1):
        module = sys.modules.get(".".join(steps[:length]))
        if module is not None:
            found: Any = module
            for step in steps[length:]:
                # Not getattr: a module may import something else when it is asked for a name.
                found = vars(found).get(step) if hasattr(found, "__dict__") else None
            return found
    return None


def _numpy_types(named: Sequence[str]) -> list[Any]:
    """The classes whose instances numpy's functions make, and whose state is then set."""
    if not any(name.startswith("numpy.") for name in named):
        return []
    import numpy as np  # noqa: PLC0415 - named in the pickle, and loaded by now

    kinds = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    if any(name.startswith("numpy.random.") for name in named):
        kinds += [getattr(np.random, name) for name in ("Generator", "RandomState", *_BIT_GENERATORS)]
    return [kind for kind in kinds if isinstance(kind, type)]


def _is_data_class(kind: type) -> bool:
    if issubclass(kind, enum.Enum):
        return getattr(kind._missing_, "__func__", None) in (
            enum.Enum.__dict__["_missing_"].__func__,
            enum.Flag.__dict__["_missing_"].__func__,
        )
    own = vars(kind)
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        return not own.keys() & {"__reduce__", "__reduce_ex__", "__setstate__", "__del__"}
    return dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__ and _is_plain_dataclass(kind)


def _is_plain_dataclass(kind: type) -> bool:
    """Whether all that makes an instance was generated by `dataclass`."""
    made = {"__init__", "__setattr__", "__setstate__"}
    for base in kind.__mro__[:-1]:
        own = vars(base)
        if own.keys() & {"__new__", "__post_init__", "__reduce__", "__reduce_ex__", "__del__"}:
            return False
        if any(not _is_generated(own[name]) for name in made & own.keys()):
            return False
    return True


def _is_generated(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and (code.co_filename == "<string>" or function.__module__ == "dataclasses")
