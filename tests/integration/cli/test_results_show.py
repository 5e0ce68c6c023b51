"""`penstock results` as people use it: ls, show, compare, on whole, half and foreign folders."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.command_line import CommandResult, run_command
from tests.support.run_events import RankScript

from penstock.cluster.gates.gate_model import Gate, GateFinding, GateVerdict, Preflight
from penstock.results.active_run import ActiveRun
from penstock.results.counter_files import IoReconciliation, ReconciliationVerdict
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.provenance import read_host
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings

PUBLISHED = Path(os.environ.get("PENSTOCK_MLPERF_RESULTS", "/nowhere"))


def penstock(*words: str) -> CommandResult:
    return run_command("results", *words, COLUMNS="80")


def finished_run(
    parent: Path,
    *settings: str,
    wait: float = 0.5,
    deliveries: Sequence[IoReconciliation] = (),
    preflight: Preflight | None = None,
) -> str:
    workload = load("unet3d_h100", overrides=parse_settings(settings)).workload
    script = RankScript()
    script.epoch()
    for _ in range(4):
        script.step(wait, 0.5, 0.01, samples=7, read_bytes=7 * 146600628, read=wait, decode=0.01)
    script.end_block()
    script.end_epoch()
    request = RunRequest(
        workload=workload, ranks=1, hosts=[read_host("n")], command=["x"], remarks=["A remark."],
        preflight=preflight,
    )  # fmt: skip
    with ActiveRun.start(parent, request) as run:
        run.finish(train=compute_phase_figures([script.events()], workload), deliveries=deliveries)
    return run.folder.name


KILLED_RUN = """
import sys, time
from pathlib import Path
from penstock.bench.recorded_run import StepRecorder, read_clocks
from penstock.results.step_events import StepPhase, SpanEvent, SpanKind, StepEvent
from penstock.results.active_run import ActiveRun
from penstock.results.run_record import RunRequest
from penstock.results.event_files import SpoolWriter, spool_path
from penstock.workload.load_workload import load

workload = load("unet3d_h100").workload
run = ActiveRun.start(Path(sys.argv[1]), RunRequest(workload=workload, ranks=1, hosts=[], command=["x"]))
with StepRecorder(SpoolWriter(spool_path(run.folder, 0), read_clocks(0, "n"))) as recorder:
    for number in (1, 2, 3):
        now = time.monotonic_ns()
        recorder.add_step(StepEvent(0, 1, 1, number, now, now + 100, now + 400, now + 410, 7, 99, 7, 90, 5))
    recorder.add_span(SpanEvent(SpanKind.BLOCK, StepPhase.TRAIN, 1, 1, 3, now - 1000, now + 500, 0))
    print(run.folder.name, flush=True)
    time.sleep(120)
"""


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path), finished_run(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    result = penstock("ls", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.index(second) < result.stdout.index(first)
    assert "AU 49.34 % (strict 50.00 %)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 90
    assert "broken" in result.stderr
    document = json.loads(penstock("ls", str(tmp_path), "--json").stdout)
    assert [run["id"] for run in document["runs"]] == [second, first]
    assert document["runs"][0]["bottleneck"] == "storage"
    assert len(document["unreadable"]) == 1


def test_empty_directory_lists_no_runs_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    result = penstock("ls", str(tmp_path))
    assert (result.returncode, result.stdout.strip()) == (0, f"No runs in {tmp_path}")
    result = penstock("ls", str(tmp_path / "absent"))
    assert result.returncode == 2
    assert "No such directory of runs" in result.stderr
    assert "Traceback" not in result.stderr


def test_one_run_is_shown_with_epochs_times_and_verdict(tmp_path: Path) -> None:
    name = finished_run(tmp_path)
    result = penstock("show", name, "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    for said in ("finished", "Epochs", "Times over all ranks", "Bottleneck: storage", "slowest rank"):
        assert said in result.stdout
    assert "A remark." in result.stderr
    document = json.loads(penstock("show", str(tmp_path / name), "--json").stdout)
    assert document["train"]["times"]["over_ranks"]["wait"]["p50_s"] == pytest.approx(0.5)
    assert document["settings"]["dataset.format"] == "npz"


def steady(text: str, parent: Path, *names: str) -> list[str]:
    """The lines of a printout without what differs from run to run: directories, ids and dates."""
    text = text.replace(str(parent), "PARENT")
    for number, name in enumerate(names, start=1):
        text = text.replace(name, f"RUN{number}")
    text = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.+]*\d", "DATE", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


DELIVERY = IoReconciliation(
    direction="read", application_bytes=2 << 30, delivered_bytes=1 << 30, by={"n nvme0": 1 << 30},
    verdict=ReconciliationVerdict.FAIL, why="half came from memory",
)  # fmt: skip
PREFLIGHT = Preflight(
    is_strict=False,
    cluster="unknown",
    findings=(
        GateFinding(gate=Gate.CLUSTER, verdict=GateVerdict.FAIL, found="Two kernels."),
        GateFinding(gate=Gate.CLOCK, verdict=GateVerdict.SKIPPED, found="Not asked."),
        GateFinding(gate=Gate.SPACE, verdict=GateVerdict.PASS, found="Enough."),
    ),
)


TRAINING_SHOWN = [
    "RUN1",
    "  workload                    unet3d_h100",
    "  started                     DATE",
    "  ranks                       1",
    "  outcome                     finished",
    "  AU as DLIO                  49.34",
    "  AU strict                   50.00",
    "  samples/s as DLIO           6.9",
    "  samples/s over all time     6.9",
    "  I/O as DLIO, nominal MiB/s  965.8",
    "  bytes really read           3.82 GiB, 969 MiB/s",
    "  folder                      PARENT/RUN1",
    "Epochs",
    " epoch    AU %   strict %   samples/s   samples       read     took",
    " ──────────────────────────────────────────────────────────────────",
    "     1   49.34      50.00         6.9        28   3.82 GiB   4.04 s",
    "Times over all ranks",
    " a step        p50       p90       p99       max   fastest rank   slowest rank",
    " ─────────────────────────────────────────────────────────────────────────────",
    " wait       500 ms    500 ms    500 ms    500 ms     500 ms (0)     500 ms (0)",
    " read       500 ms    500 ms    500 ms    500 ms     500 ms (0)     500 ms (0)",
    " decode    10.0 ms   10.0 ms   10.0 ms   10.0 ms    10.0 ms (0)    10.0 ms (0)",
    " compute    500 ms    500 ms    500 ms    500 ms     500 ms (0)     500 ms (0)",
    " barrier   10.0 ms   10.0 ms   10.0 ms   10.0 ms    10.0 ms (0)    10.0 ms (0)",
    "Bottleneck: storage",
    (
        "  Of the accelerators' time 49.5% was computation (90% is required), 49.5% waiting for samples, "
        "0.0% waiting for ranks whose samples came later, 1.0% other barriers, 0.0% between steps."
    ),
    "  Loaders spent 1.50 s reading and 30.0 ms decoding.",
    "  devices, read               1 GiB for 2 GiB of the application, by n nvme0",
    "                              FLAGGED: half came from memory",
    "  failed gates                cluster (fail)",
    "  skipped gates               clock",
]
TRAINING_LISTED = [
    "RUN1  finished",
    "  unet3d_h100, ranks 1, DATE, AU 49.34 % (strict 50.00 %), 6.9 samples/s",
]
CHECKPOINTS_SHOWN = [
    "RUN1",
    "  model                       llama3-8b",
    "  one checkpoint              1 GiB",
    "  at                          file:///ckpt",
    "  started                     DATE",
    "  ranks                       2",
    "  outcome                     finished",
    "  verified                    all right",
    "  gap before reads            2.50 s",
    "  folder                      PARENT/RUN1",
    "Checkpoints",
    "         checkpoints   bytes     took   GiB/s   mean of each      p99   held up by",
    " ─────────────────────────────────────────────────────────────────────────────────",
    " write             2   2 GiB   500 ms    4.00           4.25   3.0 ms   storage",
    " read              1   2 GiB   500 ms       -              -   3.0 ms   page cache",
]
WRONG_BYTES_SHOWN = [
    "RUN1",
    "  model                       llama3-8b",
    "  one checkpoint              1 GiB",
    "  at                          file:///ckpt",
    "  started                     DATE",
    "  ranks                       2",
    "  outcome                     finished",
    "  verified                    WRONG BYTES: see checkpoints.json",
    "  gap before reads            -",
    "  folder                      PARENT/RUN1",
    "Checkpoints",
    "         checkpoints   bytes     took   GiB/s   mean of each      p99   held up by",
    " ─────────────────────────────────────────────────────────────────────────────────",
    " write             2   2 GiB   500 ms    4.00           4.25   3.0 ms   storage",
]
CHECKPOINTS_LISTED = {
    True: "  unet3d_h100, ranks 2, DATE, written at 4.00 GiB/s",
    False: "  unet3d_h100, ranks 2, DATE, written at 4.00 GiB/s",
}
COMPARED = [
    "1: RUN1 (unet3d_h100, finished), PARENT/RUN1",
    "2: RUN2 (unet3d_h100, finished), PARENT/RUN2",
    "Not comparable: these runs differ in their request or their outcome.",
    "Requested differently",
    " key                 1   2",
    " ─────────────────────────",
    " reader.batch_size   7   9",
    "Set differently",
    " key                   1    2",
    " ────────────────────────────",
    " reader.read_threads   4   16",
    "Figures",
    " figure                             1                        2",
    " ─────────────────────────────────────────────────────────────",
    " au_compat_percent              49.34           65.50 (+32.8%)",
    " au_strict_percent              50.00           66.67 (+33.3%)",
    " samples_per_s_compat            6.91           11.79 (+70.7%)",
    " samples_per_s_strict            6.93            9.21 (+32.9%)",
    " io_compat_mib_per_s           965.79        1,648.41 (+70.7%)",
    " read_bytes             4,104,817,584    4,104,817,584 (+0.0%)",
    " read_bytes_per_s       1,016,043,956   1,350,268,942 (+32.9%)",
]


def test_a_training_run_is_printed_with_figures_devices_and_gates(tmp_path: Path) -> None:
    name = finished_run(tmp_path, deliveries=[DELIVERY], preflight=PREFLIGHT)
    shown = penstock("show", name, "--results", str(tmp_path))
    assert steady(shown.stdout, tmp_path, name) == TRAINING_SHOWN
    listed = penstock("ls", str(tmp_path))
    assert steady(listed.stdout, tmp_path, name) == TRAINING_LISTED
    document = penstock("show", name, "--results", str(tmp_path), "--json").document
    assert [delivery["why"] for delivery in document["deliveries"]] == ["half came from memory"]
    assert [finding["gate"] for finding in document["preflight"]["findings"]] == ["cluster", "clock", "space"]
    assert (document["checkpoint"], document["activity"]) == (None, [])


WRITES = {
    "checkpoints": 2, "bytes": 2 << 30, "duration_s": 0.5, "gib_per_s": 4.0, "mean_gib_per_s": 4.25,
    "p99_ms": 3.0, "bottleneck": "storage",
}  # fmt: skip


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_checkpoint_run_is_printed_with_its_directions(tmp_path: Path, is_whole: bool) -> None:  # noqa: FBT001 - a case
    request = RunRequest(workload=load("unet3d_h100").workload, ranks=2, hosts=[], command=["x"])
    with ActiveRun.start(tmp_path, request) as run:
        run.finish()
    reads = {
        **WRITES,
        "checkpoints": 1,
        "gib_per_s": None,
        "mean_gib_per_s": None,
        "bottleneck": "page cache",
    }
    figures = {
        "format": 1, "model": "llama3-8b", "target": "file:///ckpt", "checkpoint_bytes": 1 << 30,
        "write": WRITES, "read": reads if is_whole else None, "bottleneck": "storage",
        "is_right": is_whole, "gap_s": 2.5 if is_whole else None,
    }  # fmt: skip
    (run.folder / "checkpoints.json").write_text(json.dumps(figures))
    name = run.folder.name
    shown = steady(penstock("show", name, "--results", str(tmp_path)).stdout, tmp_path, name)
    listed = steady(penstock("ls", str(tmp_path)).stdout, tmp_path, name)
    assert (shown, listed[1:]) == (
        CHECKPOINTS_SHOWN if is_whole else WRONG_BYTES_SHOWN,
        [CHECKPOINTS_LISTED[is_whole]],
    )
    document = penstock("show", name, "--results", str(tmp_path), "--json").document
    assert (document["bottleneck"], document["checkpoint"]["is_right"]) == ("storage", is_whole)


def test_runs_that_differ_in_their_request_are_printed_with_what_differs(tmp_path: Path) -> None:
    first = finished_run(tmp_path)
    second = finished_run(tmp_path, "reader.batch_size=9", "reader.read_threads=16", wait=0.25)
    compared = penstock("compare", first, second, "--results", str(tmp_path))
    assert steady(compared.stdout, tmp_path, first, second) == COMPARED


def test_killed_run_is_interrupted_and_shows_its_complete_blocks(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        name = running.stdout.readline().strip()
        before = json.loads(penstock("show", name, "--results", str(tmp_path), "--json").stdout)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait(timeout=30)
    assert before["outcome"] == "running"
    after = json.loads(penstock("show", name, "--results", str(tmp_path), "--json").stdout)
    assert (after["outcome"], after["why"]) == ("interrupted", "Its process is gone.")
    assert after["train"]["au_strict_percent"]["mean"] == pytest.approx(75.0)
    assert after["train"]["read_bytes"] == 3 * 99


def test_a_run_without_events_is_shown_without_figures(tmp_path: Path) -> None:
    request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["x"])
    with ActiveRun.start(tmp_path, request) as run:
        pass
    result = penstock("show", str(run.folder))
    assert result.returncode == 0
    assert "It ended without figures." in result.stdout
    assert "no step events" in result.stderr
    assert json.loads(penstock("show", str(run.folder), "--json").stdout)["train"] is None


def test_runs_of_the_same_request_are_compared(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path), finished_run(tmp_path, "reader.read_threads=16", wait=0.25)
    result = penstock("compare", first, second, "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Not comparable" not in result.stdout
    assert "reader.read_threads" in result.stdout
    assert "(+33.3%)" in result.stdout
    document = json.loads(penstock("compare", first, second, "--results", str(tmp_path), "--json").stdout)
    assert document["is_comparable"] is True
    assert [each["key"] for each in document["varied"]] == ["reader.read_threads"]


def test_probes_and_runs_of_caches_show_their_own_figures(tmp_path: Path) -> None:
    store, results = f"direct://{tmp_path}/store", ["--results", str(tmp_path / "runs")]
    sizes = ["--size", "4MiB", "--blocks", "1MiB"]
    for words in (
        ["storage", "probe", store, "--streams", "1", *sizes, *results],
        ["storage", "probe", store, "--streams", "2", *sizes, *results],
        ["kvcache", "run", "--to", store, "--requests", "20", "--scale", "1/1000", *results],
    ):
        done = run_command(*words)
        assert done.returncode == 0, done.stderr
    listed = penstock("ls", results[1]).stdout
    assert len(re.findall(r"written at [\d.]+ GiB/s, read at [\d.]+ GiB/s", listed)) == 3
    assert "AU" not in listed
    runs = {path.name: path for path in (tmp_path / "runs").iterdir() if path.name != ".penstock"}
    for name, path in runs.items():
        assert (path / "report.html").is_file()
        assert penstock("page", str(path)).returncode == 0
        shown = penstock("show", str(path)).stdout
        assert "GiB/s" in shown
        assert "Bottleneck" not in shown
        assert "AU" not in shown
        measured = json.loads(penstock("show", str(path), "--json").stdout)["measured"]
        assert measured["measurements" if "probe" in name else "read"]
    compared = json.loads(
        penstock("compare", *sorted(n for n in runs if "probe" in n), *results, "--json").stdout
    )
    assert [one["key"] for one in compared["obstacles"]] == ["streams"]
    assert {delta["figure"] for delta in compared["deltas"] if delta["values"][0]} == {
        "write_gib_per_s", "read_gib_per_s",
    }  # fmt: skip


def test_reasons_against_a_comparison_come_first(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path), finished_run(tmp_path, "reader.batch_size=9")
    result = penstock("compare", first, second, "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    said = result.stdout
    assert said.index("Not comparable") < said.index("reader.batch_size") < said.index("au_compat_percent")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "nothing"), 2, "No such directory of runs"),
        (("compare", "one"), 2, "at least two"),
        (("show", "nothing", "--results", "/tmp"), 2, "No run is called 'nothing'"),
    ],
)
def test_missing_run_is_an_error(words: tuple[str, ...], code: int, said: str) -> None:
    result = penstock(*words)
    assert result.returncode == code
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["ls", "show", "compare", "rm"])
def test_every_verb_shows_examples_and_offers_json(verb: str) -> None:
    result = penstock(verb, "--help")
    assert "Examples:" in result.stdout
    assert "--json" in result.stdout


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="PENSTOCK_MLPERF_RESULTS names no published results")
def test_published_runs_of_dlio_are_listed_shown_and_compared() -> None:
    folders = sorted({path.parent.parent for path in PUBLISHED.rglob("summary.json")})
    for folder in folders:
        document = json.loads(penstock("ls", str(folder), "--json").stdout)
        assert len(document["runs"]) == 5
        assert document["unreadable"] == []
    result = penstock("compare", *(str(path) for path in sorted(folders[0].glob("run*"))))
    assert result.returncode == 0, result.stderr
    assert "Not comparable" not in result.stdout
