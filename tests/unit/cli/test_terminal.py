"""The way out of a command: one JSON document, tables for people, progress on terminals, one voice a job."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from io import StringIO

import pytest
from rich.console import Console

from penstock.cli.terminal import Terminal, TextTable, View, bold, render_text, table
from penstock.units import format_count, format_number

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


def test_progress_that_was_left_is_erased_on_a_terminal_alone() -> None:
    program = [sys.executable, "-c", "from penstock.cli.terminal import clear_progress; clear_progress()"]
    ours, theirs = pty.openpty()
    running = subprocess.Popen(program, stderr=theirs)
    os.close(theirs)
    erased = _all_of(ours)
    assert running.wait(timeout=60) == 0
    os.close(ours)
    assert erased == "\r\x1b[2K\x1b[?25h"
    assert subprocess.run(program, check=True, capture_output=True, timeout=60).stderr == b""


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


def test_lines_and_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    view: View = [
        "[bold]a[/] :smile:",
        ["b ", ("[c]", "red")],
        bold("d"),
        *table("[t]", [{"[k]": "[v]/:x:"}]),
    ]
    Terminal(as_json=False).result({}, view)
    shown = capsys.readouterr().out
    assert shown.startswith("[bold]a[/] :smile:\nb [c]\nd\n[t]\n")
    assert "[k]" in shown
    assert "[v]/:x:" in shown


def test_a_table_is_as_wide_as_it_is() -> None:
    rows = [{f"column{number}": "0123456789" for number in range(20)}]
    assert render_text(table("Wide", rows)).splitlines()[3].split() == ["0123456789"] * 20


def test_on_a_narrow_terminal_a_table_is_a_paragraph_for_each_row() -> None:
    file = StringIO()
    rows = [{f"column{number}": "0123456789" for number in range(20)}] * 2
    TextTable("Narrow", rows).draw(Console(file=file, width=80, force_terminal=True, color_system=None))
    lines = file.getvalue().splitlines()
    assert lines[0] == "Narrow"
    assert lines.count("column19  0123456789") == 2


def test_a_long_table_has_a_line_for_each_row() -> None:
    rows = [
        {"name": f"{'w' * 200}.{number}", "parts": str(number), "where": "中 a\n"} for number in range(600)
    ]
    title, names, rule, *lines = render_text(table("Tensors", rows)).splitlines()
    assert title == "Tensors"
    assert names.split() == ["name", "parts", "where"]
    assert set(rule) == {"─", " "}
    assert lines[7] == f" {'w' * 200}.7         7   中 a\\n"
    assert len(lines) == len(rows) + 1


def test_numbers_are_aligned_to_the_right() -> None:
    rows = [{"n": "1", "name": "a"}, {"n": "-", "name": "1b"}, {"n": "200", "name": "c"}]
    lines = render_text(table("Counts", rows)).splitlines()
    assert lines[-4:-1] == ["   1   a", "   -   1b", " 200   c"]


def test_sizes_are_aligned_by_their_first_digit_alone() -> None:
    lines = render_text(table("Sizes", [{"size": "1.5 GiB"}, {"size": "12 MiB"}])).splitlines()
    assert lines[-3:-1] == [" 1.5 GiB", "  12 MiB"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1000, "1,000 files")]
)
def test_counts_have_the_right_plural(number: int, text: str) -> None:
    assert format_count(number, "file") == text


def test_absent_numbers_are_a_dash() -> None:
    assert format_number(None, ".2f") == "-"
    assert format_number(0.0, ".2f") == "0.00"


def test_notes_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(as_json=True).notes([ValueError("a"), "b"])
    assert capsys.readouterr().err == "a\nb\n"
