"""The command line's surface: help, version, exit codes, errors, JSON, completion, start-up time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.command_line import CommandResult, run_command

PROBE = ("storage", "probe")
QUICK = ("--size", "4MiB", "--streams", "2", "--blocks", "1MiB")


def penstock(*words: str, **environment: str) -> CommandResult:
    return run_command(*words, **environment)


def test_help_lists_every_group_and_all_exit_codes() -> None:
    result = penstock("--help")
    assert result.returncode == 0
    for word in ("storage", "doctor", "demo", "--version", "--debug", "Exit codes"):
        assert word in result.stdout
    for code in ("0 ok", "1 the", "2 wrong", "3 this machine", "70 a defect", "130 interrupted"):
        assert code in " ".join(result.stdout.split())


@pytest.mark.parametrize("words", [PROBE, ("doctor",), ("demo",)])
def test_every_verb_shows_examples_and_offers_json(words: tuple[str, ...]) -> None:
    result = penstock(*words, "--help")
    assert "Examples:" in result.stdout
    assert f"penstock {' '.join(words)}" in result.stdout
    assert "--json" in result.stdout


def test_group_without_command_shows_its_help_and_exits_with_2() -> None:
    result = penstock("storage")
    assert result.returncode == 2
    assert "probe" in result.stdout + result.stderr


def test_help_comes_without_heavy_imports() -> None:
    program = (
        "import sys; from penstock.cli import main; code = main(['--help'])\n"
        "names = {'numpy', 'torch', 'mpi4py', 'obstore', 'pydantic', 'psutil', 'rich', 'difflib'}\n"
        "heavy = names & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_version_is_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert result.stdout.startswith("penstock ")
    assert result.stdout.count("\n") == 1


def test_json_is_one_document_on_stdout_and_nothing_else(tmp_path: Path) -> None:
    result = penstock(*PROBE, f"direct://{tmp_path}", *QUICK, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    wanted = {"op", "mode", "streams", "block_bytes", "gib_per_s", "p50_ms", "p99_ms"}
    assert all(wanted <= seen.keys() for seen in document["measurements"])
    assert "{" not in result.stderr  # a busy machine may be worth a note
    assert "Traceback" not in result.stderr


def test_a_table_for_people_fits_a_narrow_terminal(tmp_path: Path) -> None:
    result = penstock(*PROBE, str(tmp_path), *QUICK, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert "…" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if str(tmp_path) not in line) <= 80


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((*PROBE, "/tmp", "--size", "4G"), 2, "Write GiB (1024-based) or GB (1000-based)"),
        ((*PROBE, "ftp://x/y"), 2, "Unsupported storage scheme 'ftp'"),
        ((*PROBE, "direct://tmp/x"), 2, "three slashes"),
        ((*PROBE, "/tmp", "-O", "fsink=no"), 2, "Did you mean 'fsync'?"),
        ((*PROBE, "/tmp", "--streams", "0"), 2, "must be positive"),
        ((*PROBE, "/proc/here"), 1, "/proc"),
        ((*PROBE, "/tmp", "--size", "1EiB"), 1, "smaller --size"),
        ((*PROBE, "/tmp", "--ranks", "2", "--launcher", "prun"), 2, "Choose from"),
        (("storage", "prob"), 2, "probe"),
        (("doctor", "--at", "/no/such/folder"), 2, "does not exist"),
    ],
)
def test_an_error_is_a_paragraph_with_its_exit_code_and_no_traceback(
    words: tuple[str, ...], code: int, said: str
) -> None:
    result = penstock(*words)
    assert result.returncode == code, result.stderr
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("place", ["front", "end"])
def test_debug_adds_the_traceback_wherever_it_stands(place: str) -> None:
    words = [*PROBE, "ftp://x/y"]
    words = ["--debug", *words] if place == "front" else [*words, "--debug"]
    result = penstock(*words)
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "Unsupported storage scheme 'ftp'" in result.stderr


def test_internal_error_is_reported_as_a_defect() -> None:
    program = (
        "import sys, click\nfrom penstock.cli import app, main\n"
        "app.app.verbs['break'] = click.Command('break', callback=lambda: 1 // 0)\nsys.exit(main(['break']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 70
    assert "a defect in Penstock itself: ZeroDivisionError" in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", *PROBE, f"direct://{tmp_path}", "--size", "8GiB"]
    # A suite that a shell started in the background ignores SIGINT, and so would all that it starts.
    command = ["env", "--default-signal=INT", *command]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_closed_output_and_a_full_one_are_not_defects() -> None:
    command = f"{sys.executable} -m penstock doctor --json"
    for where, code, said in (
        (">&-", 2, "The standard output is closed"),
        (">/dev/full", 3, "No space left"),
    ):
        result = subprocess.run(
            f"{command} {where}", shell=True, check=False, capture_output=True, text=True, timeout=60
        )
        assert (result.returncode, result.stderr.count("\n")) == (code, 1)
        assert said in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("--version",), 0),
        (("docs", "glossary"), 0),
        (("kvcache", "models"), 0),
        (("submission", "rules", "--json"), 0),
        (("submission", "status", "absent"), 2),
        (("trace", "summary", "trace.pfw", "--format", "csv"), 0),
        (("cluster", "check", "--gate", "ipc", "--ranks", "2"), 0),
    ],
)
def test_a_reader_that_leaves_early_changes_neither_exit_code_nor_messages(
    words: tuple[str, ...], code: int, stream: str, tmp_path: Path
) -> None:
    """As after `| head`."""
    event = '{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{}}'
    (tmp_path / "trace.pfw").write_text(f"[\n{event}\n")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "penstock", *words]
    read = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    out, err = (writing, subprocess.PIPE) if stream == "stdout" else (subprocess.PIPE, writing)
    unread = subprocess.run(command, cwd=tmp_path, stdout=out, stderr=err, text=True, check=False, timeout=60)
    os.close(writing)
    assert (read.returncode, unread.returncode) == (code, code), read.stderr
    if stream == "stdout":
        assert unread.stderr == read.stderr
    else:
        assert unread.stdout == read.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_for_shells(shell: str) -> None:
    result = penstock(_PENSTOCK_COMPLETE=f"{shell}_source")
    assert result.returncode == 0, result.stderr
    assert "_PENSTOCK_COMPLETE" in result.stdout


def test_bash_completion_completes_groups_and_commands() -> None:
    result = penstock(_PENSTOCK_COMPLETE="bash_complete", COMP_WORDS="penstock storage pr", COMP_CWORD="2")
    assert "probe" in result.stdout


def test_doctor_json_lists_diagnoses(tmp_path: Path) -> None:
    result = penstock("doctor", "--at", str(tmp_path), "--json")
    assert result.returncode == 0
    assert {"area", "subject", "state", "found", "fix"} <= json.loads(result.stdout)["diagnoses"][0].keys()


SMALL_DATA = ("unet3d", "--accelerator", "h100", "--set", "dataset.num_files_train=4")
SMALL_CHECKPOINT = ("llama3-8b", "--scale", "0.0001", "--results", "runs")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("training", "generate", *SMALL_DATA, "--data", "file"), "give a folder"),
        (("training", "generate", *SMALL_DATA, "--data", "file/below"), "give a folder"),
        ((*PROBE, *QUICK, "file"), "give a folder"),
        (("checkpoint", "run", *SMALL_CHECKPOINT, "--to", "file"), "give a folder"),
        (("kvcache", "run", "--requests", "3", "--results", "runs", "--to", "file"), "give a folder"),
        (("kvcache", "run", "--requests", "3", "--results", "file", "--to", "kv"), "give a folder"),
        ((*PROBE, *QUICK, "data", "--trace", "file"), "cannot have the same name"),
        (("trace", "record", "--out", "file", "--", "true"), "give a folder"),
        (("demo", "--out", "file"), "Choose a directory"),
        (("results", "ls", "file"), "results ls DIR"),
        (("results", "ls", "absent"), "results ls DIR"),
        (("results", "show", "run", "--results", "file"), "--results DIR"),
        (("submission", "check", "file"), "Give a round's"),
    ],
)
def test_a_file_in_place_of_a_directory_is_wrong_usage(
    words: tuple[str, ...], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    result = penstock(*words)
    assert result.returncode == 2, result.stderr
    assert re.search(fix, result.stderr)


def test_a_refused_directory_is_not_wrong_usage(tmp_path: Path) -> None:
    trace = tmp_path / "trace.pfw"
    trace.write_text("[\n")
    result = penstock("trace", "load", str(trace), "--out", "/proc/1/new.events")
    assert (result.returncode, "owner" in result.stderr) == (1, True)
