"""Fields of parsed files: there, or named as missing; and files as they are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.submission.parsed_file import (
    MissingFact,
    ParsedFile,
    read_description,
    read_file,
    relative,
)

CONTENT = {
    "number": 7,
    "text": "7.5",
    "yes": "True",
    "no": False,
    "list": [1, "2.5"],
    "empty": [],
    "null": None,
    "huge": 10**400,
    "nan": float("nan"),
    "deep": {"er": {"value": 3}},
}
FILE = ParsedFile(file="a.json", content=CONTENT)


@pytest.mark.parametrize(
    ("ask", "value"),
    [
        (lambda file: file.number("number"), 7.0),
        (lambda file: file.number("text"), 7.5),
        (lambda file: file.integer("number"), 7),
        (lambda file: file.integer("deep", "er", "value"), 3),
        (lambda file: file.numbers("list"), (1.0, 2.5)),
        (lambda file: file.boolean("yes"), True),
        (lambda file: file.boolean("no"), False),
        (lambda file: file.text("text"), "7.5"),
        (lambda file: file.value("null"), None),
        (lambda file: file.value(), CONTENT),
    ],
)
def test_fields_are_read_by_path_and_type(ask: Callable[[ParsedFile], Any], value: object) -> None:
    assert ask(FILE) == value


@pytest.mark.parametrize(
    ("ask", "proof"),
    [
        (lambda file: file.number("numbr"), "there is no field numbr (is number meant?)"),
        (lambda file: file.number("deep", "er", "vale"), "there is no field deep.er.vale (is value meant?)"),
        (lambda file: file.number("deep", "x", "y"), "there is no field deep.x"),
        (lambda file: file.number("number", "x"), "there is no field number.x"),
        (lambda file: file.number("no"), "no is False, not a number"),
        (lambda file: file.number("nan"), "nan is nan, not a number"),
        (lambda file: file.integer("text"), "text is 7.5, not a whole number"),
        (lambda file: file.numbers("empty"), "empty is [], not a list of numbers"),
        (lambda file: file.numbers("number"), "number is 7, not a list of numbers"),
        (lambda file: file.boolean("number"), "number is 7, not true or false"),
        (lambda file: file.text("number"), "number is 7, not a text"),
    ],
)
def test_missing_fact_names_its_file(ask: Callable[[ParsedFile], Any], proof: str) -> None:
    with pytest.raises(MissingFact) as error:
        ask(FILE)
    assert (error.value.what, error.value.where) == (proof, "a.json")


def test_a_number_beyond_all_numbers_is_none() -> None:
    with pytest.raises(MissingFact, match=r"huge is 1000.*, not a number"):
        FILE.number("huge")


def test_null_and_what_cannot_be_read_is_not_there() -> None:
    assert FILE.has("deep", "er")
    assert FILE.has("no")
    assert not FILE.has("null")
    assert not FILE.has("deep", "x", "y")
    assert not FILE.has("number", "x")
    assert FILE.has()
    assert not ParsedFile(file="b", content=CONTENT, problem="garbage").has("number")


def test_every_question_to_a_file_that_cannot_be_read_has_its_problem() -> None:
    with pytest.raises(MissingFact, match="garbage"):
        ParsedFile(file="b", content=CONTENT, problem="garbage").value("number")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert read_file(tmp_path / "folder.json", tmp_path).problem == "cannot be read: Is a directory"
    missing = read_file(tmp_path / "none.json", tmp_path)
    assert (missing.problem, missing.is_missing) == ("there is no such file", True)
    (tmp_path / "half.yaml").write_text("a: [1")
    half = read_file(tmp_path / "half.yaml", tmp_path)
    assert half.problem.startswith("cannot be understood: ")
    assert not half.is_missing
    (tmp_path / "plain.log").write_text("words")
    assert read_file(tmp_path / "plain.log", tmp_path).value() == "words"
    (tmp_path / "marked.json").write_text("\ufeff[1]", encoding="utf-8")
    assert read_file(tmp_path / "marked.json", tmp_path).value() == [1]


def test_brackets_without_end_are_a_problem_of_their_file_and_do_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    assert read_file(tmp_path / "deep.yaml", tmp_path).problem.startswith("cannot be understood: ")


def test_only_the_beginning_of_a_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "long.log").write_text("a" * ((4 << 20) + 1))
    assert len(read_file(tmp_path / "long.log", tmp_path).value()) == 4 << 20


def test_a_file_is_named_from_the_folder_that_is_checked(tmp_path: Path) -> None:
    assert relative(tmp_path / "a" / "b.json", tmp_path) == "a/b.json"
    assert relative(tmp_path, tmp_path / "a") == str(tmp_path)


def test_a_description_knows_the_line_of_each_value(tmp_path: Path) -> None:
    (tmp_path / "fast.yaml").write_text("a: 1\nb:\n  - c: 2\n  -\n    d: 3\n")
    lines = read_description(tmp_path / "fast.yaml", tmp_path).lines
    assert lines[()] == 1
    assert (lines["a",], lines["b",], lines["b", "0", "c"], lines["b", "1", "d"]) == (1, 2, 3, 5)
    (tmp_path / "empty.yaml").write_text("")
    assert read_description(tmp_path / "empty.yaml", tmp_path).lines == {}
    assert read_description(tmp_path / "none.yaml", tmp_path).is_missing


def test_placeholder_of_a_pruned_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "0_per_epoch_stats.json").write_text("PRUNED BY STAFF\n")
    parsed = read_file(tmp_path / "0_per_epoch_stats.json", tmp_path)
    assert parsed.problem == "cannot be understood: only a placeholder is left of it: PRUNED BY STAFF"
