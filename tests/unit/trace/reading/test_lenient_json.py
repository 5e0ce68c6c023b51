"""Single lines of JSON traces: fates, units, arguments as they stand, and what is salvaged of damage."""

import json
from typing import Any

import pytest

from penstock.trace.event_schema import LineFate, ParsedLine
from penstock.trace.reading.json_lines import parse_line


def parse(line: str, ns_per_tick: int = 1000) -> ParsedLine:
    return parse_line(line.encode(), "hash:".__add__, ns_per_tick)


def row(line: str, ns_per_tick: int = 1000) -> dict[str, Any]:
    parsed = parse(line, ns_per_tick)
    assert parsed.row is not None
    return dict(parsed.row)


def event(arguments: str = "{}", **top: Any) -> str:
    fields = {"name": "read", "cat": "POSIX", "pid": 1, "tid": 2, "ts": 5, "dur": 7, "ph": "X", **top}
    return f'{json.dumps(fields)[:-1]},"args":{arguments}}}'


@pytest.mark.parametrize("text", ["", "[", "]", "  ", "[ ", ","])
def test_brackets_and_blanks_are_blank(text: str) -> None:
    assert parse(text).fate is LineFate.BLANK


@pytest.mark.parametrize(
    ("phase", "fate"),
    [
        ("X", LineFate.EVENT), (1, LineFate.EVENT), ("M", LineFate.METADATA), (4, LineFate.METADATA),
        ("C", LineFate.METADATA), (2, LineFate.METADATA), ("?", LineFate.DROPPED), (None, LineFate.DROPPED),
    ],
)  # fmt: skip
def test_the_phase_decides_what_a_line_is(phase: Any, fate: LineFate) -> None:
    assert parse(event(ph=phase)).fate is fate


def test_an_event_may_stand_between_brackets_and_commas() -> None:
    assert row(f"[{event()},") == row(event())
    assert row(f"{event()}]") == row(event())


@pytest.mark.parametrize(
    ("ns_per_tick", "ts", "dur", "expected"),
    [
        (1, 1999, 1500, (1, 2)),
        (1, 1000, 499, (1, 0)),
        (1000, 5, 7, (5, 7)),
        (1_000_000, 5, 7, (5000, 7000)),
        (1000, "5", "7", (5, 7)),
        (1000, 5.4, 6.6, (5, 7)),
        (1000, "5.6", 7, (5, 7)),
        (1000, 1727387307000000.5, 0.5, (1727387307000000, 1)),
    ],
)
def test_starts_and_ends_are_cut_to_microseconds(
    ns_per_tick: int, ts: Any, dur: Any, expected: tuple[int, int]
) -> None:
    timed = row(event(ts=ts, dur=dur), ns_per_tick)
    assert (timed["ts_us"], timed["dur_us"]) == expected


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ({"ts": None}, "no name or no time"),
        ({"name": 5}, "no name or no time"),
        ({"ts": "soon"}, "ts is not a time"),
        ({"ts": 1 << 62}, "time out of range"),
        ({"dur": -1}, "dur is negative"),
        ({"dur": "long"}, "dur is not a time"),
        ({"dur": float("nan")}, "dur is not a time"),
        ({"dur": None}, "dur is not a time"),
    ],
)
def test_dropped_event_says_what_is_wrong_with_it(top: dict[str, Any], reason: str) -> None:
    parsed = parse(event(**top))
    assert (parsed.fate, parsed.reason) == (LineFate.DROPPED, reason)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"fd":3,"ret":5}', '{"fd":3}'),
        ('{"x":1.50, "flag" : true}', '{"flag":true,"x":1.5}'),
        ('{"step":1,"last":2,}', '{"last":2}'),
        ('{"text":",}","last":[1,],}', '{"last":[1],"text":",}"}'),
        ('{"name":"é"}', '{"name":"é"}'),
        ('{"ret":5}', "{}"),
        ("{ }", "{}"),
        ('{"ret":"many"}', '{"ret":"many"}'),
        ('{"epoch":4294967296}', '{"epoch":4294967296}'),
        ('{"brace":"}"}', '{"brace":"}"}'),
        ('{"deep": {"x": 1}}', '{"deep":{"x":1}}'),
        ('{"tab":"a\\tb"}', '{"tab":"a\\tb"}'),
    ],
)
def test_arguments_without_a_column_are_kept(arguments: str, kept: str) -> None:
    assert row(event(arguments))["args"] == kept


def test_columns_are_taken_from_arguments() -> None:
    columns = row(event('{"fname":"/a","hostname":"h","ret":"8","offset":3,"epoch":1,"step":2}'))
    names = ("path", "host", "ret", "offset", "epoch", "step", "size_bytes", "tid")
    assert [columns[name] for name in names] == ["/a", "h", 8, 3, 1, 2, 8, 2]


def test_hashes_are_texts_however_they_are_written() -> None:
    columns = row(event('{"fhash":"a1","hhash":7}'))
    assert (columns["path"], columns["fhash"]) == (None, "a1")
    assert (columns["host"], columns["hhash"]) == (None, "7")


def test_a_renamed_file_is_named_by_its_hash() -> None:
    assert row(event('{"newpath_hash":"b2"}'))["args"] == '{"newpath":"hash:b2"}'


@pytest.mark.parametrize(
    ("name", "cat", "arguments", "size"),
    [
        ("pwrite64", "POSIX", '{"ret":9}', 9), ("pread", "OBJECT", '{"ret":9}', 9),
        ("write", "POSIX", '{"ret":-1}', None), ("open", "POSIX", '{"ret":9}', None),
        ("read", "app", '{"ret":9}', None), ("fread", "STDIO", '{"ret":3,"size":4}', 12),
        ("fread", "STDIO", '{"ret":-1,"size":4}', None), ("fread", "POSIX", '{"ret":3,"size":4}', None),
        ("x.read", "reader", '{"image_size":77}', None),
    ],
)  # fmt: skip
def test_bytes_moved_follow_from_the_operation(name: str, cat: str, arguments: str, size: int | None) -> None:
    assert row(event(arguments, name=name, cat=cat))["size_bytes"] == size


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("words", "not JSON"), ('{"a" 5}', "malformed"), ('{"name":"a"', "cut short"), ("5", "not an object"),
        ('{"a":"\x01"}', "control character"), ('{"a":' * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_line_without_an_event_is_dropped_with_its_reason(line: str, reason: str) -> None:
    parsed = parse(line)
    assert (parsed.fate, parsed.reason) == (LineFate.DROPPED, reason)


def test_a_cut_event_keeps_what_is_left_of_it() -> None:
    line = event('{"ret":5,"offset":9,"fname":"/a/b"').removesuffix("}")
    parsed = parse(line)
    assert (parsed.fate, parsed.reason) == (LineFate.SALVAGED, "cut short")
    assert parsed.row is not None
    assert (parsed.row["ret"], parsed.row["offset"], parsed.row["dur_us"]) == (5, 9, 7)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("9509357668201227806", "9509357668201227806"), ("17868160079272185648", "17868160079272185648"),
        ('"a4f0"', "a4f0"), ('"0000000000001234"', "0000000000001234"),
    ],
)  # fmt: skip
def test_event_of_two_lines_glued_together_keeps_its_host(written: str, kept: str) -> None:
    parsed = parse(event(f'{{"hhash":{written},"fd":3}}') + event())
    assert parsed.fate is LineFate.SALVAGED
    assert parsed.row is not None
    assert parsed.row["hhash"] == kept
