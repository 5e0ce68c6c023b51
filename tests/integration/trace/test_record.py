"""`penstock trace record`: traces of any program."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command_line import run_command

import penstock.trace
from penstock.errors import Unavailable, UsageError
from penstock.trace.capture.external_tracers import dftracer_preload, plan_recording
from penstock.trace.reading.json_lines import find_name_in_siblings

PROGRAMS = Path(__file__).parent / "programs"
needs_dftracer = pytest.mark.skipif(dftracer_preload() is None, reason="dftracer is not installed")
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def _record(tmp_path: Path, *words: str, tracer: str = "strace") -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "penstock",
        "trace",
        "record",
        "--tracer",
        tracer,
        "-o",
        str(tmp_path / "t"),
    ]
    return subprocess.run([*argv, *words], capture_output=True, text=True, timeout=280, check=False)


@needs_strace
def test_a_program_is_traced_with_its_paths_and_ends_as_it_would(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(100_000))
    ended = _record(tmp_path, "--", "cp", str(source), str(tmp_path / "target"))
    assert ended.returncode == 0, ended.stderr
    traces = "".join(path.read_text() for path in (tmp_path / "t").glob("*.strace.*"))
    assert str(source) in traces
    assert (tmp_path / "target").stat().st_size == 100_000


@needs_strace
def test_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    assert _record(tmp_path, "--", "sh", "-c", "exit 7").returncode == 7
    assert _record(tmp_path, "--", "sh", "-c", "kill -TERM $$").returncode == 143


@needs_strace
@pytest.mark.parametrize("is_recorded", [True, False])
def test_threads_processes_and_names_of_a_real_program_are_told_apart(
    *, is_recorded: bool, tmp_path: Path
) -> None:
    """A recording has a file for each thread, `strace -f` one listing with numbers: both say the same."""
    data = tmp_path / "data"
    data.mkdir()
    program = (sys.executable, str(PROGRAMS / "threads_and_children.py"), str(data))
    if is_recorded:
        ended = _record(tmp_path, "--", *program)
        assert ended.returncode == 0, ended.stderr
        assert "strace does not see what is read or written through a mapped file" in ended.stderr
    else:
        (tmp_path / "t").mkdir()
        listing = ("strace", "-f", "-y", "-ttt", "-T", "-o", str(tmp_path / "t" / "listing.strace"))
        subprocess.run([*listing, *program], check=True, timeout=280)
    query = (
        "SELECT pid, tid, op, parse_filename(path, false, 'forward_slash'), size_bytes, \"offset\""
        " FROM events"
        f" WHERE path LIKE '{data}/%' AND op IN ('open', 'write', 'preadv', 'pwritev') ORDER BY ts_us"
    )
    with penstock.trace.load(tmp_path / "t") as run:
        assert run.losses() == []
        events = run.sql(query).fetchall()
        assert run.sql("SELECT count(*) FROM events WHERE pid = 0 OR tid = 0").fetchall() == [(0,)]
    names = {name for _, _, _, name, _, _ in events}
    assert names == {'naïve "q" \\ x<y>.txt', "plain.bin", "t0", "t1", "t2", "t3"}
    assert [event[2:] for event in events if event[3] == "plain.bin"] == [
        ("open", "plain.bin", None, None),
        ("pwritev", "plain.bin", 5, 7),
        ("preadv", "plain.bin", 4, 7),
    ]
    writers = {name: (pid, tid) for pid, tid, op, name, _, _ in events if op == "write"}
    main = next(pid for pid, tid, _, name, _, _ in events if name == "plain.bin" and pid == tid)
    assert {pid for pid, _ in (writers["t0"], writers["t1"], writers["t2"])} == {main}
    assert main not in {tid for _, tid in writers.values()}
    child, thread = writers["t3"]
    assert child not in (main, thread)


@pytest.mark.parametrize(
    "tracer", [pytest.param("strace", marks=needs_strace), pytest.param("dftracer", marks=needs_dftracer)]
)
def test_processes_have_the_ranks_that_their_launcher_gave_them(tracer: str, tmp_path: Path) -> None:
    """Those that they fork, too; and nothing else of their environment is in the trace."""
    ended = _record(
        tmp_path, "--", sys.executable, str(PROGRAMS / "launched_ranks.py"), str(tmp_path), tracer=tracer
    )
    assert ended.returncode == 0, ended.stderr
    query = "SELECT DISTINCT rank, parse_filename(path) FROM events WHERE path LIKE '%.bin' AND op = 'write'"
    with penstock.trace.load(tmp_path / "t") as run:
        assert sorted(run.sql(query).fetchall()) == [
            (rank, f"{who}-{rank}.bin") for rank in range(2) for who in ("forked", "own")
        ]
        (launcher,) = run.sql("SELECT pid FROM events WHERE name = 'recorded' AND rank IS NULL").fetchall()
        assert (
            launcher
            in run.sql("SELECT DISTINCT pid FROM events WHERE rank IS NULL AND op = 'open'").fetchall()
        )
    for path in (tmp_path / "t").iterdir():
        content = path.read_bytes()
        assert b"hush" not in (gzip.decompress(content) if path.suffix == ".gz" else content)


@needs_strace
def test_ranks_of_mpi_are_recorded_each_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    program = "import sys\nfrom mpi4py import MPI\nopen(sys.argv[1] + str(MPI.COMM_WORLD.rank), 'w')"
    record = [sys.executable, "-m", "penstock", "trace", "record", "--tracer", "strace", "-o", tmp_path / "t"]
    words = [mpiexec, "-n", "2", *record, "--", sys.executable, "-c", program, tmp_path / "file"]
    subprocess.run(list(map(str, words)), check=True, timeout=280)
    query = f"SELECT rank, path FROM events WHERE path LIKE '{tmp_path}/file%' AND op = 'open' ORDER BY rank"
    with penstock.trace.load(tmp_path / "t") as run:
        assert run.sql(query).fetchall() == [(0, f"{tmp_path}/file0"), (1, f"{tmp_path}/file1")]


@pytest.mark.parametrize(
    ("tracer", "saw"),
    [
        pytest.param("strace", [], marks=needs_strace),
        pytest.param("dftracer", ["dftracer saw ", " of the 4.00 MiB that "], marks=needs_dftracer),
    ],
)
def test_bytes_that_a_tracer_did_not_see_are_told(tracer: str, saw: list[str], tmp_path: Path) -> None:
    """The system counts what numpy writes inside libc, where dftracer is blind."""
    program = "import sys, numpy\nnumpy.save(sys.argv[1], numpy.zeros(1 << 19))"
    ended = _record(tmp_path, "--", sys.executable, "-c", program, str(tmp_path / "a.npy"), tracer=tracer)
    assert ended.returncode == 0, ended.stderr
    notes = run_command("trace", "summary", tmp_path / "t", "--json").document["notes"]
    told = [note for note in notes if "have written through files" in note]
    assert len(told) == bool(saw)
    assert all(part in told[0] for part in saw)


@needs_dftracer
def test_hashes_that_a_forked_worker_leaves_unexplained_are_named_by_its_parent(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    program = ("--data", str(data), "--", sys.executable, str(PROGRAMS / "forked_reader.py"), str(data))
    ended = _record(tmp_path, *program, tracer="dftracer")
    assert ended.returncode == 0, ended.stderr
    assert "--tracer strace does" in ended.stderr
    (worker,) = (tmp_path / "t").glob("*-fork.pfw.gz")
    events = map(json.loads, gzip.decompress(worker.read_bytes()).splitlines()[1:-1])
    (value,) = {event["args"]["fhash"] for event in events if event["name"] == "read"}
    assert find_name_in_siblings(worker, "fhash", value) == str(data / "shared.bin")


@needs_strace
def test_profile_of_torch_and_a_recording_of_the_same_run_overlap(tmp_path: Path) -> None:
    """Both tell the same process by the same clock: what is computed while a file is written is overlap."""
    pytest.importorskip("torch")
    ended = _record(tmp_path, "--", sys.executable, str(PROGRAMS / "profiled_training.py"), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    main = (
        "SELECT host, pid FROM events WHERE cat = 'cpu_op' INTERSECT"
        " SELECT host, pid FROM events WHERE path LIKE '%/data.bin'"
    )
    with penstock.trace.load(tmp_path / "t") as run:
        assert len(run.sql(main).fetchall()) == 1
        first_us, last_us = run.sql("SELECT min(ts_us), max(end_us) FROM events").fetchall()[0]
        assert last_us - first_us < 280_000_000
    where = ("--where", "cat = 'cpu_op' OR path LIKE '%/data.bin'")
    (row,) = run_command("trace", "overlap", tmp_path / "t", *where, "--json").document["rows"]
    # The program writes from another thread for as long as it computes.
    assert row["overlap_us"] > 0
    assert row["overlap_us"] > 0.2 * row["compute_us"]


def test_bad_requests_are_refused_with_their_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no command to record"):
        plan_recording([], tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="strace is not installed"):
        plan_recording(["true"], tmp_path, tracer="strace")
    refused = _record(tmp_path, "--tracer", "ebpf", "--", "true")
    assert refused.returncode == 2
    assert "Choose from: auto, dftracer, strace" in refused.stderr


@needs_strace
@needs_dftracer
def test_dftracer_and_strace_agree_on_a_program_that_saves_checkpoints(tmp_path: Path) -> None:
    """Counts and bytes by operation and file, for all operations that dftracer sees of it."""
    pytest.importorskip("torch")
    told = {}
    for tracer in ("dftracer", "strace"):
        place = tmp_path / tracer
        (place / "data").mkdir(parents=True)
        program = (
            "--data",
            str(place / "data"),
            "--",
            sys.executable,
            str(PROGRAMS / "saving_checkpoints.py"),
        )
        ended = _record(place, *program, str(place / "data"), tracer=tracer)
        assert ended.returncode == 0, ended.stderr
        assert f"Tracing with {tracer}" in ended.stderr
        told[tracer] = _operations(place)
    seen = {op for op, _ in told["dftracer"]}
    assert seen >= {"open", "write", "close", "rename", "read", "lseek"}
    assert told["dftracer"] == {key: counts for key, counts in told["strace"].items() if key[0] in seen}
    saved = sum(path.stat().st_size for path in (tmp_path / "strace" / "data").glob("*.pt"))
    written = [
        counts[1] for (op, name), counts in told["dftracer"].items() if op == "write" and ".pt" in name
    ]
    assert sum(written) == saved


def _operations(place: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Events and bytes of each operation on each of the program's files."""
    query = (
        "SELECT op, parse_filename(path), count(*), coalesce(sum(size_bytes), 0) FROM events"
        f" WHERE path LIKE '{place}/data/%' GROUP BY ALL"
    )
    with penstock.trace.load(place / "t") as run:
        assert run.losses() == []
        for account in run.accounts:
            # An ending counts the events before it, not itself.
            assert account.announced_events in (None, account.events - 1)
        return {(op, name): (count, moved) for op, name, count, moved in run.sql(query).fetchall()}
