"""Answers as text: exact for programs, readable for people."""

import csv
import io

import pytest

from penstock.trace.questions.answer import Answer, Column, Unit, as_csv, as_markdown, as_records, document

ANSWER = Answer(
    name="ops",
    title="Operations",
    columns=[
        Column("op"),
        Column("num_events", Unit.COUNT),
        Column("sum_us", Unit.MICROSECONDS),
        Column("total_bytes", Unit.BYTES),
        Column("size_gib", Unit.GIB),
        Column("concurrency", Unit.RATIO),
        Column("busy_share", Unit.SHARE),
        Column("read_rate", Unit.RATE),
        Column("is_late"),
    ],
    rows=[
        ["write|x", 12345, 1_000_001, 2048, 0.5, 1.25, 0.125, 1024.0, True],
        ["read", 1, 2, None, None, None, None, None, False],
    ],
    notes=["A note."],
)


def test_csv_is_exact_and_leaves_missing_values_empty() -> None:
    assert as_csv(ANSWER).splitlines() == [
        "op,num_events,sum_us,total_bytes,size_gib,concurrency,busy_share,read_rate,is_late",
        "write|x,12345,1000001,2048,0.5,1.25,0.125,1024.0,True",
        "read,1,2,,,,,,False",
    ]


def test_csv_has_no_control_characters_of_names() -> None:
    named = Answer(
        name="files", title="", columns=[Column("path")], rows=[["/a\x1b]0;x\x07\u202eb"]], notes=[]
    )
    assert as_csv(named) == "path\n/a\\x1b]0;x\\x07\\u202eb\n"


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\n", "\uff1d", "-1+", "+1e"])
def test_csv_has_no_formulas_of_names(begin: str) -> None:
    name = f"{begin}HYPERLINK(1)"
    named = Answer(name="files", title="", columns=[Column("path")], rows=[[name]], notes=[])
    assert list(csv.reader(io.StringIO(as_csv(named), newline=""))) == [["path"], [f"'{name}"]]


@pytest.mark.parametrize("value", ["-", "-1", "+1.5", "-1e-6", "a=b", -1, -1.5])
def test_csv_keeps_numbers_and_dashes(value: str | float) -> None:
    named = Answer(name="files", title="", columns=[Column("x")], rows=[[value]], notes=[])
    assert as_csv(named) == f"x\n{value}\n"


def test_markdown_prints_seconds_to_the_microsecond_and_escapes_bars() -> None:
    text = as_markdown(ANSWER)
    assert (
        "| op | events | sum s | total | size GiB | concurrency | busy share | read rate | is late |" in text
    )
    assert "| write\\|x | 12,345 | 1.000001 | 2 KiB | 0.500000 | 1.25 | 12.5 % | 1 KiB/s | yes |" in text
    assert text.endswith("\nA note.\n")


def test_a_truncated_table_counts_the_omitted_rows() -> None:
    assert "... and 1 more; x.csv has all" in as_markdown(ANSWER.first(1), "x.csv has all")
    assert "more" not in as_markdown(ANSWER.first(2), "x.csv has all")


def test_an_answer_without_rows_has_a_note() -> None:
    empty = Answer(name="x", title="X", columns=[Column("a")], rows=[])
    assert "(no rows)" in as_markdown(empty)
    assert as_records(empty) == []


def test_json_has_exact_numbers_and_units() -> None:
    made = document(ANSWER)
    assert made["rows"][0]["sum_us"] == 1_000_001
    assert made["rows"][1]["total_bytes"] is None
    assert made["units"]["read_rate"] == "bytes/s"


@pytest.mark.parametrize(("missing", "shown"), [("-", "-"), ("0", "0")])
def test_a_table_defines_the_text_of_missing_values(missing: str, shown: str) -> None:
    answer = Answer(
        name="x", title="X", columns=[Column("a_us", Unit.MICROSECONDS)], rows=[[None]], missing=missing
    )
    assert as_records(answer) == [{"a s": shown}]
