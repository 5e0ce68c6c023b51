"""Values of every kind that programs keep in their states: what loads as it was, and what cannot."""

import enum
import io
import random
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Parts(enum.Flag):
    MODEL = 1
    OPTIMIZER = 2


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the kind that is to be saved


class Place(NamedTuple):
    epoch: int
    shard: str


@dataclass
class Config:
    rate: float = 0.1
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    seed: int
    order: tuple[int, ...] = ()


@dataclass
class Checked:
    """A dataclass that runs code of its own when one is made."""

    seed: int = 0

    def __post_init__(self) -> None:
        self.seed += 1


class Opaque:
    """Any other class."""


class Broken:
    def __reduce__(self) -> str:
        raise OSError("it is gone")


def data_values() -> dict[str, Any]:
    """Values that are loaded without `trust`, bit for bit."""
    return {
        "BytesIO": io.BytesIO(b"raw bytes"),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "array in columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "array of text": np.array(["a", "bc"]),
        "array of objects": np.array([1, "x", None], dtype=object),
        "array of records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "array of dates": np.arange("2020", "2023", dtype="datetime64[Y]"),
        "empty array": np.zeros((0, 3)),
        "float32": np.float32(1.5),
        "float64": np.float64(3.5),
        "int64": np.int64(4),
        "bool_": np.bool_(True),  # noqa: FBT003 - the value
        "dtype": np.dtype("f4"),
        "np.random state": np.random.RandomState(3).get_state(),
        "np.random.Generator": np.random.default_rng(5),
        "np.random.RandomState": np.random.RandomState(6),
        "bit generator state": np.random.default_rng(7).bit_generator.state,
        "random state": random.Random(1).getstate(),
        "torch random state": torch.Generator().manual_seed(2).get_state(),
        "large integers": (1 << 2040, [-(1 << 9000)], {1 << 14000: "key"}),
        "large integer beside a class": (1 << 2040, Colour.RED),
        "frozenset": frozenset({1, 2}),
        "set": {1, 2},
        "enum": Colour.BLUE,
        "flags": Parts.MODEL | Parts.OPTIMIZER,
        "namedtuple": Pair(1, Colour.RED),
        "NamedTuple": Place(3, "a"),
        "dataclass": Config(0.5, ["x"]),
        "frozen dataclass": Frozen(7, (1, 2)),
        "nested": ({"a": [Pair(np.arange(2), frozenset({Colour.RED}))]}, Config()),
        "range": range(1, 9, 2),
        "slice": slice(1, None),
        "bytes": b"\x00\xff",
        "complex": 1j,
        "qint8": torch.quantize_per_tensor(torch.tensor([-1.0, 0.5]), 0.1, 3, torch.qint8),
        "quint8": torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.2, 0, torch.quint8),
        "qint8 by channel": torch.quantize_per_channel(
            torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        ),
    }


def trusted_values() -> dict[str, Any]:
    """Values whose load runs code of a class: loaded with `trust` only, which is said when they are saved."""
    return {
        "class": Opaque(),
        "dataclass with code": Checked(4),
        "generator": torch.Generator(),
        "path": PurePosixPath("/data"),
    }


def refused_values() -> dict[str, Any]:
    """Values that cannot be saved."""
    endless: dict[str, Any] = {}
    endless["again"] = endless
    circle: list[Any] = [{}]
    circle.append(circle)
    return {
        "lambda": lambda: None,
        "broken": Broken(),
        "endless dict": endless,
        "endless list": circle,
        "open file": io.BufferedReader(io.BytesIO()),
        "half a character": {"\ud800": 1},
    }


def as_text(value: Any) -> str:
    """What two equal values have in common, whatever they are."""
    if isinstance(value, io.BytesIO):
        return f"BytesIO {value.getvalue()!r}"
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return as_text(
            value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()
        )
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.flags.f_contiguous} {value.tolist()!r}"
    if isinstance(value, dict | list | tuple | set | frozenset):
        inside = value.items() if isinstance(value, dict) else value
        return f"{type(value).__name__} {[as_text(inner) for inner in inside]}"
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return f"{value.dtype} {value.qscheme()} {value.int_repr().tolist()} {value.dequantize().tolist()}"
    return f"{type(value).__name__} {value!r}"
