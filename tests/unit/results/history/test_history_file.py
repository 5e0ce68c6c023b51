"""The file of a history: entries come back, damage is named and read past, nobody's line is lost."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.results.history import history_file as file_module
from penstock.results.history.history_file import (
    FolderMoved,
    HistoryEntry,
    HistoryFile,
    RunBegan,
    RunEnded,
    format_entry,
    parse_entry,
    parse_lines,
)
from penstock.results.provenance import ProcessMark

MARK = ProcessMark(boot_id="b", pid_namespace=1, pid=2, start_ticks=3)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def began(run: str = "1a2b3c", folder: str = "unet3d-1") -> RunBegan:
    return RunBegan(
        run=run,
        at="2026-01-02T03:04:05.000000+00:00",
        folder=folder,
        is_named=False,
        workload="unet3d_h100",
        ranks=2,
        command=("penstock", "training", "run"),
        working_folder="/home/me",
        settings={"AWS_REGION": "x"},
        process=MARK,
    )


def ended(run: str = "1a2b3c") -> RunEnded:
    return RunEnded(run=run, at="2026-01-02T03:05:05.000000+00:00", outcome="finished", why="")


ENTRIES: st.SearchStrategy[HistoryEntry] = st.one_of(
    st.builds(
        RunBegan,
        run=WORDS, at=WORDS, folder=WORDS, is_named=st.booleans(), workload=WORDS,
        ranks=st.integers(0, 1 << 20), command=st.lists(WORDS, max_size=3).map(tuple),
        working_folder=WORDS, settings=st.dictionaries(WORDS, WORDS, max_size=2), process=st.just(MARK),
    ),
    st.builds(RunEnded, run=WORDS, at=WORDS, outcome=WORDS, why=WORDS),
    st.builds(
        FolderMoved,
        event=st.sampled_from(["removed", "restored", "deleted"]), run=WORDS, at=WORDS, folder=WORDS,
        batch=WORDS,
    ),
)  # fmt: skip


@given(entries=st.lists(ENTRIES, max_size=4))
def test_entries_come_back_as_they_were_written(entries: list[HistoryEntry]) -> None:
    content = b"".join(map(format_entry, entries))
    assert content.count(b"\n") == len(entries)
    assert parse_lines(content, "history") == file_module.HistoryLines(entries=tuple(entries), complaints=())


@given(cut=st.integers(0, 400))
def test_a_torn_last_line_costs_only_itself(cut: int) -> None:
    whole, last = format_entry(began()), format_entry(ended())
    left = last[: min(cut, len(last))]
    found = parse_lines(whole + left, "history")
    assert found.entries[0] == began()
    if len(left) >= len(last) - 1:
        assert found.entries == (began(), ended())
    elif left:
        assert found.entries == (began(),)
        assert found.complaints == (f"history: line 2 is cut off after {len(left)} bytes; it is skipped",)


def test_the_next_entry_after_a_torn_line_stands_on_its_own(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    history.append(began())
    with history.path.open("ab") as file:
        file.write(b'{"format":1,"event":"en')
    history.append(ended())
    found = history.read()
    assert found.entries == (began(), ended())
    (complaint,) = found.complaints
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
        (b"[" * 100_000, "recursion"),
    ],
    ids=["zeros", "no text", "a list", "another format", "another event", "an unknown key", "depth"],
)
def test_damage_in_the_middle_is_named_with_its_line_and_read_past(line: bytes, reason: str) -> None:
    found = parse_lines(format_entry(began()) + line + b"\n" + format_entry(ended()), "history")
    assert found.entries == (began(), ended())
    (complaint,) = found.complaints
    assert "line 2" in complaint
    assert reason in complaint


def test_an_absent_history_is_empty_and_reading_makes_none(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path)
    assert history.read().entries == ()
    assert not history.exists()
    assert list(tmp_path.iterdir()) == []


def test_an_id_is_never_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(digits))
    history = HistoryFile(tmp_path)
    assert [history.begin(began).run, history.begin(began).run] == ["aaaaaa", "bbbbbb"]


def test_a_history_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / ".penstock").write_text("a file")
    with pytest.raises(StorageError, match="Writing the history of runs"):
        HistoryFile(tmp_path).append(began())


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
    monkeypatch.setattr(file_module, "LONGEST_WAIT_S", 0.05)
    history = HistoryFile(tmp_path)
    history.append(began())
    with locked(history.path):
        history.append(ended())
    assert history.read().entries == (began(), ended())
    assert "has been locked" in caplog.text


def test_a_line_is_plain_json_that_other_programs_read() -> None:
    line = json.loads(format_entry(ended()))
    assert line == {
        "format": 1,
        "event": "ended",
        "run": "1a2b3c",
        "at": "2026-01-02T03:05:05.000000+00:00",
        "outcome": "finished",
        "why": "",
    }
    assert parse_entry(format_entry(began())) == began()
