"""Each kind of damage that traces are known to have, alone and at random: counted exactly, never a crash."""

import gzip
import itertools
import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.open_files import open_below
from tests.support.trace_files import Writing, lines_of, write_trace

from penstock.cli.app import main
from penstock.trace.event_schema import BATCH_SCHEMA, FileAccount, TraceFile
from penstock.trace.reading.trace_files import read_pieces
from penstock.trace.trace_set import read_trace_file

NUM_EVENTS = 60


def read(path: Path) -> tuple[list[dict[str, Any]], FileAccount]:
    """Read a file by Python and by DuckDB, which must agree about every event and every line."""
    plain, account = read_once(path, query_lines=sys.maxsize)
    queried, other = read_once(path, query_lines=0)
    if not repeats_keys(path):
        assert sorted(map(comparable, queried)) == sorted(map(comparable, plain))
    assert other.document() == account.document()
    return plain, account


def test_sizes_that_no_call_moves_are_none_and_sums_stay_in_64_bits(tmp_path: Path) -> None:
    calls = [
        ("read", "POSIX", {"ret": 1 << 62}),
        ("read", "POSIX", {"ret": 1 << 62}),
        ("read", "POSIX", {"ret": 5}),
        ("fread", "STDIO", {"ret": 1 << 40, "size": 1 << 40}),
        ("fread", "STDIO", {"ret": 1 << 55, "size": 0}),
        ("write", "POSIX", {"ret": 1 << 62}),
        ("write", "POSIX", {"ret": (1 << 50) - 1}),
    ]
    lines = [
        {"name": name, "cat": cat, "pid": 1, "tid": 1, "ts": at, "dur": 1, "ph": "X", "args": arguments}
        for at, (name, cat, arguments) in enumerate(calls)
    ]
    path, chrome = tmp_path / "x.pfw", tmp_path / "x.json"
    path.write_text("\n".join(map(json.dumps, lines)))
    chrome.write_text(json.dumps({"traceEvents": lines}))
    for rows in (read(path)[0], read(chrome)[0]):
        assert [row["size_bytes"] for row in rows] == [None, None, 5, None, 0, None, (1 << 50) - 1]
        assert rows[0]["ret"] == 1 << 62
    for verb in ("summary", "ops", "files", "classes", "sizes", "ranks", "timeline", "overlap"):
        assert main(["trace", verb, str(path), str(chrome)]) == 0


def repeats_keys(path: Path) -> bool:
    """Whether a damaged line is an object with a key twice: which one counts is anybody's guess."""

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    repeated: list[bool] = []
    content = b"".join(read_pieces(path, lambda _: None, lambda _: None))
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            json.loads(line.strip(b" \t\r,[]"), object_pairs_hook=note)
    return any(repeated)


def comparable(row: dict[str, Any]) -> str:
    """A row as text, whatever the spelling of its arguments."""
    return json.dumps({**row, "args": json.loads(row["args"])}, sort_keys=True)


def read_once(path: Path, *, query_lines: int) -> tuple[list[dict[str, Any]], FileAccount]:
    reading = read_trace_file(TraceFile(path=path, run="r"), query_lines=query_lines)
    table = pa.Table.from_batches(list(reading.batches), BATCH_SCHEMA)
    table.validate(full=True)
    account = reading.account
    parts = account.events + account.salvaged + account.metadata + account.blank + account.dropped
    assert account.lines == parts
    assert table.num_rows == account.events + account.salvaged
    assert sum(account.dropped_reasons.values()) == account.dropped
    assert sum(account.salvaged_reasons.values()) == account.salvaged
    for text in table["args"].to_pylist():
        json.loads(text)
    return table.to_pylist(), account


def whole(generation: int = 1) -> list[bytes]:
    return [line.encode() for line in lines_of(Writing(generation=generation, events=NUM_EVENTS))]


def with_line(line: bytes) -> bytes:
    lines = whole()
    return b"".join([*lines[:20], line, *lines[20:]])


# The notebook's only lost line of 147 million: a path of stale memory.
CONTROL = (
    b'{"id":"6930","name":"close","cat":"POSIX","pid":"1","tid":"2","ts":"1727387307981693","dur":"7","ph":"X",'
    b'"args":{"hostname":"corona171","ret":0,"fname":"\x04\x01\x9f!","fd":39}}\n'
)
EVENT = b'{"id":1,"name":"%s","cat":"POSIX","pid":1,"tid":2,"ts":5,"dur":7,"ph":"X","args":{%s}}\n'


@pytest.mark.parametrize(
    ("line", "reason", "path"),
    [
        (CONTROL.replace(b"\x9f", b""), "control character", "\\x04\\x01!"),
        (CONTROL, "bad UTF-8", "\\x04\\x01\\x9f!"),
        (EVENT % (b"open", b'"fname":"/data/caf\xe9"'), "bad UTF-8", "/data/caf\\xe9"),
        (EVENT % (b"open", b'"fname":"/data/a "quoted" name","ret":3'), "malformed", '/data/a "quoted" name'),
        (EVENT % (b"open", b'"fname":"C:\\data"'), "malformed", "C:\\data"),
        (
            b'{"id":1,"name":"close","cat":"P","pid":1,"tid":2,"ts":5,"dur":7,"ph":"X","args":{"ho\n',
            "cut short",
            None,
        ),
    ],
)
def test_a_damaged_line_with_its_event_still_in_it_is_salvaged(
    line: bytes, reason: str, path: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(with_line(line))
    rows, account = read(file)
    assert account.salvaged_reasons == {reason: 1}
    assert account.events == NUM_EVENTS
    assert (account.samples[0]["line"], account.samples[0]["reason"]) == (21, reason)
    damaged = next(
        row for row in rows if row["dur_us"] == 7 and (row["ts_us"] == 5 or row["host"] == "corona171")
    )
    assert damaged["path"] == path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\x00\x01\x02\n", "control character"),
        (b"Traceback (most recent call last):\n", "not JSON"),
        (b'{"id":1,"name":"close","cat":"POSIX","pid":1,"tid":2,"ts":172738730798\n', "cut short"),
        (b"17\n", "not an object"),
        (b'{"name":"x","cat":"y","pid":1,"tid":1,"ph":"X","args":{}}\n', "no name or no time"),
        (
            b'{"name":"x","cat":"y","pid":1,"tid":1,"ts":1,"dur":-1,"ph":"X","args":{}}\n',
            "dur is negative",
        ),
        (b'{"name":"x","cat":"y","pid":1,"tid":1,"ts":1,"dur":1,"ph":"?","args":{}}\n', "unknown phase"),
        (b'{"a":' * 100_000 + b"\n", "nested too deeply"),
    ],
)
def test_a_line_without_an_event_is_dropped_with_its_reason(line: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(with_line(line))
    _, account = read(file)
    assert (account.events, account.dropped_reasons) == (NUM_EVENTS, {reason: 1})
    assert not account.is_whole


@pytest.mark.parametrize(
    "line",
    [
        b'{"name":"x","cat":"y","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{"a":{"b":[1,{"c":"}"}]},"d":null}}\n',
        b'{ "name" : "x" , "cat":"y", "pid":1,"tid":1,"ts":1.5,"dur":2.5,"ph":"X"},\r\n',
        b'{"name":"\\u00e9\\ud800","cat":"y","pid":1,"tid":1,"ts":1,"dur":1,"ph":1,"args":{"step":"many","epoch":1e3}}\n',
        b'{"name":"x","cat":"y","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{"ret":9223372036854775808,"v":NaN}}\n',
        b'{"name":"x","cat":"y","pid":"a","tid":[1],"ts":1,"dur":1,"ph":"X","args":[1]}\n',
    ],
)
def test_unusual_but_whole_events_are_events(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(with_line(line))
    _, account = read(file)
    assert account.is_whole
    assert account.events == NUM_EVENTS + 1


ARGUMENTS = (
    b'"flags":1,"mode":2', b'"mode":2,"flags":1', b'"mode":[1,{"x":"y"}],"deep":{"a":{"b":null}}',
    b'"flags":null', b'"flags":"a\\":b"', b'"flags":1,"flags":2', b'"Flags":1,"flags":2',
    b'"ret":"7","size":3,"count":"9"', b'"ret":"many","epoch":4294967296,"step":-2147483648',
    b'"name":"n","value":5,"odd key":1.50', b'"fname":["a"],"hostname":7', b'"fhash":{"a":1},"late":true',
    b'"fhash":"f","late":[]', b"",
)  # fmt: skip


def test_arguments_are_kept_whatever_their_keys_and_the_same_ones_have_the_same_text(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(b"".join(EVENT % (b"x", arguments) for arguments in ARGUMENTS * 60))
    read(file)
    kept = [[row["args"] for row in read_once(file, query_lines=lines)[0]] for lines in (0, sys.maxsize)]
    assert sorted(kept[0]) == sorted(kept[1])
    assert {'{"flags":1,"mode":2}', "{}"} < set(kept[0])
    assert '{"mode":2,"flags":1}' not in kept[0]
    assert kept[0].count('{"flags":1,"mode":2}') == 120


@pytest.mark.parametrize(("unit", "tick_us"), [("US", 1), ("MS", 1000), ("SEC", 1_000_000)])
def test_starts_and_durations_are_in_the_unit_that_the_trace_names(
    unit: str, tick_us: int, tmp_path: Path
) -> None:
    named = {"name": "CM", "ph": "M", "pid": 1, "args": {"name": "time_metric", "value": unit}}
    file = tmp_path / "a.pfw"
    file.write_bytes(json.dumps(named).encode() + b"\n" + EVENT % (b"x", b""))
    ((row,), _) = read(file)
    assert (row["ts_us"], row["dur_us"], row["end_us"]) == (5 * tick_us, 7 * tick_us, 12 * tick_us)


def test_units_that_change_apply_from_their_line_on_and_cut_no_batch(tmp_path: Path) -> None:
    metric = b'{"name":"CM","ph":"M","pid":1,"args":{"name":"time_metric","value":"%s"}}\n'
    units = {b"NS": 1, b"US": 1000, b"MS": 1_000_000, b"SEC": 1_000_000_000}
    ticks = (5, 1999, (1 << 60) + 1, (1 << 61) - 1)
    lines, expected = [], []
    for number in range(2000):
        unit, ts = list(units)[number * 7 % 4], ticks[number % 3 if number % 5 else 3]
        lines += [metric % unit, EVENT.replace(b'"ts":5', b'"ts":%d' % ts) % (b"x", b"")]
        ts_ns, end_ns = ts * units[unit], (ts + 7) * units[unit]
        if max(ts_ns // 1000, end_ns // 1000 - ts_ns // 1000) < 1 << 61:
            expected.append((ts_ns // 1000, end_ns // 1000))
    file = tmp_path / "a.pfw"
    file.write_bytes(b"".join(lines))
    rows, account = read(file)
    assert [(row["ts_us"], row["end_us"]) for row in rows] == expected
    assert account.dropped_reasons == {"time out of range": 2000 - len(expected)}
    batches = list(read_trace_file(TraceFile(path=file)).batches)
    assert [batch.num_rows for batch in batches] == [
        len(expected)
    ]  # else, each line costs what a batch costs


@pytest.mark.parametrize("name", ["/d/plain", '/d/with "quotes"', "/d/back\\slash", "/d/é\n"])
def test_names_of_hashes_are_read_with_their_escapes(name: str, tmp_path: Path) -> None:
    named = {"name": "FH", "ph": "M", "pid": 1, "args": {"name": name, "value": "ab12"}}
    file = tmp_path / "a.pfw"
    call = {"name": "read", "cat": "POSIX", "ph": "X", "pid": 1, "ts": 5, "dur": 2, "args": {"fhash": "ab12"}}
    file.write_text(f"{json.dumps(named)}\n{json.dumps(call)}\n")
    ((row,), _) = read(file)
    assert row["path"] == name


@pytest.mark.parametrize("ts", [(1 << 53) - 1, 1 << 53, (1 << 53) + 1, (1 << 60) + 1])
def test_times_that_no_double_holds_are_exact(ts: int, tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(EVENT.replace(b'"ts":5', b'"ts":%d' % ts) % (b"x", b""))
    rows, _ = read(file)
    assert [row["ts_us"] for row in rows] == [ts]


def test_a_block_that_was_read_leaves_no_file_open(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(b"".join(whole()))
    read_once(file, query_lines=0)
    assert open_below(tmp_path) == []


def test_missing_brackets_and_blank_lines_are_not_damage(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(b"\n \n" + b"".join(whole()[1:-1]).rstrip(b"\n"))
    _, account = read(file)
    assert account.is_whole
    assert (account.events, account.blank) == (NUM_EVENTS, 2)


@pytest.mark.parametrize("name", ["a.pfw", "a.pfw.gz"])
def test_an_empty_file_has_no_events(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"")
    rows, account = read(file)
    assert (rows, account.lines) == ([], 0)


def test_gzip_of_many_members_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw.gz"
    text = b"".join(whole())
    cuts = [0, 100, 101, 5000, len(text)]
    members = (gzip.compress(text[start:stop]) for start, stop in itertools.pairwise(cuts))
    file.write_bytes(b"".join(members) + bytes(512))
    _, account = read(file)
    assert account.is_whole
    assert account.events == NUM_EVENTS


def test_a_torn_gzip_is_read_to_its_end_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw.gz"
    packed = gzip.compress(b"".join(whole()))
    file.write_bytes(packed[: len(packed) // 2])
    _, account = read(file)
    assert 0 < account.events < NUM_EVENTS
    assert account.faults == ["ends inside the gzip member at byte 0: it was cut short"]


def test_a_damaged_member_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw.gz"
    lines = whole()
    parts = [gzip.compress(b"".join(lines[start : start + 20])) for start in (1, 21, 41)]
    middle = bytearray(parts[1])
    middle[len(middle) // 2 :] = bytes(len(middle) - len(middle) // 2)
    file.write_bytes(parts[0] + middle + parts[2])
    _, account = read(file)
    assert account.events >= 40
    assert "damaged" in account.faults[0]


def test_bytes_after_the_last_member_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw.gz"
    file.write_bytes(gzip.compress(b"".join(whole())) + b"trailing words")
    _, account = read(file)
    assert account.events == NUM_EVENTS
    assert "not a gzip member" in account.faults[0]


def test_an_announced_number_that_was_not_reached_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    lines = whole(3)
    del lines[30]
    file.write_bytes(b"".join(lines))
    _, account = read(file)
    assert account.announced_events == NUM_EVENTS
    assert account.faults == [f"its writer counted {NUM_EVENTS} events, {NUM_EVENTS - 1} are here: 1 missing"]
    assert account.missing == 1


@pytest.mark.parametrize("query_lines", [0, sys.maxsize])
@pytest.mark.parametrize("num_lost", [0, 2])
def test_writers_that_number_lines_of_metadata_count_them_among_the_events(
    num_lost: int, query_lines: int, tmp_path: Path
) -> None:
    head = '"pid":1,"tid":1'
    lines = [
        *(f'{{"id":{n},"name":"FH","cat":"dftracer",{head},"ph":"M","args":{{"name":"/{n}","value":{n}}}}}'
          for n in range(1, 4)),
        *(f'{{"id":{n},"name":"read","cat":"POSIX",{head},"ts":{n},"dur":1,"ph":"X","args":{{"fhash":1}}}}'
          for n in range(4, 10)),
        f'{{"id":10,"name":"end","cat":"dftracer",{head},"ts":20,"dur":0,"ph":"X","args":{{"num_events":9}}}}',
    ]  # fmt: skip
    del lines[5 : 5 + num_lost]
    (tmp_path / "a.pfw").write_text("\n".join(lines))
    reading = read_trace_file(TraceFile(path=tmp_path / "a.pfw"), query_lines=query_lines)
    list(reading.batches)
    assert reading.account.missing == num_lost
    assert reading.account.is_whole is (num_lost == 0)


def test_hashes_mean_something_only_in_their_own_file(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_trace(tmp_path, Writing(generation=2, events=NUM_EVENTS, rank=rank))
    for rank, path in enumerate(sorted(tmp_path.iterdir())):
        rows, _ = read(path)
        assert all(f"rank{rank}/" in row["path"] for row in rows if row["path"])


def test_a_hash_explained_late_is_resolved_and_an_unexplained_one_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    lines = whole(3)
    explained = [line for line in lines if b'"FH"' in line]
    file.write_bytes(b"".join([line for line in lines if b'"FH"' not in line] + explained[1:]))
    rows, account = read(file)
    paths = {row["path"] for row in rows if row["path"]}
    assert sum(path.startswith("hash:") for path in paths) == 1
    assert len(paths) == len(explained)
    assert "hashes that no line explains" in account.faults[0]


BIND = b'{"id":1,"name":"FH","cat":"dftracer","pid":1,"tid":1,"ph":"M","args":{"name":"%s","value":%d}}\n'


def test_names_that_hashes_stand_for_may_have_escapes(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    file.write_bytes(BIND % (rb"/caf\u00e9 \"1\"", 7) + EVENT % (b"close", b'"fhash":7'))
    rows, _ = read(file)
    assert [row["path"] for row in rows] == ['/café "1"']


def test_a_hash_that_is_bound_anew_means_the_new_file_from_there_on(tmp_path: Path) -> None:
    file = tmp_path / "a.pfw"
    event = EVENT % (b"close", b'"fhash":7')
    file.write_bytes(BIND % (b"/old", 7) + event + BIND % (b"/new", 7) + event)
    rows, account = read(file)
    assert [row["path"] for row in rows] == ["/old", "/new"]
    assert account.faults == [
        "1 hashes stand for two names: 2 events with them have the one explained last before them"
    ]


def test_events_of_an_ambiguous_hash_are_counted_over_the_whole_file(tmp_path: Path) -> None:
    """Most of them are read before the hash turns out to be ambiguous, in another block."""
    file = tmp_path / "a.pfw"
    long = b',"note":"%s"' % (b"x" * 1000)
    ambiguous, plain = (EVENT % (b"close", b'"fhash":%d%s' % (hash_, long)) for hash_ in (7, 8))
    renamed = EVENT % (b"rename", b'"fhash":8,"newpath_hash":7')
    begin = BIND % (b"/old", 7) + BIND % (b"/other", 8) + BIND % (b"/old", 7)
    file.write_bytes(begin + (ambiguous + plain) * 5_000 + renamed * 3 + BIND % (b"/new", 7) + ambiguous)
    assert file.stat().st_size > 8 << 20
    rows, account = read(file)
    assert len(rows) == 10_004
    assert len(account.faults) == 1
    assert account.faults[0].startswith("1 hashes stand for two names: 5,004 events with them have ")


@pytest.mark.parametrize(
    ("unit", "ts_us", "dur_us"),
    [
        ("NS", 1727387307000, 1),
        ("US", 1727387307000864, 1500),
        ("MS", 1727387307000864_000, 1_500_000),
    ],
)
def test_times_are_read_in_the_unit_that_the_file_declares(
    unit: str, ts_us: int, dur_us: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.pfw"
    metric = b'{"name":"CM","cat":"d","pid":1,"tid":1,"ph":4,"args":{"name":"time_metric","value":"%s"}}\n'
    event = (
        b'{"id":1,"name":"x","cat":"c","pid":1,"tid":1,"ts":1727387307000864,"dur":1500,"ph":1,"args":{}}\n'
    )
    file.write_bytes(metric % unit.encode() + event)
    rows, _ = read(file)
    assert (rows[0]["ts_us"], rows[0]["dur_us"]) == (ts_us, dur_us + (unit == "NS"))


def flip(draw: random.Random, content: bytearray) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    del content[start : start + draw.randrange(1, 300)]


def noise(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    content[start:start] = draw.randbytes(draw.randrange(1, 60))


def structure(draw: random.Random, content: bytearray) -> None:
    at = draw.randrange(len(content))
    content[at : at + 1] = draw.choice(
        (b'"', b"{", b"}", b"\n", b"\\", b"[", b",", b"\x00", b"\xff", b"-", b".")
    )


def swap(draw: random.Random, content: bytearray) -> None:
    one, other = sorted(draw.randrange(len(content)) for _ in range(2))
    content[one:other] = content[one:other][::-1]


DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (flip, cut, noise, structure, swap)


def damage_at_random(seed: int, folder: Path) -> None:
    """One to eight damages to a small file of any generation, plain or packed, before or after packing."""
    draw = random.Random(seed)
    content = bytearray(
        b"".join(line.encode() for line in lines_of(Writing(generation=1 + seed % 3, events=12)))
    )
    is_packed_first = seed % 4 == 0
    if is_packed_first:
        content = bytearray(gzip.compress(bytes(content)))
    for _ in range(draw.randrange(1, 8)):
        draw.choice(DAMAGES)(draw, content)
    is_packed_after = seed % 4 == 1
    file = folder / "fuzz.pfw"
    file.write_bytes(gzip.compress(bytes(content)) if is_packed_after else bytes(content))
    _, account = read(file)
    if not is_packed_first and account.dialect == "json lines":
        assert account.lines == content.count(b"\n") + (not content.endswith(b"\n"))


def test_random_damage_is_always_accounted_for(tmp_path: Path) -> None:
    for seed in range(200):
        damage_at_random(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_random_damages_are_accounted_for(tmp_path: Path) -> None:
    for seed in range(200, 8000):
        damage_at_random(seed, tmp_path)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        (r"\x", None),
        (r"\u12", None),
        ("a\x01", None),
        (r"\ud800", r"\ud800"),
        (r"n\u00e9\/7", "n\u00e9/7"),
    ],
)
def test_any_host_before_the_events_of_a_document_is_read_or_left_out(
    host: str, shown: str | None, tmp_path: Path
) -> None:
    event = '{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{}}'
    (tmp_path / "t.json").write_text(f'{{"hostname":"{host}","traceEvents":[{event}]}}')
    (batch,) = read_trace_file(TraceFile(path=tmp_path / "t.json")).batches
    assert batch.column("host").to_pylist() == [shown]
