"""The edge of the command line: exit codes, errors as one paragraph, and words that it takes for itself."""

import errno
import io
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.support.command_line import run_command

from penstock import __version__
from penstock.cli.app import run_at_edge, take_debug
from penstock.errors import OutOfSpace, StorageError, Unavailable, UsageError


def failing(error: BaseException) -> int:
    def program() -> None:
        raise error

    return run_at_edge(program, debug=False)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("no such thing", fix="Name another."), 2, "penstock: no such thing. Name another.\n"),
        (StorageError("it failed", uri="/x"), 1, "penstock: it failed (/x)\n"),
        (Unavailable("no MPI"), 3, "penstock: no MPI\n"),
        (click.UsageError("odd words"), 2, "penstock: odd words\n"),
        (KeyboardInterrupt(), 130, "penstock: interrupted\n"),
        (click.Abort(), 130, "penstock: interrupted\n"),
        (SystemExit(130), 130, "penstock: interrupted\n"),
        (SystemExit(4), 4, ""),
        (SystemExit("text"), 0, ""),
    ],
)
def test_every_outcome_has_its_exit_code_and_message(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error) == code
    assert capsys.readouterr().err == message


def test_defect_is_reported_as_such_and_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(ZeroDivisionError("division by zero")) == 70
    shown = capsys.readouterr().err
    assert "a defect in Penstock itself: ZeroDivisionError: division by zero" in shown
    assert "Traceback" not in shown
    assert run_at_edge(lambda: 1 // 0, debug=True) == 70
    assert "Traceback" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(OSError(errno.ENOSPC, "No space left on device")) == 3
    assert capsys.readouterr().err == "penstock: The output cannot be written: No space left on device\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_its_place_and_the_fix(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OutOfSpace("Allocating 8388608 bytes failed", uri="file:///x", fix="Free some.", errno=number)
    assert failing(full) == 1
    assert capsys.readouterr().err == "penstock: Allocating 8388608 bytes failed (file:///x). Free some.\n"


def test_a_name_that_the_locale_cannot_write_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert run_at_edge(lambda: out.write("a.ünï\n") and None, debug=False) == 0
    assert failing(UsageError("no name 中")) == 2
    assert out.buffer.getvalue() == b"a.\\xfcn\\xef\n"
    assert err.buffer.getvalue() == b"penstock: no name \\u4e2d\n"


def test_a_missing_library_names_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(ModuleNotFoundError("No module named 'duckdb'", name="duckdb")) == 3
    assert "penstock-io[trace]" in capsys.readouterr().err
    assert failing(ModuleNotFoundError("No module named 'penstok'", name="penstok")) == 70


def test_warnings_and_tracebacks_escape_control_characters_in_names(tmp_path: Path) -> None:
    """In processes, because pytest's handlers would take the warnings."""
    name, escaped = "n\x1b[31mEVIL\x9b1m\u202ecod.json", r"n\x1b[31mEVIL\x9b1m\u202ecod.json"
    (tmp_path / name).write_text('{"a": 1}\n')
    event = '{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{}}'
    (tmp_path / "a.pfw").write_text(f"[\n{event}\n")
    for path, code, told in ((tmp_path, 0, "left out"), (tmp_path / name, 1, "Traceback")):
        command = [sys.executable, "-m", "penstock", "--debug", "trace", "summary", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
        assert ended.returncode == code, ended.stderr
        assert told in ended.stderr
        assert escaped in ended.stderr
        assert not {"\x1b", "\x9b", "\u202e"} & {*ended.stderr}


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (3, 3)])
def test_return_value_of_a_program_is_its_exit_code(result: int | None, code: int) -> None:
    assert run_at_edge(lambda: result, debug=False) == code


def test_debug_is_recognised_anywhere_before_a_double_dash() -> None:
    assert take_debug(["a", "--debug", "b"]) == (["a", "b"], True)
    assert take_debug(["a", "--", "--debug"]) == (["a", "--", "--debug"], False)


def test_version_and_help_exit_with_0_and_a_group_alone_with_2() -> None:
    assert run_command("--version").stdout == f"penstock {__version__}\n"
    assert run_command("-h").returncode == 0
    alone = run_command("checkpoint")
    assert alone.returncode == 2
    assert "halt" in alone.stdout + alone.stderr


@pytest.mark.parametrize(
    ("words", "hint"), [(("checkpont",), "checkpoint"), (("trace", "sumary"), "summary")]
)
def test_mistyped_command_gets_a_suggestion(words: tuple[str, ...], hint: str) -> None:
    result = run_command(*words)
    assert result.returncode == 2
    assert f"Did you mean {hint}?" in result.stderr


def test_console_script_reads_the_arguments_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli import main

    monkeypatch.setattr(sys, "argv", ["penstock", "--version"])
    assert main() == 0
