"""The compiled scanner and the json module parse every line to the same event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trace.event_schema import FileAccount
from penstock.trace.reading.chunks import SLACK, Chunk
from penstock.trace.reading.event_batch import EventOrigin, LineFate
from penstock.trace.reading.json_lines import JsonLines
from penstock.trace.reading.lenient_json import UnexplainedHash, parse_line

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(-(10**19), 10**19) | st.integers(-5, 5)
quoted_numbers = numbers.map(str)
plain = (
    texts
    | numbers
    | quoted_numbers
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
)
arguments = st.dictionaries(
    st.sampled_from(
        ["ret", "offset", "epoch", "step", "size", "image_size", "fname", "hostname", "count", "fd"]
    )
    | texts,
    plain | st.lists(plain, max_size=2) | st.dictionaries(texts, plain, max_size=2),
    max_size=6,
)
events = st.fixed_dictionaries(
    {"name": texts, "pid": numbers | quoted_numbers, "ts": numbers | quoted_numbers},
    optional={
        "cat": texts,
        "tid": numbers | quoted_numbers,
        "dur": st.integers(-2, 10**17) | quoted_numbers,
        "ph": st.sampled_from(["X", 1, "M", 4, "B", "?", 7]),
        "args": arguments,
        "id": plain,
        "type": plain,
    },
)
layouts = st.sampled_from([(",", ":"), (", ", ": ")])


def read(lines: bytes, *, is_large: bool) -> tuple[list[dict[str, Any]], FileAccount]:
    account = FileAccount(file="f")
    reader = JsonLines(EventOrigin("r", "f"), account, is_large=is_large)
    chunks = iter([Chunk(lines + bytes(SLACK), 0, len(lines))])
    rows = [row for batch in reader.read(chunks) for row in batch.to_pylist()]
    return sorted(rows, key=str), account


def read_both_ways(lines: bytes) -> tuple[list[dict[str, Any]], FileAccount]:
    compiled, plain = read(lines, is_large=True), read(lines, is_large=False)
    assert compiled == plain
    return plain


@settings(max_examples=200)
@given(event=events, layout=layouts, is_ascii=st.booleans())
def test_both_scanners_read_any_object_as_the_json_module_does(
    event: dict[str, Any], layout: tuple[str, str], *, is_ascii: bool
) -> None:
    line = json.dumps(event, separators=layout, ensure_ascii=is_ascii).encode() + b"\n"
    rows, account = read_both_ways(line)
    alone = parse_line(line, UnexplainedHash, 1000)
    assert account.lines == 1
    if alone.row is None:
        assert rows == []
        assert account.dropped == (alone.fate is LineFate.DROPPED)
        return
    (row,) = rows
    assert json.loads(row.pop("args")) == json.loads(alone.row["args"])
    told = {key: value for key, value in alone.row.items() if key != "args"}
    assert {key: row[key] for key in told} == told


@pytest.mark.parametrize(
    "number", ["01", "-", "1.", ".5", "1e", "--1", "+1", "1_0", "0x1", "1 2", "tru", "nulll"]
)
def test_invalid_json_numbers_are_not_parsed_as_numbers(number: str) -> None:
    line = f'{{"name":"a","cat":"c","pid":1,"tid":1,"ts":1,"dur":1,"ph":1,"args":{{"x":{number}}}}}\n'
    _, account = read_both_ways(line.encode())
    assert account.events == 0
    assert account.salvaged + account.dropped == 1


@given(content=st.binary(max_size=40))
def test_utf_8_is_accepted_exactly_where_python_accepts_it(content: bytes) -> None:
    content = bytes(byte for byte in content if byte >= 0x20 and byte not in b'"\\')
    line = b'{"name":"a%s","cat":"c","pid":1,"tid":1,"ts":1,"dur":1,"ph":1,"args":{}}\n' % content
    try:
        name = "a" + content.decode()
    except UnicodeDecodeError:
        name = ""
    rows, account = read_both_ways(line)
    assert account.events == bool(name)
    if name:
        assert rows[0]["name"] == name
