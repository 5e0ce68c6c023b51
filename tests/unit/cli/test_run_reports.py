"""What a person reads of a benchmark run, letter by letter: figures, what is left out, what is flagged."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.bench.checkpoint.checkpoint_result import (
    CheckpointResult,
    CheckpointRound,
    Direction,
    RoundFigures,
)
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.page_cache_eviction import CacheEviction
from penstock.bench.training.training_result import Stages, TrainingResult
from penstock.cli.run_reports import (
    capture_checkpoint_output,
    capture_training_output,
    checkpoint_warnings,
    reconciliation_lines,
    reconciliation_notes,
    view_checkpoints,
    view_training,
)
from penstock.cli.terminal import View, render_text
from penstock.results.counter_files import IoReconciliation, ReconciliationVerdict
from penstock.results.phase_figures import Bottleneck, BottleneckVerdict, EpochRate, Mean, PhaseFigures
from penstock.storage import Counters
from penstock.transfer.ledger import PipelineFigures, WrongByte

GIB = 1 << 30


def lines(view: View) -> list[str]:
    return [line.rstrip() for line in render_text(view).splitlines() if line.strip()]


READ = IoReconciliation(
    direction="read",
    application_bytes=2 * GIB,
    delivered_bytes=GIB,
    by={"n1 a": 1, "n1 b": 5, "n1 c": 4, "n1 d": 3},
    verdict=ReconciliationVerdict.FAIL,
    why="half of it came from memory",
)
PASSED = replace(READ, verdict=ReconciliationVerdict.PASS)
MOVED = "1 GiB for 2 GiB of the application"


@pytest.mark.parametrize(
    ("reconciliation", "expected"),
    [
        (
            READ,
            [
                ("devices, read", f"{MOVED}, by n1 b, n1 c, n1 d, n1 a"),
                ("", "FLAGGED: half of it came from memory"),
            ],
        ),
        (
            replace(PASSED, by={**READ.by, "n2 a": 9, "n2 b": 2}),
            [("devices, read", f"{MOVED}, by n2 a, n1 b, n1 c, n1 d and 2 more")],
        ),
        (
            replace(
                READ, direction="write", by={}, verdict=ReconciliationVerdict.WARNING, why="more than asked"
            ),
            [("devices, write", MOVED), ("", "warning: more than asked")],
        ),
        (
            replace(READ, delivered_bytes=None, verdict=ReconciliationVerdict.NOT_CHECKED, why="no counter"),
            [("devices, read", "not checked: no counter")],
        ),
    ],
)
def test_device_bytes_are_shown_beside_those_of_the_application(
    reconciliation: IoReconciliation, expected: list[tuple[str, str]]
) -> None:
    assert list(reconciliation_lines([reconciliation])) == expected


def test_only_failed_reconciliations_qualify_the_figures() -> None:
    passed = replace(READ, verdict=ReconciliationVerdict.WARNING)
    assert reconciliation_notes([passed, READ]) == [
        "Not all bytes came from storage: half of it came from memory"
    ]


EPOCH = EpochRate(
    epoch=1, au_compat_percent=91.234, au_strict_percent=88.0, samples_per_s_compat=1300.0,
    samples_per_s_strict=1234.56, samples=2400, read_bytes=3 * GIB, elapsed_s=2.0,
)  # fmt: skip
TRAIN = PhaseFigures(
    epochs=(EPOCH,),
    au_compat_percent=Mean(mean=91.234, stdev=0.0),
    au_strict_percent=Mean(mean=88.0, stdev=0.0),
    samples_per_s_compat=Mean(mean=1300.0, stdev=0.0),
    samples_per_s_strict=1234.56,
    io_compat_mib_per_s=Mean(mean=1.0, stdev=0.0),
    read_bytes=3 * GIB,
    read_bytes_per_s=1.5 * GIB,
    meets_threshold=True,
    times=None,
    verdict=BottleneckVerdict(bottleneck=Bottleneck.STORAGE, evidence=("Ranks wait.", "Reads are slow.")),
    notes=("The first step is left out.",),
)
STAGES = Stages(
    opening_s=0.1, validated_files=4, validation_s=0.1, planning_s=0.1,
    loader=NativeOptions(), loader_start_s=0.1,
    ceiling={"steps": 9, "au_compat": 99.5, "au_strict": None, "samples_per_s": 2.0},
    ceiling_s=0.5, epochs=(), survey_bytes=0, storage_uri="file:///data", storage_options={},
    checkpoints={
        "checkpoints": 3, "bytes_each": GIB, "duration_s": 2.0, "gib_per_s": 1.5, "target": "file:///ckpt"
    },
    counters=Counters(), deliveries=(READ,), remarks=("About the files.",),
)  # fmt: skip
RESULT = TrainingResult(
    workload="unet3d_h100", ranks=2, results_dir="/results/run", train=TRAIN, evaluation=None, stages=STAGES
)


def test_a_training_run_is_reported_with_all_its_figures() -> None:
    assert lines(view_training(RESULT)) == [
        "unet3d_h100, 2 accelerators",
        " epoch    AU %   strict %   samples/s   samples    read     took",
        " ───────────────────────────────────────────────────────────────",
        "     1   91.23      88.00     1,234.6     2,400   3 GiB   2.00 s",
        "  verdict   DOUBTFUL",
        "  AU        91.23 % by DLIO's formula, 88.00 % strictly",
        "  read      3 GiB, 1.50 GiB/s, 1,234.6 samples/s",
        "  devices, read   1 GiB for 2 GiB of the application, by n1 b, n1 c, n1 d, n1 a",
        "                  FLAGGED: half of it came from memory",
        "  note      The first step is left out.",
        "  harness   AU 99.50 % on storage that costs nothing",
        "  limit     storage",
        "            Ranks wait.",
        "            Reads are slow.",
        "  saved     3 checkpoints of 1 GiB, 1.50 GiB/s",
        "  results   /results/run",
    ]


def test_what_a_training_run_lacks_is_left_out() -> None:
    epoch = replace(EPOCH, au_strict_percent=None)
    train = replace(TRAIN, epochs=(epoch,), au_strict_percent=None, verdict=None, notes=())
    stages = replace(STAGES, ceiling=None, checkpoints=None, deliveries=())
    assert lines(view_training(replace(RESULT, ranks=1, train=train, stages=stages))) == [
        "unet3d_h100, 1 accelerator",
        " epoch    AU %   strict %   samples/s   samples    read     took",
        " ───────────────────────────────────────────────────────────────",
        "     1   91.23          -     1,234.6     2,400   3 GiB   2.00 s",
        "  verdict   NO FIGURE",
        "  AU        91.23 % by DLIO's formula, - strictly",
        "  read      3 GiB, 1.50 GiB/s, 1,234.6 samples/s",
        "  results   /results/run",
    ]


def test_a_harness_limit_that_the_run_exceeded_does_not_count() -> None:
    stages = replace(STAGES, ceiling={"steps": 9, "au_compat": 88.2, "au_strict": None, "samples_per_s": 2.0})
    shown = lines(view_training(replace(RESULT, stages=stages)))
    said = "  harness   AU 88.20 % on storage that costs nothing: does not count, the run exceeded it"
    assert said in shown


def test_checkpoints_without_a_rate_are_counted_all_the_same() -> None:
    saved = {**(STAGES.checkpoints or {}), "gib_per_s": None}
    shown = lines(view_training(replace(RESULT, stages=replace(STAGES, checkpoints=saved))))
    assert "  saved     3 checkpoints of 1 GiB" in shown


def test_the_logs_of_a_training_run_hold_its_report_and_its_remarks() -> None:
    logs = capture_training_output(RESULT, ["A remark."])
    assert logs[0] == render_text(view_training(RESULT))
    assert logs[1] == "A remark.\nAbout the files.\n"


def phase(direction: Direction, duration_s: float, wrong_chunks: int = 0) -> PipelineFigures:
    return PipelineFigures(
        direction=direction, ranks=1, moved_bytes=GIB, verified_bytes=0, wrong_bytes=wrong_chunks,
        duration_s=duration_s, gib_per_s=1 / duration_s, mean_gib_per_s=1 / duration_s,
        min_gib_per_s=1 / duration_s, max_duration_s=duration_s, setup_s=0.1, pipeline_s=duration_s - 0.5,
        drain_s=0.5, storage_busy_s=duration_s / 2, content_busy_s=duration_s / 4, call_time_sum_s=3.0,
        content_stall_s=0.5, storage_stall_s=0.25, overhead_percent=10.0,
        latencies_ns=np.full(3, 2_250_000),
        bottleneck="storage", slowest_rank=0, streams=(), counters=Counters(),
    )  # fmt: skip


def figures(
    direction: Direction, number: int, duration_s: float, *, resident_bytes: int = 0, wrong_chunks: int = 0
) -> RoundFigures:
    cold = CacheEviction(path="page cache dropped", resident_bytes=resident_bytes, total_bytes=1000)
    return RoundFigures(
        round=CheckpointRound(direction=direction, number=number, step=100 * number),
        began_at_s=0.0,
        ended_at_s=duration_s,
        phase=phase(direction, duration_s, wrong_chunks),
        cold=cold if direction == "read" else None,
        wrong=(WrongByte(key="rank0/w", offset=12345),) if wrong_chunks else (),
    )


CHECKPOINTS = CheckpointResult(
    model="llama3-8b", ranks=1, results_dir="/results/run", target="file:///ckpt", total_bytes=GIB, seed=1,
    full_bytes=GIB,
    rounds=(figures("write", 1, 1.0), figures("write", 2, 4.0), figures("read", 1, 2.0)),
    gap_s=1.25, earlier=None, shift=0, storage_options={}, peak_rss_bytes=(1,), deliveries=(READ,),
)  # fmt: skip


def test_a_checkpoint_run_is_reported_with_all_its_figures() -> None:
    assert lines(view_checkpoints(CHECKPOINTS)) == [
        "1 GiB a checkpoint of llama3-8b, at file:///ckpt",
        "         bytes     took   GiB/s   each   content    drain      p99",
        " ─────────────────────────────────────────────────────────────────",
        " write   2 GiB   5.00 s    0.40   0.62      1.60   1.00 s   2.2 ms",
        " read    1 GiB   2.00 s    0.50   0.50      2.00   500 ms   2.2 ms",
        "Bottleneck: write storage, read storage",
        "Verdict: DOUBTFUL",
        "  GiB/s: all bytes over all time; each: mean of checkpoints; content: making or verifying it",
        "  1.2 s between the last write and the first read",
        "  devices, read   1 GiB for 2 GiB of the application, by n1 b, n1 c, n1 d, n1 a",
        "                  FLAGGED: half of it came from memory",
        "  results: /results/run",
    ]


def test_a_scaled_checkpoint_says_how_long_a_whole_one_would_take() -> None:
    scaled = replace(CHECKPOINTS, full_bytes=100 * GIB)
    [line] = [line for line in lines(view_checkpoints(scaled)) if "whole checkpoint" in line]
    assert line == (
        "  a whole checkpoint, 100 GiB, would take 4 min 10 s to write and 3 min 20 s to read at these rates "
        "(extrapolated from files of 0.01 of their size)"
    )
    assert scaled.document()["at_full_size"] == {"bytes": 100 * GIB, "write_s": 250.0, "read_s": 200.0}


def test_a_checkpoint_run_without_reads_has_one_row_and_no_gap() -> None:
    shown = lines(
        view_checkpoints(replace(CHECKPOINTS, rounds=CHECKPOINTS.rounds[:2], gap_s=None, deliveries=()))
    )
    assert [line.split()[0] for line in shown if line.strip().startswith(("write", "read"))] == ["write"]
    assert not any("between the last write" in line for line in shown)


def test_a_resumed_checkpoint_run_names_the_run_whose_checkpoints_it_kept() -> None:
    earlier = {"run_folder": "/results/first", "kept_steps": (1, 2)}
    shown = lines(view_checkpoints(replace(CHECKPOINTS, earlier=earlier)))
    assert "  kept 2 checkpoints of an earlier run: `penstock results show /results/first`" in shown


def test_right_bytes_from_cold_storage_need_no_warning() -> None:
    assert checkpoint_warnings(replace(CHECKPOINTS, deliveries=())) == []


def test_wrong_bytes_and_reads_from_the_page_cache_are_warned_of() -> None:
    rounds = (
        figures("write", 1, 1.0),
        figures("read", 1, 1.0, resident_bytes=500),
        figures("read", 2, 1.0, resident_bytes=250, wrong_chunks=3),
        figures("read", 3, 1.0),
    )
    result = replace(CHECKPOINTS, rounds=rounds)
    assert checkpoint_warnings(result) == [
        (
            "Checkpoint 200: 3 chunks do not hold the bytes that were written, "
            "the first at byte 12,345 of rank0/w"
        ),
        (
            "2 of 3 reads came from the page cache: up to 50% of the bytes stayed in memory after cache "
            "eviction. They do not measure storage; direct:// bypasses the page cache"
        ),
        "Not all bytes came from storage: half of it came from memory",
    ]
    logs = capture_checkpoint_output(result)
    assert logs[1].splitlines() == checkpoint_warnings(result)
    assert logs[0] == render_text(view_checkpoints(result))
