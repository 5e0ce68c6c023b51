"""What a study says of its rows, from a few handmade events."""

from typing import Any

from tests.support.trace_studies import small_study

from penstock.trace.compare.trace_study import FindingRule, TraceFinding, Weight
from penstock.workflows.levels_study.study_findings import (
    cache_pays_off,
    flush_costs_training,
    flush_rates,
    redundancy_costs,
)
from penstock.workflows.levels_study.study_plan import SAVE_EVENT, STEP_EVENT

RUNS = ("direct_slow", "cached_flushed", "cached", "single", "single_flushed")


def span(run: str, name: str, dur_us: int, *, rank: int = 0, ts_us: int = 0) -> dict[str, Any]:
    cat = "compute" if name == STEP_EVENT else "checkpoint"
    return {"run": run, "name": name, "op": name, "cat": cat, "rank": rank, "ts_us": ts_us, "dur_us": dur_us}


def write(run: str, ts_us: int, dur_us: int, size_bytes: int) -> dict[str, Any]:
    call = {"name": "pwrite64", "op": "pwrite", "cat": "POSIX", "path": "/slow/file"}
    return {"run": run, **call, "rank": 0, "ts_us": ts_us, "dur_us": dur_us, "size_bytes": size_bytes}


def found_by(rule: FindingRule, rows: list[dict[str, Any]], **asked: Any) -> list[TraceFinding]:
    runs = [run for run in RUNS if run in {row["run"] for row in rows}]
    with small_study(rows, runs=runs, **asked) as study:
        return rule(study)


def test_a_cache_pays_off_or_not_by_what_the_slowest_rank_waited() -> None:
    rows = [span("direct_slow", SAVE_EVENT, 1000), span("direct_slow", SAVE_EVENT, 3000, rank=1)]
    rows += [span("single", SAVE_EVENT, 1500), span("cached", SAVE_EVENT, 3000)]
    (finding,) = found_by(cache_pays_off, rows)
    assert finding.weight is Weight.COST
    assert finding.title == "cached: caching cost more than it saved"
    assert "single: training waited 1.50 ms for 1 checkpoints, 50% of what direct_slow cost" in str(
        finding.says
    )
    assert finding.says[0].endswith("the cache did not pay off.")
    assert finding.says[1].endswith("the cache paid off.")
    assert [row[2] for row in finding.evidence.rows] == [3000, 3000, 1500]


def test_cache_finding_needs_a_row_without_a_cache() -> None:
    assert found_by(cache_pays_off, [span("single", SAVE_EVENT, 1500)]) == []


def test_a_flush_costs_what_steps_and_saves_beside_it_take_longer() -> None:
    rows = [span(run, SAVE_EVENT, 1000) for run in ("single", "single_flushed")]
    rows += [span("single", STEP_EVENT, 100_000, ts_us=at) for at in range(10)]
    rows += [span("single_flushed", STEP_EVENT, 110_000, ts_us=at) for at in range(10)]
    (finding,) = found_by(flush_costs_training, rows)
    assert finding.weight is Weight.COST
    assert "110 ms beside the flush of single_flushed" in finding.says[0]
    assert "+10.0%, or +0.10 s over 10 steps" in finding.says[0]
    assert finding.evidence.records()[0]["stall_us"] == 100_000


def test_flush_without_effect_on_training_is_a_note() -> None:
    rows = [span(run, SAVE_EVENT, 1000) for run in ("single", "single_flushed")]
    rows += [span(run, STEP_EVENT, 100_000) for run in ("single", "single_flushed")]
    (finding,) = found_by(flush_costs_training, rows)
    assert finding.weight is Weight.NOTE


def test_redundancy_costs_what_protected_saves_wait_longer() -> None:
    rows = [span("single", SAVE_EVENT, 1_000_000), span("cached", SAVE_EVENT, 1_500_000)]
    (finding,) = found_by(redundancy_costs, rows)
    assert finding.says == ["Protected saves waited 1.50 s, single copies 1.00 s: +50%."]
    assert found_by(redundancy_costs, rows[:1]) == []


def test_a_flush_has_its_rate_over_the_time_in_which_it_was_at_work() -> None:
    rows = [
        write("single_flushed", 0, 500_000, 50_000_000),
        write("single_flushed", 250_000, 250_000, 10_000_000),
        write("single_flushed", 9_000_000, 500_000, 40_000_000),
    ]
    (finding,) = found_by(flush_rates, rows, device_rates={"slow": "200MB/s"})
    assert finding.evidence.rows[0][1:3] == (100_000_000, 1_000_000)
    assert "50% of its" in finding.says[0]
    (unlimited,) = found_by(flush_rates, rows)
    assert " of its " not in unlimited.says[0]
