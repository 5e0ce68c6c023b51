"""Answers of `penstock trace` are those of a plain parser that shares no code with it, on every dialect.

Traces are made here with what is awkward in each dialect; real ones, kept beside the project, are read too.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import awkward_traces as awkward
from tests.support import reference_trace_parser as reference
from tests.support.awkward_traces import StraceProgram
from tests.support.command_line import run_command
from tests.support.reference_trace_parser import READERS, Event

from penstock.environment import process_environment
from penstock.trace.event_schema import TraceFile
from penstock.trace.trace_set import read_trace_file


def asked(*words: object) -> Mapping[str, Any]:
    document: Mapping[str, Any] = run_command(*words, "--json").document
    return document


def compare(files: Sequence[Path], expected: Sequence[Event]) -> None:
    """Every count, sum, byte, union and overlap that can be asked for of these files."""
    compare_functions(files, expected)
    compare_files(files, expected)
    compare_processes(files, expected)
    compare_facts(files, expected)


def compare_functions(files: Sequence[Path], expected: Sequence[Event]) -> None:
    query = (
        "SELECT cat, name, count(*), sum(dur_us), coalesce(sum(size_bytes), 0) FROM events GROUP BY cat, name"
    )
    rows = asked("trace", "sql", query, *files)["rows"]
    assert {(cat, name): tuple(rest) for cat, name, *rest in rows} == reference.by_function(expected)


def compare_files(files: Sequence[Path], expected: Sequence[Event]) -> None:
    found = {
        row["path"]: (row["num_events"], row["union_us"], row["read_bytes"], row["written_bytes"])
        for row in asked("trace", "files", *files)["rows"]
    }
    assert found == reference.by_file(expected)


def compare_processes(files: Sequence[Path], expected: Sequence[Event]) -> None:
    rows = asked("trace", "overlap", *files, "--by", "pid")["rows"]
    columns = ("num_events", "union_us", "sum_us", "compute_us", "overlap_us")
    found = {(row["host"], row["pid"]): tuple(row[column] for column in columns) for row in rows}
    assert found == reference.by_process(expected)


def compare_facts(files: Sequence[Path], expected: Sequence[Event]) -> None:
    (facts,) = asked("trace", "summary", *files)["rows"]
    io = [event for event in expected if event.is_io]
    compute = [event for event in expected if event.is_compute]
    io_us, compute_us = reference.union_us(io), reference.union_us(compute)
    assert {name: facts[name] for name in ("num_events", "num_processes", "num_threads", "num_files")} == {
        "num_events": len(expected),
        "num_processes": len({(event.host, event.pid) for event in expected}),
        "num_threads": len({(event.host, event.pid, event.tid) for event in expected}),
        "num_files": len(reference.count_paths(expected)),
    }
    # MPI-IO's bytes are those of the POSIX calls below it.
    assert facts["moved_bytes"] == sum(e.moved or 0 for e in expected if e.cat != "MPIIO")
    assert facts["io_union_us"] == io_us
    assert facts["io_sum_us"] == sum(event.dur_us for event in io)
    assert facts["compute_union_us"] == compute_us
    assert facts["overlap_us"] == io_us + compute_us - reference.union_us([*io, *compute])


def dftracer(generation: int) -> Callable[[Path, int], None]:
    return lambda folder, seed: awkward.write_dftracer(folder, generation, seed=seed)


def strace_plain(folder: Path, seed: int) -> None:
    program = StraceProgram(seed, names=False, is_single=True)
    (folder / "program.strace").write_text(program.listing(prefix=""))


def strace_f(folder: Path, seed: int) -> None:
    program = StraceProgram(seed, names=False)
    (folder / "program.strace").write_text(program.listing("[pid {tid:>5}] " if seed % 2 else "{tid} "))


def strace_f_y(folder: Path, seed: int) -> None:
    (folder / "program.strace").write_text(StraceProgram(seed, names=True).listing())


def strace_ff_y(folder: Path, seed: int) -> None:
    StraceProgram(seed, names=True).write_one_file_a_thread(folder)


WRITERS: Mapping[str, tuple[str, Callable[[Path, int], None]]] = {
    "first generation": ("dftracer", dftracer(1)),
    "second generation": ("dftracer", dftracer(2)),
    "third generation": ("dftracer", dftracer(3)),
    "strace": ("strace", strace_plain),
    "strace -f": ("strace", strace_f),
    "strace -f -y": ("strace", strace_f_y),
    "strace -ff -y": ("strace", strace_ff_y),
    "DXT": ("dxt", lambda folder, seed: awkward.write_dxt(folder / "job.txt", seed=seed, has_threads=False)),
    "DXT, threads": (
        "dxt",
        lambda folder, seed: awkward.write_dxt(folder / "job.txt", seed=seed, has_threads=True),
    ),
    "Kineto": ("kineto", lambda folder, seed: awkward.write_kineto(folder / "profile.json", seed=seed)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dialect", WRITERS)
def test_made_traces_have_the_answers_of_the_reference(dialect: str, seed: int, tmp_path: Path) -> None:
    reader, write = WRITERS[dialect]
    write(tmp_path, seed)
    files = sorted(tmp_path.iterdir())
    expected = READERS[reader](files)
    assert len(expected) > 50
    compare(files, expected)


def test_made_listings_have_calls_that_others_interrupt_and_tasks_that_run_early() -> None:
    programs = [StraceProgram(seed, names=False) for seed in range(3)]
    listings = "".join(program.listing() for program in programs)
    assert listings.count("<unfinished ...>\n") > 100
    assert "<... clone3 resumed>" in listings
    assert "<... clone resumed>" in listings
    assert len({call.tid for program in programs for call in program.calls}) == 7


PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
@pytest.mark.parametrize("flags", ["", "-f", "-f -y", "-ff -y"])
def test_listings_of_a_real_program_have_the_answers_of_the_reference(flags: str, tmp_path: Path) -> None:
    folder, data = tmp_path / "traces", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    listing = folder / ("t.strace" if "ff" in flags else "program.strace")
    program = [sys.executable, str(PROGRAMS / "threads_and_children.py"), str(data)]
    command = ["strace", *flags.split(), "-ttt", "-T", "-o", str(listing), *program]
    if subprocess.run(command, check=False).returncode != 0:
        pytest.skip("strace may not trace here")
    files = sorted(folder.iterdir())
    expected = READERS["strace"](files)
    assert len(expected) > 200
    assert "-f" not in flags or sum(event.moved == 10 for event in expected) == 4
    compare(files, expected)


REAL = {
    "dftracer-dlio-unet3d/*.pfw.gz": "dftracer",
    "darshan/unet3d_a100.darshan.txt.gz": "dxt",
    "darshan/sample-dxt-simple.darshan.txt": "dxt",
}


@pytest.mark.parametrize("glob", REAL)
def test_real_traces_have_the_answers_of_the_reference(glob: str) -> None:
    folder = process_environment().get("PENSTOCK_TRACE_FIXTURES", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no real traces here: PENSTOCK_TRACE_FIXTURES")
    files = sorted(Path(folder).glob(glob))
    compare(files, READERS[REAL[glob]](files))
    for file in files:
        reading = read_trace_file(TraceFile(path=file))
        for _ in reading.batches:
            pass
        assert reading.account.losses() == []
