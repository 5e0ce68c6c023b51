"""Recorded events as lines of a trace."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.capture.trace_writer import EventKind, Layer, LineFormatter, RecordedEvent

READ = EventKind("pread64", "POSIX", Layer.LIBC_IO)
STEP = EventKind('a "quoted"\nname', "compute", Layer.PYTHON)


def _parsed(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def test_an_event_has_time_file_and_size_in_whole_microseconds() -> None:
    writer = LineFormatter("node1", 77, epoch_ns=1_000_000_000_000)
    file, event = _parsed(writer.events(5, [(READ, 1999, 12_999, "/data/a", 4096, 512, 500, None)]))
    assert (file["name"], file["ph"], file["args"]["name"]) == ("FH", 4, "/data/a")
    assert event["args"].pop("fhash") == file["args"]["value"]
    assert event["args"].pop("hhash")
    assert event == {
        "id": 1,
        "name": "pread64",
        "cat": "POSIX",
        "type": 3,
        "pid": 77,
        "tid": 5,
        "ts": 1_000_000_001,
        "dur": 11,
        "ph": 1,
        "args": {"ret": 500, "offset": 4096, "count": 512},
    }


def test_a_file_is_named_once_and_events_without_one_name_none() -> None:
    writer = LineFormatter("node1", 77, epoch_ns=0)
    events: list[RecordedEvent] = [
        (READ, 0, 1, "/a", 0, 1, 1, None),
        (READ, 0, 1, "/b", 0, 1, 1, None),
        (READ, 0, 1, "/a", 0, 1, 1, None),
        (STEP, 0, 1, None, None, None, None, {"step": 3, "why": 'it "is"'}),
    ]
    lines = _parsed(writer.events(1, events))
    assert [line["args"]["name"] for line in lines if line["ph"] == 4] == ["/a", "/b"]
    assert lines[-1]["args"] | {"hhash": ""} == {"hhash": "", "step": 3, "why": 'it "is"'}
    assert [line["id"] for line in lines if line["ph"] == 1] == [1, 2, 3, 4]


def test_opening_and_ending_name_host_unit_rank_and_number_of_events() -> None:
    writer = LineFormatter("node1", 77, epoch_ns=0)
    opening = {line["name"]: line["args"]["value"] for line in _parsed(writer.opening(rank=3))}
    assert opening["CM"] == "US"
    assert opening["PR"] == 3
    assert opening["process_name"] == "Rank 3"
    assert "PR" not in {line["name"] for line in _parsed(writer.opening(rank=None))}
    writer.events(1, [(READ, 0, 1, "/a", 0, 1, 1, None)] * 9)
    (ending,) = _parsed(writer.ending(5_000))
    assert (ending["name"], ending["args"]["num_events"], ending["ts"]) == ("end", 9, 5)


@given(path=st.text(min_size=1), began=st.integers(0, 10**15), lasted=st.integers(0, 10**12))
def test_whatever_a_path_holds_a_line_is_one_line_of_json(path: str, began: int, lasted: int) -> None:
    writer = LineFormatter("node1", 1, epoch_ns=10**18)
    file, event = writer.events(1, [(READ, began, began + lasted, path, 0, 1, 1, None)]).split(b"\n")[:2]
    assert json.loads(file)["args"]["name"] == path
    whole = json.loads(event)
    assert whole["ts"] + whole["dur"] == (began + lasted + 10**18) // 1000
