"""F10: which part of a loop differs between two runs, by how much, and why it waits for data."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.trace_studies import small_study

from penstock.trace.compare.findings import changed_loop, measure_loops
from penstock.trace.compare.trace_study import TraceFinding

MIB = 1 << 20


def loop(
    run: str,
    *,
    read: int = 50,
    read_bytes: int = MIB,
    steps: int = 10,
    ranks: int = 1,
    **given: int,
) -> list[dict[str, Any]]:
    """A run whose every step has parts of these microseconds, and a read beside them."""
    rows: list[dict[str, Any]] = []
    parts = {"wait": 0, "compute": 100, "barrier": 0, **given}
    for rank in range(ranks):
        now = 0
        for step in range(steps):
            rows.append({
                "run": run, "rank": rank, "pid": rank, "ts_us": now, "name": "pread64", "dur_us": read,
                "size_bytes": read_bytes, "path": f"/fast/f-{step}.npz",
            })  # fmt: skip
            for cat, dur_us in parts.items():
                rows.append({
                    "run": run, "rank": rank, "pid": rank, "ts_us": now, "dur_us": dur_us, "cat": cat,
                    "name": f"train.{cat}", "step": step, "epoch": 1,
                })  # fmt: skip
                now += dur_us
    return rows


def found(*runs: Sequence[dict[str, Any]]) -> list[TraceFinding]:
    with small_study([row for rows in runs for row in rows]) as study:
        return changed_loop(study)


def test_equal_loops_have_no_finding() -> None:
    assert found(loop("base"), loop("new")) == []
    assert found(loop("base", wait=100), loop("new", wait=101)) == []


def test_runs_that_recorded_no_loop_have_no_finding() -> None:
    reads = [{"run": run, "name": "read", "path": "/fast/x", "dur_us": 10} for run in ("base", "new")]
    assert found(reads) == []
    assert found(loop("base"), reads[1:]) == []
    assert found(reads[:1], loop("new")) == []


def test_less_computation_is_named_as_what_no_longer_hides_reading() -> None:
    (finding,) = found(loop("base", wait=1, compute=100), loop("new", wait=51, compute=10))
    assert finding.title == "new: waiting for data takes 500 us more than in base"
    assert (finding.code, finding.weight.value, finding.lost_us) == ("F10", "cost", 500)
    assert (
        "waiting for data 510 us, not 10.0 us (+0.001 s); on computing 100 us, not 1.00 ms" in finding.says[0]
    )
    assert finding.says[-1].endswith("there is less computation to hide them behind.")


def test_slower_reads_are_named_as_the_cause_of_waiting() -> None:
    (finding,) = found(loop("base", wait=1), loop("new", wait=60, read=150))
    assert finding.lost_us == 590
    assert finding.says[-1].endswith("Reads are slower: 150 us per call of equal size, not 50.0 us.")
    reading = finding.evidence.records()[-1]
    assert (reading["part"], reading["here_us"], reading["base_us"]) == (
        "reading, at the same time",
        1500,
        500,
    )


def test_fewer_reads_at_a_time_are_no_slower_reads() -> None:
    base = loop("base", wait=1, read_bytes=MIB)
    second = [{**row, "tid": 2} for row in base if row["name"] == "pread64"]
    (finding,) = found(base, second, loop("new", wait=60, read_bytes=MIB))
    assert "19.5 GiB/s); in base for 500 us (20 MiB at 39.1 GiB/s)" in finding.says[-1]
    assert "slower" not in finding.says[-1]


def test_waiting_without_io_is_told() -> None:
    (finding,) = found(loop("base", wait=1), loop("new", wait=400))
    assert "No I/O was under way for 3.50 ms of the waiting" in finding.says[-1]


def test_the_body_of_a_step_is_no_computation() -> None:
    def steps(run: str, saved: int) -> list[dict[str, Any]]:
        rows = []
        for step in range(10):
            at = 1000 * step
            spans = [("loop.wait", "wait", at, 100), ("loop.step", "step", at + 100, 900),
                     ("fit", "compute", at + 200, 300), ("forward", "compute", at + 210, 100),
                     ("all_reduce", "barrier", at + 400, 50),
                     ("save", "checkpoint", at + 600, saved)]  # fmt: skip
            rows += [
                {"run": run, "rank": 0, "pid": 0, "name": name, "cat": cat, "ts_us": ts_us, "dur_us": dur_us}
                for name, cat, ts_us, dur_us in spans
            ]
        return rows

    with small_study([*steps("base", 100), *steps("new", 350)]) as study:
        num_steps, spent = measure_loops(study)["new"]
        (finding,) = changed_loop(study)
    assert num_steps == 10
    assert {name: us for name, us in spent.items() if us} == {
        "waiting for data": 1000, "computing": 2500, "waiting for other ranks": 500, "checkpointing": 3500,
        "the rest of each step": 2500,
    }  # fmt: skip
    assert finding.title == "new: checkpointing takes 2.50 ms more than in base"


def test_computing_of_workers_and_saves_of_other_threads_are_none_of_the_loop() -> None:
    rows = loop("base", wait=10)
    worker = {**rows[0], "pid": 7, "name": "decode", "cat": "compute", "dur_us": 900}
    saving = {**rows[0], "tid": 9, "name": "save", "cat": "checkpoint", "dur_us": 900, "path": None}
    with small_study([*rows, worker, saving], runs=("base",)) as study:
        _, spent = measure_loops(study)["base"]
    assert (spent["computing"], spent.get("checkpointing")) == (1000, None)


def test_more_to_read_is_named_as_the_cause_of_waiting() -> None:
    (finding,) = found(loop("base", wait=1), loop("new", wait=60, read=100, read_bytes=2 * MIB))
    assert finding.says[-1].endswith("There is more to read.")


@pytest.mark.parametrize(
    ("part", "name"),
    [("compute", "computing"), ("barrier", "waiting for other ranks"), ("stall", "checkpointing")],
)
def test_every_part_of_a_loop_can_be_what_differs(part: str, name: str) -> None:
    parts: dict[str, Any] = {part: 300}
    (finding,) = found(loop("base", compute=200), loop("new", **{"compute": 200, **parts}))
    assert f"new: {name} takes" in finding.title
    assert finding.evidence.records()[0]["part"] == name
    assert len(finding.says) == 1


def test_parts_are_ranked_by_the_seconds_they_lost() -> None:
    (finding,) = found(loop("base"), loop("new", wait=20, stall=90, compute=50))
    lost = [row["lost_us"] for row in finding.evidence.records() if "reading" not in str(row["part"])]
    assert lost == [900, 200, -500]
    assert finding.title.startswith("new: checkpointing takes 900 us more")


def test_a_faster_run_is_a_note_that_names_what_it_saves() -> None:
    (finding,) = found(loop("base", wait=80), loop("new", wait=5))
    assert finding.title == "new: waiting for data takes 750 us less than in base"
    assert (finding.weight.value, finding.lost_us) == ("note", None)


def test_runs_of_other_lengths_are_compared_over_equal_steps() -> None:
    assert found(loop("base", wait=10), loop("new", wait=10, steps=20)) == []
    (finding,) = found(loop("base", wait=10), loop("new", wait=40, steps=20))
    assert finding.lost_us == 20 * 30
    assert "base took 10 steps; its seconds are scaled to as many." in finding.says


def test_seconds_are_those_of_an_average_rank() -> None:
    (finding,) = found(loop("base", ranks=2), loop("new", wait=50, ranks=4))
    assert finding.lost_us == 500


def test_a_program_that_records_saves_and_no_stalls_waits_as_long_as_they_last() -> None:
    def saves(run: str, dur_us: int) -> list[dict[str, Any]]:
        return [{"run": run, "rank": 0, "pid": 0, "name": "save", "cat": "checkpoint", "dur_us": dur_us}]

    (finding,) = found(loop("base"), saves("base", 10), loop("new"), saves("new", 300))
    assert finding.title == "new: checkpointing takes 290 us more than in base"
