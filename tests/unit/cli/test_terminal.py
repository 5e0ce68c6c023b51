"""The way out of a command: one JSON document, tables for people, progress on terminals, one voice a job."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from penstock.cli.terminal import Terminal, table

if TYPE_CHECKING:
    import pytest

ROWS = [{"what": "write", "GiB/s": "1.5"}, {"what": "read", "GiB/s": "12.0"}]

PROGRAM = """
import time
from penstock.cli.terminal import Terminal
with Terminal(as_json=True).progress() as progress:
    for phase in ("writing", "reading"):
        progress.begin(phase, 4)
        for _ in range(4):
            progress.advance(1)
            time.sleep(0.15)
"""


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(as_json=True).result({"a": 1, "b": [1.5, None]}, table("t", ROWS))
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": 1, "b": [1.5, None]}
    assert said.err == ""


def test_table_is_printed_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(as_json=False).result({"a": 1}, table("Speeds", ROWS))
    said = capsys.readouterr().out
    assert "Speeds" in said
    assert "write" in said
    assert "{" not in said


def test_a_table_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(as_json=False).result({}, table("Strays", []))
    assert capsys.readouterr().out == "Strays: none\n"


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Terminal(as_json=False, speaks=False)
    silent.result({"a": 1}, table("t", ROWS))
    silent.note("psst")
    with silent.progress() as progress:
        progress.begin("x", 1)
        progress.advance(1)
    said = capsys.readouterr()
    assert said.out + said.err == ""


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(as_json=True).note("smaller than asked")
    assert capsys.readouterr().err == "smaller than asked\n"


def test_progress_is_silent_without_a_terminal() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, timeout=60)
    assert result.stdout + result.stderr == b""


def test_progress_is_drawn_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    drawn = _all_of(ours)
    assert running.wait(timeout=60) == 0
    os.close(ours)
    assert "writing" in drawn
    assert "reading" in drawn
    assert "100%" in drawn


def _all_of(terminal: int) -> str:
    seen, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end has closed
            break
        seen += piece
    return seen.decode(errors="replace")
