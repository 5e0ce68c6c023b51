"""Folders of thousands of small traces: few files are open at once, progress is told, output stays short."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command_line import run_command
from tests.support.trace_files import Writing, write_trace

from penstock.progress import Progress
from penstock.trace.reading.trace_files import find_trace_files
from penstock.trace.trace_set import GatheredEvents, name_trace_files, read_events

NUM_FILES = 600
NUM_EVENTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    for rank in range(NUM_FILES):
        write_trace(folder, Writing(events=NUM_EVENTS, rank=rank))
    return folder


def test_files_of_a_large_folder_are_not_open_at_once(folder: Path) -> None:
    """The limit leaves room for what the interpreter and its libraries have open, but not for the files."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for question in (["summary", str(folder)], ["load", str(folder), "-o", str(folder / "made.events")]):
        command = [sys.executable, "-c", program, "trace", *question]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class CountedProgress(Progress):
    """Keeps what it is told, by any thread."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.amounts: list[float] = []

    def begin(self, phase: str, total: float) -> None:
        self.totals[phase] = total

    def advance(self, amount: float) -> None:
        self.amounts.append(amount)


def test_progress_comes_with_each_file_and_ends_at_the_size_of_all(folder: Path, tmp_path: Path) -> None:
    progress = CountedProgress()
    files = name_trace_files(find_trace_files([str(folder / "*.pfw.gz")]), run="")
    store = GatheredEvents(tmp_path)
    accounts = read_events(files, store, progress=progress)
    assert len(accounts) == NUM_FILES
    # The last event of a file is its writer's own.
    assert sum(account.events for account in accounts) == NUM_FILES * (NUM_EVENTS + 1)
    num_bytes = sum(file.path.stat().st_size for file in files)
    assert progress.totals == {"reading traces": num_bytes}
    assert sum(progress.amounts) == num_bytes
    assert len(progress.amounts) >= NUM_FILES


def test_a_table_of_many_files_shows_the_damaged_ones_first(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "zz.pfw"
    damaged.write_text("no event\n")
    loaded = ["trace", "load", folder / "*.pfw.gz", damaged, "-o", tmp_path / "made.events"]
    lines = run_command(*loaded).stdout.splitlines()
    assert len(lines) < 60
    assert "zz.pfw" in next(line for line in lines if ".pfw" in line)
    assert lines[-1] == f"... and {NUM_FILES + 1 - 50:,} more; --json gives all"
    assert len(run_command(*loaded, "--json").document["files"]) == NUM_FILES + 1
