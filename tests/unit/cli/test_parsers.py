"""Parsers of option values: what they accept, and what they refuse."""

import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.loader_protocol import ContentCheck
from penstock.cli import parsers
from penstock.cluster.gates.gate_model import Gate
from penstock.errors import AccessRefused, UsageError


def test_values_of_every_kind_are_parsed() -> None:
    assert parsers.SIZE("2GiB") == 2 << 30
    assert parsers.RATE("2GiB/s") == 2 << 30
    assert parsers.TIME("2min") == 120
    assert parsers.several(parsers.SIZE)("1MiB,8MiB") == (1 << 20, 8 << 20)
    assert parsers.several(parsers.whole(0))("1, 8") == (1, 8)
    assert parsers.several(parsers.SIZE)("1,047GiB,2MiB,0,512B") == (1047 << 30, 2 << 20, 0, 512)
    assert parsers.several(parsers.whole(0))("1,128") == (1, 128)
    assert parsers.whole(1)("12,766,928") == 12_766_928
    assert parsers.RATE("1,023.5 MiB/s") == 1_073_217_536
    assert parsers.ASSIGNMENT("b=x=y") == ("b", "x=y")
    assert parsers.number(0, 1)("0.5") == 0.5
    assert parsers.choice("a", "b")("b") == "b"
    assert parsers.FOLDER("/data") == Path("/data")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parsers.SIZE, "4G"),
        (parsers.several(parsers.SIZE), "1MiB,,2MiB"),
        (parsers.several(parsers.whole(0)), "one"),
        (parsers.several(parsers.whole(0)), "-1"),
        (parsers.whole(1, 3), "4"),
        (parsers.whole(), "1,00"),
        (parsers.several(parsers.SIZE), "1,047"),
        (parsers.number(0, 1), "1.01"),
        (parsers.number(), "much"),
        (parsers.above_zero(parsers.RATE), "0GiB/s"),
        (parsers.choice("a", "b"), "c"),
        (parsers.ASSIGNMENT, "novalue"),
        (parsers.ASSIGNMENT, "=x"),
    ],
)
def test_a_bad_value_is_refused_with_a_fix(parser: Callable[[str], object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parser(text)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e308", "1e400"])
@pytest.mark.parametrize(
    "parser", [parsers.number(), parsers.number(0, 1), parsers.several(parsers.number(1e-3, 1e7))]
)
def test_numbers_that_nothing_has_are_refused(parser: Callable[[str], object], text: str) -> None:
    with pytest.raises(UsageError, match=r"too (small|large)"):
        parser(text)


OUT_OF_RANGE = [
    (parsers.TIME, "1e99"),
    (parsers.TIME, "40000d"),
    (parsers.TIME, "1e-99"),
    (parsers.TIME, "9" * 5000),
    (parsers.RATE, "1e39EB/s"),
    (parsers.SIZE, "8EiB"),
    (parsers.SIZE, "9" * 5000 + "B"),
    (parsers.number(), "1e-300"),
    (parsers.number(), "1e10"),
    (parsers.several(parsers.number(1e-3, 1e7)), "5,1e-300"),
    (parsers.SCALE, "1e-300"),
    (parsers.SCALE, "1e-999999999"),
    (parsers.SCALE, "1e999999999"),
    (parsers.SCALE, "1/99999999999"),
    (parsers.SCALE, "nan"),
    (parsers.SCALE, "inf"),
]
"""With these, sleeps, quotients and sums overflow, or an exact value fills the memory."""


@pytest.mark.parametrize(
    ("parser", "text"), OUT_OF_RANGE, ids=[f"{text[:20]}-{n}" for n, (_, text) in enumerate(OUT_OF_RANGE)]
)
def test_numbers_with_which_arithmetic_overflows_are_refused(
    parser: Callable[[str], object], text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parser(text)
    assert caught.value.fix
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("parser", [parsers.TIME, parsers.number()])
def test_zero_and_usual_values_are_in_range(parser: Callable[[str], float]) -> None:
    assert parsers.number(1)("20000") == 20_000
    assert parser("0") == 0
    assert parser("1000") == 1000
    assert parser("0.001") == 0.001


@pytest.mark.parametrize("text", ["1e400", "1e300w", "1e308s"])
def test_times_that_never_end_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        parsers.TIME(text)


def test_bounds_count_as_allowed_values() -> None:
    assert [parsers.whole(1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert [parsers.number(0, 1)(text) for text in ("0", "1")] == [0, 1]


def test_words_of_choices_are_those_of_the_types_that_they_become() -> None:
    assert parsers.DIVISION.choices == tuple(Remainder)
    assert parsers.CONTENT_CHECK.choices == tuple(ContentCheck)
    assert parsers.GATE.choices == tuple(Gate)
    assert parsers.DIVISION("pad") is Remainder.PAD
    assert parsers.CONTENT_CHECK("full") is ContentCheck.FULL
    assert parsers.GATE("space") is Gate.SPACE


def test_a_mistyped_gate_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        parsers.GATE("storaeg")
    assert "Did you mean storage?" in error.value.fix


@pytest.mark.parametrize(
    ("text", "share"), [("0.01", "1/100"), ("1%", "1/100"), ("1/3", "1/3"), ("1", "1"), ("2.5%", "1/40")]
)
def test_a_scale_is_taken_exactly_as_written(text: str, share: str) -> None:
    assert parsers.SCALE(text) == Fraction(share)


@pytest.mark.parametrize("text", ["0", "-0.1", "1.01", "101%", "x", "1/0", ""])
def test_a_scale_outside_of_its_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"Choose a value|Write 0\.01"):
        parsers.SCALE(text)


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("file/new.html", UsageError, "file is not a directory"),
        ("", UsageError, "is a directory"),
        ("pipe", UsageError, "is not a file"),
        ("/dev/null", UsageError, "is not a file"),
        ("/dev/stdout", UsageError, "is not a file"),
        ("/proc/1/new.html", AccessRefused, "Creating files failed: Permission denied"),
    ],
)
def test_a_place_for_no_file_is_refused_before_the_work_begins(
    name: str, kind: type[Exception], why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for parser in (parsers.NEW_PAGE, parsers.NEW_FILE):
        with pytest.raises(kind, match=why):
            parser(str(tmp_path / name))
    with pytest.raises(UsageError, match="file is not a directory"):
        parsers.NEW_FOLDER(str(tmp_path / "file"))
    assert parsers.NEW_FILE(str(tmp_path / "a/b/new.csv")) == tmp_path / "a/b/new.csv"
    assert parsers.NEW_FOLDER(str(tmp_path / "a/b")) == tmp_path / "a/b"


def test_a_dangling_link_is_no_place_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "report.html").symlink_to(tmp_path / "absent")
    page = tmp_path / "report.html"
    for parser, path in ((parsers.NEW_PAGE, page), (parsers.NEW_FILE, page), (parsers.NEW_FOLDER, tmp_path)):
        with pytest.raises(UsageError, match="is a link to nothing"):
            parser(str(path))


def test_a_page_over_another_file_is_refused_before_the_work_begins(tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("notes")
    with pytest.raises(UsageError, match="not a page of Penstock"):
        parsers.NEW_PAGE(str(tmp_path / "notes.html"))
    assert parsers.NEW_PAGE(str(tmp_path / "new.html")) == tmp_path / "new.html"
