"""The file of a history: entries come back, damage is named and read past, nobody's line is lost."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StorageError, UsageError
from penstock.results import history as history_module
from penstock.results.history import Entry, HistoryFile, format_entry, parse_entry, parse_lines
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MARK = {"boot_id": "b", "pid_namespace": 1, "pid": 2, "start_ticks": 3}
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
BEGAN: Entry = {
    "event": "began",
    "run": "1a2b3c",
    "at": "2026-01-02T03:04:05.000000+00:00",
    "folder": "unet3d-1",
    "is_named": False,
    "workload": "unet3d_h100",
    "ranks": 2,
    "command": ["penstock", "training", "run"],
    "working_folder": "/home/me",
    "settings": {"AWS_REGION": "x"},
    "process": MARK,
}
ENDED: Entry = {"event": "ended", "run": "1a2b3c", "at": BEGAN["at"], "outcome": "finished", "why": ""}
ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    st.fixed_dictionaries(
        {
            **dict.fromkeys(("run", "folder"), NAMES),
            **dict.fromkeys(("at", "workload", "working_folder"), WORDS),
            "event": st.just("began"),
            "is_named": st.booleans(),
            "ranks": st.integers(0, 1 << 20),
            "command": st.lists(WORDS, max_size=3),
            "settings": st.dictionaries(WORDS, WORDS, max_size=2),
            "process": st.just(MARK),
        }
    ),
    st.fixed_dictionaries(
        {"event": st.just("ended"), "run": NAMES, "at": WORDS, "outcome": WORDS, "why": WORDS}
    ),
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(["published", "removed", "restored", "deleted"]),
            **dict.fromkeys(("run", "folder"), NAMES),
            **dict.fromkeys(("at", "batch"), WORDS),
        }
    ),
)


def request() -> RunRequest:
    return RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["penstock", "x"])


@given(entries=st.lists(ENTRIES, max_size=4))
def test_entries_come_back_as_they_were_written(entries: list[Entry]) -> None:
    content = b"".join(map(format_entry, entries))
    assert content.count(b"\n") == len(entries)
    assert parse_lines(content, "history") == (entries, [])


@given(cut=st.integers(0, 400))
def test_a_torn_last_line_costs_only_itself(cut: int) -> None:
    whole, last = format_entry(BEGAN), format_entry(ENDED)
    left = last[: min(cut, len(last))]
    entries, complaints = parse_lines(whole + left, "history")
    assert entries[0] == BEGAN
    if len(left) >= len(last) - 1:
        assert entries == [BEGAN, ENDED]
    elif left:
        assert entries == [BEGAN]
        assert complaints == [f"history: line 2 is cut off after {len(left)} bytes; it is skipped"]


def test_the_next_entry_after_a_torn_line_stands_on_its_own(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    run = history.begin(request(), NOW)["run"]
    with history.path.open("ab") as file:
        file.write(b'{"format":1,"event":"en')
    history.end(run, "finished", "")
    entries, (complaint,) = history.read()
    assert [entry["event"] for entry in entries] == ["began", "ended"]
    assert f"{history.path}: line 2 cannot be read" in complaint


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\0" * 50, "Expecting value"),
        (b"\xff\xfe", "codec"),
        (b"[]", "format None"),
        (b'{"format":2,"event":"ended"}', "format 2, not 1"),
        (b'{"format":1,"event":"exploded"}', "exploded"),
        (b'{"format":1,"event":"ended","run":"x","at":"y","outcome":"finished","why":"","extra":1}', "extra"),
        (b'{"format":1,"event":"ended","run":"x","at":"y","outcome":"finished"}', "'why' is wrong"),
        (b'{"format":1,"event":"ended","run":1,"at":"y","outcome":"finished","why":""}', "'run' is wrong"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=[
        "zeros",
        "no text",
        "a list",
        "another format",
        "another event",
        "an unknown key",
        "a missing key",
        "another type",
        "depth",
    ],
)
def test_damage_in_the_middle_is_named_with_its_line_and_read_past(line: bytes, reason: str) -> None:
    entries, (complaint,) = parse_lines(format_entry(BEGAN) + line + b"\n" + format_entry(ENDED), "history")
    assert entries == [BEGAN, ENDED]
    assert "line 2" in complaint
    assert reason in complaint


def test_an_absent_history_is_empty_and_reading_makes_none(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    assert history.read() == ([], [])
    assert not history.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_in_place_of_the_history_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    history.path.parent.mkdir()
    os.mkfifo(history.path)
    with pytest.raises(StorageError, match="a pipe"):
        history.read()


@pytest.mark.parametrize("linked", [".penstock", ".penstock/history.jsonl"])
@pytest.mark.parametrize("target", ["home", "absent"])
def test_nothing_is_written_through_a_link_in_place_of_the_history(
    linked: str, target: str, tmp_path: Path
) -> None:
    home, runs = HistoryFile(tmp_path / "home"), tmp_path / "runs"
    home.begin(request(), NOW)
    (runs / linked).parent.mkdir(parents=True)
    (runs / linked).symlink_to(tmp_path / target / linked)
    before = home.path.read_bytes()
    with pytest.raises(StorageError, match="Writing the history of runs") as refusal:
        HistoryFile(runs).append("deleted", "1a2b3c", folder="$(true)", batch="")
    assert "link" in str(refusal.value)
    assert home.path.read_bytes() == before
    assert not (tmp_path / "absent").exists()


def test_a_forged_entry_removes_nothing_above_the_results(tmp_path: Path) -> None:
    runs = tmp_path / "above" / "runs"
    history = HistoryFile(runs)
    history.begin(request(), NOW, named="..")
    history.end(history.read()[0][0]["run"], "failed", "")
    (run,) = history_module.read_catalog(runs)[0]
    with pytest.raises(UsageError, match="not directly below"):
        history_module.delete_runs(runs, [run])
    assert history.exists()


def test_nothing_is_written_into_a_pipe_in_place_of_the_history(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    history.path.parent.mkdir()
    os.mkfifo(history.path)
    with pytest.raises(StorageError, match="a pipe"):
        history.append("deleted", "1a2b3c", folder="x", batch="")


def test_an_id_is_never_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(digits))
    history = HistoryFile(tmp_path)
    assert [history.begin(request(), NOW)["run"] for _ in range(2)] == ["aaaaaa", "bbbbbb"]


def test_a_history_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / ".penstock").write_text("a file")
    with pytest.raises(StorageError, match="Writing the history of runs"):
        HistoryFile(tmp_path).begin(request(), NOW)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_lock_that_is_never_released_only_delays_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history_module, "LONGEST_WAIT_S", 0.05)
    history = HistoryFile(tmp_path)
    run = history.begin(request(), NOW)["run"]
    with locked(history.path):
        history.end(run, "finished", "")
    assert [entry["event"] for entry in history.read()[0]] == ["began", "ended"]
    assert "has been locked" in caplog.text


def test_a_line_is_plain_json_that_other_programs_read() -> None:
    line = json.loads(format_entry(ENDED))
    assert line == {
        "format": 1,
        "event": "ended",
        "run": "1a2b3c",
        "at": "2026-01-02T03:04:05.000000+00:00",
        "outcome": "finished",
        "why": "",
    }
    assert parse_entry(format_entry(BEGAN)) == BEGAN


def test_a_forged_entry_deletes_no_folder_of_something_else(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    history.begin(request(), NOW, named="thesis")
    history.end(history.read()[0][0]["run"], "failed", "")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    (tmp_path / "thesis/figures.parquet").touch()
    (run,) = history_module.read_catalog(tmp_path)[0]
    with pytest.raises(UsageError, match="No file in the folder"):
        history_module.delete_runs(tmp_path, [run])
    assert (tmp_path / "thesis/chapter.tex").exists()
