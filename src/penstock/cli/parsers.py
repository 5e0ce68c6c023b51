"""Parsers of option values: they turn strings into sizes, rates, times, lists and choices.

For a wrong value, a parser raises `UsageError`, to which the option layer adds the name of the option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.errors import UsageError
from penstock.units import SIZE_LIMITS, TIME_LIMITS, join_groups, parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.bench.loader.loader_protocol import ContentCheck
    from penstock.cluster.gates.gate_model import Gate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parser(Generic[T]):
    """Turns an option's string into a value. `--help` shows `metavar`; the other fields serve completion."""

    metavar: str
    parse: Callable[[str], T]
    choices: tuple[str, ...] = ()
    completes: str = ""
    """The kind of path that a shell completes: "file", "dir", or "" for none."""
    list_names: Callable[[str], Iterable[str]] | None = None
    """Lists names that a shell completes; receives the value of `--results`, or ""."""

    def __call__(self, text: str) -> T:
        """Parse the text. Raises `UsageError`."""
        return self.parse(text)


def whole(minimum: int | None = None, maximum: int | None = None) -> Parser[int]:
    """Make a parser of whole numbers between inclusive bounds."""
    return _bounded("N", int, minimum, maximum, what="a whole number", example="8")


def number(minimum: float = 0, maximum: float = 1e9) -> Parser[float]:
    """Make a parser of decimal numbers between inclusive bounds, which exclude infinity and NaN."""
    bounded = _bounded("NUMBER", float, minimum, maximum, what="a number", example="0.5")
    return _limited(bounded, f"{max(minimum, 1e-3):g}", f"{maximum:g}")


N = TypeVar("N", int, float)


def _bounded(
    metavar: str, make: Callable[[str], N], minimum: N | None, maximum: N | None, *, what: str, example: str
) -> Parser[N]:
    def parse(text: str) -> N:
        try:
            value = make(join_groups(text))
        except ValueError as error:
            raise UsageError(f"{text!r} is not {what}", fix=f"Write for example {example}.") from error
        if minimum is not None and not value >= minimum:  # as for NaN
            raise UsageError(f"{value} is too small", fix=f"The smallest allowed value is {minimum}.")
        if maximum is not None and value > maximum:
            raise UsageError(f"{value} is too large", fix=f"The largest allowed value is {maximum}.")
        return value

    return Parser(metavar, parse)


def several(parser: Parser[T]) -> Parser[tuple[T, ...]]:
    """Make a parser of comma-separated lists, which does not split at a comma within a size."""
    comma = _BETWEEN_SIZES if parser.metavar == "SIZE" else ","
    return Parser(
        f"{parser.metavar},...", lambda text: tuple(parser(part.strip()) for part in re.split(comma, text))
    )


_BETWEEN_SIZES: Final = r"(?<![0-9]),|(?<=\b0),|,(?![0-9]{3})"
"""Matches the commas in `1,024GiB,2GiB,0,1GiB` except the first: sizes above 0 have units."""


def _make_later(module: str, name: str) -> Callable[[str], Any]:
    """Return a function that makes values of a type, and imports the type's module only when called."""

    def make(word: str) -> Any:
        return getattr(import_module(module), name)(word)

    return make


def choice(*words: str) -> Parser[str]:
    """Make a parser that accepts one of a few words."""
    return chosen(words, str)


def chosen(words: Iterable[str], make: Callable[[str], T]) -> Parser[T]:
    """Make a parser that accepts only `words` (listed here so `--help` imports nothing), and calls `make`."""
    allowed = tuple(words)

    def parse(text: str) -> T:
        if text not in allowed:
            from penstock.did_you_mean import did_you_mean

            hint = did_you_mean(text, allowed)
            raise UsageError(f"Invalid value {text!r}", fix=f"{hint}Choose from: {', '.join(allowed)}.")
        return make(text)

    return Parser("|".join(allowed), parse, choices=allowed)


def above_zero(parser: Parser[N]) -> Parser[N]:
    """Make a parser that accepts only positive values."""

    def parse(text: str) -> N:
        value = parser(text)
        if value <= 0:
            raise UsageError(f"{text!r} is not positive", fix="Give a measured or specified value above 0.")
        return value

    return Parser(parser.metavar, parse)


_ENDS_OF_NUMBERS: Final = frozenset("0123456789._")


def with_unit(parser: Parser[N], example: str) -> Parser[N]:
    """Make a parser that requires a unit for every value except zero, because a guess could be far off."""

    def parse(text: str) -> N:
        if text.strip()[-1:] in _ENDS_OF_NUMBERS and text.strip("0 "):
            raise UsageError(f"{text!r} has no unit", fix=f"Write for example {example}.")
        return parser(text)

    return Parser(parser.metavar, parse)


def _limited(parser: Parser[N], smallest: str, largest: str) -> Parser[N]:
    """Make a parser of 0 and of values between bounds, so that no sleep, quotient or sum overflows."""

    def parse(text: str) -> N:
        value = parser(text)
        if value and not parser(smallest) <= value <= parser(largest):
            raise UsageError(
                f"{text!r} is out of range",
                fix=f"Give a value from {smallest} to {largest}, or 0 if allowed.",
            )
        return value

    return Parser(parser.metavar, parse)


def parse_assignment(text: str) -> tuple[str, str]:
    """Split `NAME=VALUE` into a pair."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"{text!r} is not an assignment", fix="Write NAME=VALUE.")
    return name, value


def parse_scale(text: str) -> Fraction:
    """Parse a share above 0 and up to 1, exactly as written: 0.01, 1/100 or 1%."""
    amount, percent = text.removesuffix("%"), text.endswith("%")
    try:
        # An exact 1e-999999999 would fill the memory.
        is_plain = "/" in amount or _SMALLEST_SCALE <= float(amount) <= 100
        scale = Fraction(amount) / (100 if percent else 1) if is_plain else Fraction(0)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{text!r} is not a share", fix="Write 0.01, 1% or 1/100.") from error
    if not _SMALLEST_SCALE <= scale <= 1:
        raise UsageError(f"A scale of {text} is out of range", fix="Choose a value from 1e-9 to 1.")
    return scale


_SMALLEST_SCALE: Final = Fraction(1, 10**9)


def _list_workloads(_: str) -> Iterable[str]:
    from penstock.workload.shipped_catalog import families, full_names

    return [name for family in families() for name in (family, *full_names(family))]


def _list_models(_: str) -> Iterable[str]:
    from penstock.workload.shipped_catalog import cards

    return cards()


def _list_rules(_: str) -> Iterable[str]:
    from penstock.submission.rules import RULES

    return [rule.id for rule in RULES]


def _list_runs(parent: str) -> Iterable[str]:
    from penstock.results.run_folder import run_folders

    folder = Path(parent or "runs")
    return [run.name for run in run_folders(folder)] if folder.is_dir() else []


def new_file(text: str) -> Path:
    """Parse the path of a file to write. Refuses an unwritable path now, not after hours of measuring."""
    from penstock.storage.files.local_files import OF_SHELL
    from penstock.storage.files.system_calls import require_writable

    path = Path(text)
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UsageError(f"{path} is a directory", fix="Name a file in it.")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path} is a link to nothing", fix="Remove it, or choose another name.")
    # The file is written under another name, which then replaces this one.
    if text.startswith(OF_SHELL) or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a file", fix="Name a file.")
    if not there.is_dir():
        raise UsageError(f"{there} is not a directory", fix="Choose a directory.")
    require_writable(there)
    return path


def _new_page(text: str) -> Path:
    from penstock.reports.page import require_replaceable

    return require_replaceable(new_file(text))


TEXT = Parser("TEXT", str)
WORKLOAD = Parser("TEXT", str, list_names=_list_workloads)
MODEL = Parser("TEXT", str, list_names=_list_models)
RULE = Parser("TEXT", str, list_names=_list_rules)
RUN = Parser("TEXT", str, list_names=_list_runs)
NAME = Parser("NAME", str)
URI = Parser("URI", str, completes="file")
FOLDER_URI = Parser("DIR", str, completes="dir")
FOLDER = Parser("DIR", Path, completes="dir")
FILE = Parser("FILE", Path, completes="file")
NEW_FILE = Parser("FILE", new_file, completes="file")
NEW_PAGE = Parser("FILE", _new_page, completes="file")
NEW_FOLDER = Parser("DIR", lambda text: new_file(f"{text}/report.html").parent, completes="dir")
SIZE = with_unit(_limited(Parser("SIZE", parse_bytes), *SIZE_LIMITS), "4MiB or 512GiB")
RATE = _limited(Parser("RATE", parse_rate), "1B/s", "7EiB/s")
TIME = _limited(Parser("TIME", parse_seconds), *TIME_LIMITS)
SCALE = Parser("SHARE", parse_scale)
SETTING = Parser("KEY=VALUE", str)
ASSIGNMENT = Parser("NAME=VALUE", parse_assignment)
DIVISION: Parser[Remainder] = chosen(
    ("rotate", "drop", "pad", "error"), _make_later("penstock.bench.epoch_order", "Remainder")
)
CONTENT_CHECK: Parser[ContentCheck] = chosen(
    ("off", "sample", "full"), _make_later("penstock.bench.loader.loader_protocol", "ContentCheck")
)
GATE: Parser[Gate] = chosen(
    ("cluster", "versions", "clock", "limits", "ipc", "apart", "space", "storage"),
    _make_later("penstock.cluster.gates.gate_model", "Gate"),
)
LAUNCHER = choice("auto", "mpiexec", "mpirun", "srun", "pals")
EDITION = choice("auto", "v1.0", "v2.0", "v3.0", "v3.0-strict")
