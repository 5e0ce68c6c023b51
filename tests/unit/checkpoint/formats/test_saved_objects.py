"""Objects that a checkpoint's writer made to harm are refused, and touch no memory but their own."""

import enum
import importlib.util
import io
import resource
import struct
import sys
import zipfile
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.checkpoint.formats.dcp_item import load_object, object_bytes
from penstock.errors import DataDamaged, UsageError

torch = pytest.importorskip("torch")

ADDRESS = b"\x40\x41\x41\x41\x41\x41\x00\x00"


def item(pickled: bytes) -> bytes:
    """An archive with this value, as torch writes them."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/byteorder", b"little")
    return made.getvalue()


def name(text: str) -> bytes:
    module, _, last = text.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def several(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def called(what: str, *parts: bytes) -> bytes:
    return name(what) + several(*parts) + b"R"


def raw(content: bytes) -> bytes:
    return called("_codecs.encode", text(content.decode("latin-1")), text("latin1"))


def dtype(code: str, *, flags: int = 0, fields: bytes = b"NN", size: int = -1) -> bytes:
    state = several(number(3), text("|"), b"N", fields, number(size), number(-1), number(flags))
    return called("numpy.dtype", text(code), b"\x89", b"\x88") + state + b"b"


def array(kind: bytes, count: int, content: bytes) -> bytes:
    blank = called(
        "numpy._core.multiarray._reconstruct", name("numpy.ndarray"), several(number(0)), raw(b"b")
    )
    return blank + several(number(1), several(number(count)), kind, b"\x89", content) + b"b"


def fields(offset: int, of: bytes) -> bytes:
    return several(text("a")) + b"}" + text("a") + several(of, number(offset)) + b"s"


GENERATOR = several(
    b"}("
    + text("bit_generator")
    + text("MT19937")
    + text("state")
    + b"}("
    + text("key")
    + b"](" + b"K\x01" * 624 + b"e"
    + text("pos")
    + number(1 << 30)
    + b"uu",
    b"N",
)  # fmt: skip
LISTS = b"]q\x00" + b"".join(b"0]q%c(h%ch%ce" % (k, k - 1, k - 1) for k in range(1, 41))
HOSTILE = {
    "addresses as objects": array(dtype("O8"), 8, raw(ADDRESS * 8)),
    "addresses as objects that are said to be such": array(dtype("O8", flags=63), 8, raw(ADDRESS * 8)),
    "an address as a number": called("numpy._core.multiarray.scalar", dtype("O8"), raw(ADDRESS)),
    "addresses in records": array(dtype("V16", fields=fields(0, dtype("O8")), size=16), 2, raw(ADDRESS * 4)),
    "a field behind its record": array(
        dtype("V16", fields=fields(1 << 28, dtype("f8")), size=16), 2, raw(ADDRESS * 4)
    ),
    "a position of a generator": called(
        "numpy.random._pickle.__bit_generator_ctor", name("numpy.random._mt19937.MT19937")
    )
    + GENERATOR
    + b"b",
    "more elements than bytes": array(dtype("f8"), 1 << 40, raw(ADDRESS)),
    "bytes of a length": called("builtins.bytes", number(30 << 30)),
    "bytearray of a length": called("builtins.bytearray", number(30 << 30)),
    "list of a range": called("builtins.list", called("builtins.range", number(10**9))),
    "set of a range": called("builtins.set", called("builtins.range", number(10**9))),
    "size of a range": called("torch.Size", called("builtins.range", number(10**9))),
    "memory of a tensor class": called("torch.FloatTensor", number(1 << 40)),
    "lists in lists": LISTS,
    "itself": b"]q\x00h\x00a",
    "a part of a far number": b"Nr\xff\xff\xff\x0f",
    "a part of a far number in digits": b"Np268435455\n",
    # The unpickler drops the last two bytes of the frame, and takes the length of the text from behind it.
    "a far number that looks like text": b"\x95\x03" + bytes(7) + b"X\x0c\0\0\0\0\0Nr\xff\xff\xff\x0f0NN0",
    "deep": b"]" * 100_000 + b"a" * 99_999,
    "text again and again": b"("
    + text("x" * 50_000)
    + b"q\x01"
    + b"c_codecs\nencode\nq\x02(h\x01h\x01tR" * 1000 + b"t",
    "one content, a thousand arrays": b"(" + raw(b"x" * 100_000) + b"q\x01"
    + array(dtype("u1"), 100_000, b"h\x01") * 2 + b"t",
}  # fmt: skip


@pytest.mark.parametrize("which", list(HOSTILE))
def test_objects_of_hostile_parts_are_refused_and_cost_no_memory(which: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((DataDamaged, UsageError), match=r"The object x (cannot be read|is more than data): "):
        load_object(item(HOSTILE[which]), "x", trust=False, where="here")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def hostile_tensors() -> dict[str, Any]:
    sparse = torch.sparse_coo_tensor([[7]], [1.0], (3,), check_invariants=False)
    nested = torch.nested.nested_tensor([torch.ones(77), torch.ones(1)])
    by_channel = torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 3, torch.qint8)
    return {
        "sparse": object_bytes((sparse,)),
        "nested": object_bytes((nested,)).replace(struct.pack("<qq", 77, 1), struct.pack("<qq", 79, 1)),
        "zero point": object_bytes((by_channel,)).replace(b"K\x03\x87q", b"K\xc8\x87q"),
    }


class Made:
    """Saved as a call of one of numpy's functions for generators, with a state."""

    def __init__(self, how: str, argument: object, state: object) -> None:
        self.call = getattr(np.random._pickle, how), (argument,), state  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def hostile_states() -> dict[str, Any]:
    key = np.ones(624, np.uint32)
    record = np.zeros((), [("key", "<u4", (624,)), ("pos", "<i8")])
    record["pos"] = 1 << 30
    whole = np.zeros((), [("bit_generator", "U7"), ("state", record.dtype)])
    whole["bit_generator"], whole["state"] = "MT19937", record
    states = {
        "a record": record[()],
        "an array of one record": record,
        "a position that is an array": {"key": key, "pos": np.array(1 << 30)},
        "a position beyond the end": {"key": key, "pos": 625},
        "a position before the start": {"key": key, "pos": -1},
    }
    found: dict[str, Any] = {
        which: {"bit_generator": "MT19937", "state": state} for which, state in states.items()
    }
    return {**found, "a record of records": whole[()], "a tuple": ("MT19937", key, 1 << 30)}


@pytest.mark.parametrize("by", ["generator", "RandomState"])
@pytest.mark.parametrize("which", list(hostile_states()))
def test_a_generator_starts_only_from_plain_values_at_a_position_that_it_has(by: str, which: str) -> None:
    state = hostile_states()[which]
    made = Made("__bit_generator_ctor", "MT19937", (state, None))
    if by == "RandomState":
        made = Made("__randomstate_ctor", np.random.MT19937(1), state)
    with pytest.raises(DataDamaged, match="a numpy generator"):
        load_object(object_bytes(made), "x", trust=False, where="here")


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_continue_where_they_were_saved(kind: str) -> None:
    bits = np.random.Generator(getattr(np.random, kind)(7))
    bits.random(5, dtype=np.float32)
    old = np.random.RandomState(7)
    old.standard_normal(3)
    again, old_again = load_object(object_bytes((bits, old)), "x", trust=False, where="here")
    assert again.random(9).tolist() == bits.random(9).tolist()
    assert old_again.standard_normal(9).tolist() == old.standard_normal(9).tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["sparse", "nested", "zero point"])
def test_tensors_whose_parts_point_elsewhere_are_refused(which: str) -> None:
    with pytest.raises(DataDamaged, match="The object x cannot be read: "):
        load_object(hostile_tensors()[which], "x", trust=False, where="here")


def test_what_an_object_shares_is_shared_again() -> None:
    inner, whole = [1], torch.arange(6.0)
    read = load_object(
        object_bytes((inner, inner, whole, whole[2:], torch.nn.Parameter(whole))),
        "x",
        trust=False,
        where="here",
    )
    assert read[0] is read[1]
    read[2][2] = 9
    assert read[3][0] == read[4][2] == 9
    assert isinstance(read[4], torch.nn.Parameter)


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_all_layouts_and_names_of_torch_are_data() -> None:
    values = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    read = load_object(object_bytes((values,)), "x", trust=False, where="here")[0]
    assert all(torch.equal(read[key].to_dense(), value.to_dense()) for key, value in values.items())
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.zeros(1, 2)])
    (again,) = load_object(object_bytes((nested,)), "x", trust=False, where="here")
    assert [part.tolist() for part in again.unbind()] == [part.tolist() for part in nested.unbind()]
    names = (torch.float32, torch.strided, torch.device("cpu"), torch.Size([2]))
    assert load_object(object_bytes(names), "x", trust=False, where="here") == names


RAN: list[str] = []


def noting(name: str, result: Any = None) -> Any:
    """Return a method that notes that it ran."""

    def method(self: object, *arguments: object) -> Any:
        RAN.append(name)
        return result if result is not None else getattr(object, name)(self, *arguments)

    return method


class Call:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


class Meta(type):
    __call__ = noting("__call__")
    __getattribute__ = noting("__getattribute__")


class EnumMeta(enum.EnumMeta):
    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        RAN.append("__call__")
        return super().__call__(*arguments, **named)


@dataclass(frozen=True)
class Hashed:
    seed: int = 1
    __hash__ = noting("__hash__", 5)


@dataclass
class Read:
    seed: int = 1
    __getattribute__ = noting("__getattribute__")


@dataclass(slots=True)
class Asked:
    seed: int = 1
    __getattr__ = noting("__getattr__", 5)


class Base:
    __eq__ = noting("__eq__", result=False)
    __hash__ = noting("__hash__", 5)


@dataclass(eq=False)
class Derived(Base):
    seed: int = 1


@dataclass(frozen=True)
class Computed:
    seed: int = field(default=1)


Computed.seed = property(noting("seed", 5))  # type: ignore[assignment]


@dataclass
class OfMeta(metaclass=Meta):
    seed: int = 1


class HashedPair(NamedTuple):
    left: int = 1

    def __hash__(self) -> int:
        RAN.append("__hash__")
        return 5


class HashedColor(enum.Enum):
    RED = 1
    __hash__ = noting("__hash__", 5)


class ColorOfMeta(enum.Enum, metaclass=EnumMeta):
    RED = 1


class ColorOfValues(enum.Enum):
    RED = Base()


class Permission(enum.Flag):
    READ = 1
    WRITE = 2

    def __new__(cls, value: int) -> Any:
        RAN.append("__new__")
        made = object.__new__(cls)
        made._value_ = value
        return made


def values_with_code() -> dict[str, Any]:
    return {
        "hash": frozenset({Hashed()}),
        "attribute": Read(),
        "missing attribute": Asked(),
        "inherited": frozenset({Derived()}),
        "property": frozenset({object.__new__(Computed)}),
        "metaclass": object.__new__(OfMeta),
        "named tuple": frozenset({HashedPair()}),
        "enum": frozenset({HashedColor.RED}),
        "metaclass of an enum": ColorOfMeta.RED,
        "value of an enum": Call(ColorOfValues, (5,)),
        "new flags": Permission.READ | Permission.WRITE,
    }


@pytest.mark.parametrize("which", list(values_with_code()))
def test_a_class_whose_instances_run_code_when_they_are_made_hashed_or_read_needs_trust(which: str) -> None:
    content = object_bytes((values_with_code()[which],))
    RAN.clear()
    with pytest.raises(UsageError, match="is more than data"):
        load_object(content, "x", trust=False, where="here")
    assert not RAN


@dataclass
class Counted:
    """Has methods that numpy would call."""

    seed: int = 1
    __len__ = noting("__len__", 1)
    __iter__ = noting("__iter__", iter(()))


class Labeled(enum.Enum):
    RED = 1


@dataclass
class Shown:
    seed: int = 1
    __repr__ = noting("__repr__", "shown")


@pytest.mark.parametrize("wrap", [int, lambda seed: [seed], lambda seed: (1, [seed])])
def test_a_seed_that_would_take_minutes_is_refused(wrap: Any) -> None:
    unpickle = np.random.bit_generator.__dict__["__pyx_unpickle_SeedSequence"]

    def load(num_bits: int) -> Any:
        state = (wrap((1 << num_bits) - 1), 0, None, 4, ())
        content = object_bytes((Call(unpickle, (np.random.SeedSequence, 0, None), state),))
        return load_object(content, "x", trust=False, where="here")

    with pytest.raises(DataDamaged, match="a seed of over 32768 bits"):
        load(1 << 18)
    assert load(128)[0].entropy == wrap((1 << 128) - 1)


@pytest.mark.parametrize("which", ["numpy", "no member"])
def test_methods_of_an_instance_do_not_run_where_it_is_not_expected(which: str) -> None:
    values = {
        "numpy": Call(
            np.random.bit_generator.__dict__["__pyx_unpickle_SeedSequence"],
            (np.random.SeedSequence, 0, None),
            ([Counted()], 0, None, 4, ()),
        ),
        "no member": Call(Labeled, (Shown(),)),
    }
    content = object_bytes((values[which],))
    RAN.clear()
    with pytest.raises(DataDamaged, match="The object x cannot be read: "):
        load_object(content, "x", trust=False, where="here")
    assert not RAN


def test_a_name_in_a_module_that_imports_itself_when_it_is_read_does_not_import_it(tmp_path: Any) -> None:
    (tmp_path / "lazy_one.py").write_text("raise RuntimeError\n")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["lazy_one"] = module
    try:
        with pytest.raises(UsageError, match="is more than data"):
            load_object(item(called("lazy_one.Some")), "x", trust=False, where="here")
    finally:
        del sys.modules["lazy_one"]
