import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.trace.event_schema import BATCH_SCHEMA, FileAccount, TraceFile
from penstock.trace.trace_set import read_trace_file


def read(path: Path) -> tuple[list[dict[str, Any]], FileAccount]:
    reading = read_trace_file(TraceFile(path=path, run="r"))
    rows = pa.Table.from_batches(list(reading.batches), BATCH_SCHEMA).to_pylist()
    account = reading.account
    parts = account.events + account.salvaged + account.metadata + account.blank + account.dropped
    assert account.lines == parts
    assert len(rows) == account.events + account.salvaged
    return rows, account


STRACE = r"""4101 1727387307.000100 openat(AT_FDCWD, "/data/a.npz", O_RDONLY|O_CLOEXEC) = 3 <0.000012>
4101 1727387307.000200 read(3, "PK\3\4\", 7) = 1"..., 4096) = 4096 <0.000005>
4101 1727387307.000300 clone3({flags=CLONE_VM|CLONE_THREAD} => {parent_tid=[4102]}, 88) = 4102 <0.000040>
4102 1727387307.000400 pread64(3,  <unfinished ...>
4101 1727387307.000410 write(1, "hi\n", 3)  = 3 <0.000003>
4102 1727387307.000450 <... pread64 resumed>"\0\0"..., 1048576, 8192) = 1048576 <0.000051>
4101 1727387307.000500 newfstatat(AT_FDCWD, "/none", 0x7ffd0, 0) = -1 ENOENT (No such file) <0.000002>
4101 1727387307.000600 close(3)         = 0 <0.000001>
4101 1727387307.000700 --- SIGCHLD {si_signo=SIGCHLD, si_code=CLD_EXITED} ---
4101 1727387307.000800 openat(AT_FDCWD, "/data/caf\303\251", O_WRONLY|O_CREAT, 0644) = 4 <0.000100>
4101 1727387307.000900 fsync(4 <unfinished ...>
4101 garbage
4102 1727387307.001000 exit(0) = ?
4102 1727387307.001100 +++ exited with 0 +++
"""


def test_strace_resolves_descriptors_and_joins_interrupted_calls(tmp_path: Path) -> None:
    path = tmp_path / "out.strace"
    path.write_text(STRACE)
    rows, account = read(path)
    told = [
        (row["name"], row["op"], row["path"], row["size_bytes"], row["offset"], row["dur_us"]) for row in rows
    ]
    assert told == [
        ("openat", "open", "/data/a.npz", None, None, 12),
        ("read", "read", "/data/a.npz", 4096, None, 5),
        ("clone3", "clone3", None, None, None, 40),
        ("write", "write", None, 3, None, 3),
        ("pread64", "pread", "/data/a.npz", 1048576, 8192, 51),
        ("newfstatat", "stat", "/none", None, None, 2),
        ("close", "close", "/data/a.npz", None, None, 1),
        ("openat", "open", "/data/café", None, None, 100),
        ("exit", "exit", None, None, None, 0),
        ("fsync", "fsync", "/data/café", None, None, 0),
    ]
    assert {row["pid"] for row in rows} == {4101}
    assert rows[4]["ts_us"] == 1727387307000400
    assert json.loads(rows[5]["args"])["errno"] == "ENOENT"
    assert account.dialect == "strace"
    assert (account.metadata, account.dropped_reasons["not a line of strace"]) == (3, 1)
    assert account.salvaged_reasons == {"never returned": 1}
    (lost,) = [one for one in account.samples if one["reason"] == "never returned"]
    assert lost["text"] == STRACE.splitlines()[lost["line"] - 1]


KILLED = """7 1727387307.000100 clone3({flags=CLONE_VM|CLONE_THREAD} => {parent_tid=[8]}, 88) = 8 <0.000040>
8 1727387307.000200 exit(0 <unfinished ...>
7 1727387307.000300 exit_group(0 <unfinished ...>
8 1727387307.000400 +++ exited with 0 +++
7 1727387307.000400 <... exit_group resumed>) = ?
7 1727387307.000500 +++ exited with 0 +++
9 1727387307.000600 read(3,  <unfinished ...>
9 1727387307.000700 +++ killed by SIGKILL +++
9 1727387307.000800 read(3,  <unfinished ...>
9 1727387307.000900 write(3,  <unfinished ...>
9 1727387307.001000 <... write resumed>"x", 1) = 1 <0.000100>
"""


def test_each_call_of_a_thread_that_was_killed_within_it_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "out.strace"
    path.write_text(KILLED)
    rows, account = read(path)
    told = [(row["tid"], row["pid"], row["name"]) for row in rows]
    assert told == [
        *((7, 7, "clone3"), (8, 7, "exit"), (7, 7, "exit_group")),
        *((9, 9, "read"), (9, 9, "read"), (9, 9, "write")),
    ]
    assert account.salvaged_reasons == {"never returned": 2}
    assert [one["line"] for one in account.samples] == [7, 9]


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
def test_a_real_listing_of_strace_has_every_byte(tmp_path: Path) -> None:
    listing, data = tmp_path / "real.strace", tmp_path / "data.bin"
    program = (
        f"f = open({str(data)!r}, 'wb', buffering=0)\nfor n in (1, 70_000, 3): f.write(bytes(n))\nf.close()"
    )
    command = ["strace", "-f", "-ttt", "-T", "-o", str(listing), sys.executable, "-c", program]
    if subprocess.run(command, check=False).returncode != 0:
        pytest.skip("strace may not trace here")
    rows, account = read(listing)
    writes = [row for row in rows if row["op"] == "write" and row["path"] == str(data)]
    assert [row["size_bytes"] for row in writes] == [1, 70_000, 3]
    assert account.is_whole


DXT = """# darshan log version: 3.41
# start_time: 1727387307
# DXT, file_id: 9457796068806373448, file_name: /p/lustre/ckpt 1.pt
# DXT, rank: 3, hostname: corona171
# DXT, write_count: 2, read_count: 0
# Module    Rank  Wt/Rd  Segment          Offset       Length    Start(s)      End(s)  [OST]
 X_POSIX       3  write        0               0        4194304      0.0125      0.5000  [12]
 X_MPIIO       3   read        1         4194304           4096      1.0000      0.9000
 X_POSIX       3   read        1         4194304           4096      1.0000      1.0001
"""


def test_darshan_segments_have_rank_host_and_file(tmp_path: Path) -> None:
    path = tmp_path / "job.dxt"
    path.write_text(DXT)
    rows, account = read(path)
    assert account.dialect == "darshan dxt"
    assert account.dropped_reasons == {"impossible numbers": 1}
    first = rows[0]
    assert (first["ts_us"], first["dur_us"], first["op"], first["cat"]) == (
        1727387307012500,
        487500,
        "write",
        "POSIX",
    )
    assert (first["rank"], first["host"], first["path"]) == (3, "corona171", "/p/lustre/ckpt 1.pt")
    assert [(row["offset"], row["size_bytes"]) for row in rows] == [(0, 4194304), (4194304, 4096)]


CHROME_EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "python"}},
    {
        "name": "aten::copy_",
        "cat": "cpu_op",
        "ph": "X",
        "ts": 1727387307000000.5,
        "dur": 12.75,
        "pid": 7,
        "tid": 7,
    },
    {
        "name": "step",
        "cat": "app",
        "ph": "B",
        "ts": 1727387307000100,
        "pid": 7,
        "tid": 8,
        "args": {"step": 4},
    },
    {"name": "step", "ph": "E", "ts": 1727387307000300, "pid": 7, "tid": 8},
    {"name": "bytes", "ph": "C", "ts": 5, "pid": 7, "args": {"n": 1}},
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_bare", [True, False])
def test_chrome_documents_are_read_whatever_their_layout(
    indent: int | None, *, is_bare: bool, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    document = (
        CHROME_EVENTS if is_bare else {"schemaVersion": 1, "traceEvents": CHROME_EVENTS, "other": [{"a": 1}]}
    )
    path.write_text(json.dumps(document, indent=indent))
    rows, account = read(path)
    assert account.dialect == "chrome"
    assert account.is_whole
    assert [(row["name"], row["ts_us"], row["dur_us"], row["step"]) for row in rows] == [
        ("aten::copy_", 1727387307000000, 13, None),
        ("step", 1727387307000100, 200, 4),
    ]


def _profile(path: Path, *events: dict[str, Any], **head: Any) -> list[dict[str, Any]]:
    labels = {"ph": "M", "name": "process_labels", "pid": 4711, "tid": 0, "args": {"labels": "CPU"}}
    own = {"ph": "X", "cat": "Trace", "ts": 1, "dur": 9, "pid": "Spans", "tid": "PyTorch", "name": "Profiler"}
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": [labels, *events, own]}, indent=2))
    rows, account = read(path)
    assert account.is_whole
    return rows


def test_profile_counts_from_its_base_time_and_names_host_and_rank(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 4524.5, "dur": 2.5, "pid": 4711, "tid": 4711}
    (row,) = _profile(
        tmp_path / "p.json",
        event,
        deviceProperties=[{"id": 0, "name": "GPU"}],
        distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8},
        host_name="node7",
        baseTimeNanoseconds=1_790_857_026_000_000_000,
    )
    assert row["ts_us"] == 1_790_857_026_000_000 + 4524
    assert (row["host"], row["rank"], row["pid"]) == ("node7", 3, 4711)


@pytest.mark.parametrize(
    ("ts", "dur", "expected"), [(4.3, 2.5, (5, 2)), (4.2, 0, (4, 0)), (4.2, 0.1, (4, 1))]
)
def test_base_time_of_a_profile_counts_to_the_nanosecond(
    ts: float, dur: float, expected: tuple[int, int], tmp_path: Path
) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": ts, "dur": dur, "pid": 1, "tid": 1}
    (row,) = _profile(tmp_path / "p.json", event, baseTimeNanoseconds=1_790_857_026_000_000_750)
    assert (row["ts_us"] - 1_790_857_026_000_000, row["dur_us"]) == expected


def test_facts_behind_the_events_of_a_profile_are_told(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 4524, "dur": 2, "pid": 1, "tid": 1}
    late = {"baseTimeNanoseconds": 1_790_857_026_000_000_000, "distributedInfo": {"rank": 3}}
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event], **late}))
    ((row,), account) = read(path)
    assert (row["ts_us"], row["rank"]) == (4524, None)
    assert "baseTimeNanoseconds comes after the events" in account.faults[0]
    assert account.notes == [
        "its rank 3 comes after the events, which have none: put rank3 into the file's name"
    ]
    renamed = path.rename(tmp_path / "p-rank3.json")
    ((row,), account) = read(renamed)
    assert row["rank"] == 3
    assert account.notes == []


def _halves(num_events: int, apart_us: float) -> dict[str, Any]:
    event = {"ph": "X", "cat": "POSIX", "name": "read", "dur": 0.5, "pid": 1, "tid": 1}
    return {"traceEvents": [{**event, "ts": 1000 + number * apart_us} for number in range(num_events)]}


def test_contiguous_calls_below_a_microsecond_add_up(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(_halves(1000, apart_us=0.5)))
    rows, account = read(path)
    assert sum(row["dur_us"] for row in rows) == 500
    assert account.notes == []


def test_durations_that_whole_microseconds_lose_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(_halves(1000, apart_us=3)))
    rows, account = read(path)
    assert sum(row["dur_us"] for row in rows) == 0
    assert account.notes == [
        "its durations add up to 500.000 us, but after all times are cut to whole microseconds, to 0 us"
    ]


@pytest.mark.parametrize("query_lines", [1, 100_000])
def test_contiguous_nanoseconds_add_up_in_both_parsers(query_lines: int, tmp_path: Path) -> None:
    path = tmp_path / "t.pfw"
    metric = '{"name":"CM","cat":"d","pid":1,"tid":1,"ph":4,"args":{"name":"time_metric","value":"NS"}}'
    event = '{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":%d,"dur":400,"ph":1,"args":{}}'
    path.write_text("\n".join(["[", metric, *(event % (10**18 + 400 * n) for n in range(1000)), ""]))
    reading = read_trace_file(TraceFile(path=path), query_lines=query_lines)
    table = pa.Table.from_batches(list(reading.batches), BATCH_SCHEMA)
    assert sum(table["dur_us"].to_pylist()) == 400


def test_kernels_belong_to_the_process_that_launched_them(tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 2, "pid": 0, "tid": 7}
    (row,) = _profile(tmp_path / "p.json", {**kernel, "args": {"device": 0}})
    assert (row["pid"], row["tid"], row["args"]) == (4711, 7, '{"device":0}')


def test_kernels_of_an_unlabelled_profile_belong_to_its_only_process_that_calls_cuda(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2, "pid": 900}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 9, "pid": 0, "tid": 7}
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [launch, kernel]}))
    assert [row["pid"] for row in read(path)[0]] == [900, 900]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [launch, {**launch, "pid": 901}, kernel]}))
    assert [row["pid"] for row in read(path)[0]] == [900, 901, 0]


def test_a_chrome_document_that_was_cut_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": CHROME_EVENTS[1:2] * 3})[:-60])
    rows, account = read(path)
    assert len(rows) == 2
    assert account.dropped == 1
    assert account.faults == ["the document ends before its array of events does"]


def test_a_chrome_document_may_begin_with_any_key(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = {"ph": "X", "name": "aten::add", "pid": 1, "tid": 1, "ts": 5, "dur": 2}
    document = {"distributedInfo": {"backend": "nccl"}, "traceEvents": [event]}
    for indent in (None, 2):
        path.write_text(json.dumps(document, indent=indent))
        rows, account = read(path)
        assert (len(rows), account.losses()) == (1, [])


def test_a_document_without_events_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": [{"name": "aten::add"}]}, indent=1))
    rows, account = read(path)
    assert (rows, account.faults) == ([], ["it is JSON, but has no array of events"])


def test_chrome_events_one_a_line_with_commas_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in CHROME_EVENTS[:2]) + "\n]\n")
    rows, account = read(path)
    assert account.dialect == "json lines"
    assert [row["dur_us"] for row in rows] == [13]
    assert (account.lines, account.blank, account.metadata) == (4, 2, 1)
