"""The study of levels, small and whole: all rows on ranks of gloo, their traces, and what is said of them."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.bench.state_layout import LayoutRequest, StateLayout, plan_layout
from penstock.cluster.comm import Comm, SoloComm
from penstock.errors import PenstockError, Unavailable, UsageError
from penstock.workflows.levels_study.study import StudyResult, require_libraries, require_memory
from penstock.workflows.levels_study.study_plan import SaveMode, StudyRequest, list_rows
from penstock.workload.load_workload import load_model

NUM_RANKS = 2
NUM_CHECKPOINTS = 2
PARITY_EVERY = 2
EIGHT_ROWS = [row.name for row in list_rows(NUM_RANKS, parity_every=PARITY_EVERY)]


@dataclass(frozen=True)
class Told:
    """What crosses from rank 0's process: a result as plain values."""

    rows: dict[str, dict[str, Any]]
    tables: dict[str, list[dict[str, Any]]]
    findings: list[tuple[str, str, list[str]]]
    report: list[Path]


def layout_for(ranks: int) -> StateLayout:
    model = load_model("llama3-8b")
    return plan_layout(LayoutRequest(model=model, num_processes=ranks, scale=Fraction(1, 20_000)))


def asked(folder: Path, **changes: Any) -> StudyRequest:
    request = StudyRequest(
        model="llama3-8b",
        layout=layout_for(NUM_RANKS),
        scale=Fraction(1, 20_000),
        fast=folder / "fast",
        slow=folder / "slow",
        out=folder / "out",
        slow_bytes_per_s=200e6,
        num_checkpoints=NUM_CHECKPOINTS,
        num_steps=1,
        step_s=0.001,
        parity_every=PARITY_EVERY,
    )
    return replace(request, **changes)


def play(request: StudyRequest) -> Told | None:
    """The study on this rank, one of a job that stands already or the only one."""
    import os

    import torch.distributed as dist

    from penstock.cluster.torch_comm import TorchComm
    from penstock.progress import Silent
    from penstock.workflows.levels_study.study import run_study

    comm: Comm = TorchComm("here") if dist.is_initialized() else SoloComm("here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    found = run_study(request, comm=comm, environment=environment, command=("test",), progress=Silent())
    return None if found is None else told_of(found)


def told_of(found: StudyResult) -> Told:
    return Told(
        rows={row.name: row.model_dump() for row in found.rows},
        tables={name: found.compared.table(name).records() for name in ("t0", "t1_measures", "t2")},
        findings=[(each.code, each.title, list(each.says)) for each in found.compared.findings],
        report=list(found.report),
    )


def play_on_rank(rank: int, request: StudyRequest) -> Told | None:
    return play(request)


def on_ranks(request: StudyRequest) -> Told:
    told = on_gloo_ranks(request.num_ranks, play_on_rank, request)
    assert told[1:] == [None] * (request.num_ranks - 1)
    assert isinstance(told[0], Told)
    return told[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyRequest, Told]:
    request = asked(tmp_path_factory.mktemp("study"))
    return request, on_ranks(request)


def of_tier(told: Told, table: str, tier: str) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in told.tables[table] if row["tier"] == tier}


def test_all_eight_rows_have_union_sum_and_concurrency(whole: tuple[StudyRequest, Told]) -> None:
    _, told = whole
    assert list(told.rows) == EIGHT_ROWS
    for row in told.tables["t1_measures"]:
        assert 0 < row["max_union_us"] <= row["max_sum_us"]
        assert row["concurrency"] >= 1
    assert {row["run"] for row in told.tables["t1_measures"]} == set(EIGHT_ROWS)


def test_each_row_writes_what_it_should_to_each_level(whole: tuple[StudyRequest, Told]) -> None:
    request, told = whole
    saved = NUM_CHECKPOINTS * request.layout.total_bytes
    fast, slow = of_tier(told, "t2", "fast"), of_tier(told, "t2", "slow")
    assert slow["direct_slow"]["written_bytes"] == fast["direct_fast"]["written_bytes"] == saved
    assert set(slow) == {"direct_slow", "cached_flushed", "bypass", "single_flushed", "interval_flushed"}
    assert set(fast) == set(EIGHT_ROWS) - {"direct_slow", "bypass"}
    # The engine adds gaps, envelopes, manifests: a few KiB a file, on files that are small here.
    for row in slow.values():
        assert saved <= row["written_bytes"] < 1.1 * saved
    for name in ("single", "single_flushed"):
        assert saved <= fast[name]["written_bytes"] < 1.15 * saved
    parity = saved / (NUM_RANKS - 1)
    for name in ("cached", "cached_flushed"):
        assert saved + parity <= fast[name]["written_bytes"] < 1.15 * (saved + parity)
    # Of two checkpoints one is protected.
    interval = fast["interval_flushed"]["written_bytes"]
    assert saved + parity / 2 <= interval < 1.15 * (saved + parity / 2)


def test_what_is_flushed_is_read_from_the_cache_once(whole: tuple[StudyRequest, Told]) -> None:
    _, told = whole
    fast = of_tier(told, "t2", "fast")
    read_to_flush = fast["single_flushed"]["read_bytes"] - fast["single"]["read_bytes"]
    assert read_to_flush == pytest.approx(of_tier(told, "t2", "slow")["bypass"]["written_bytes"], rel=0.05)


def test_every_rank_traces_every_row_and_nothing_is_lost(whole: tuple[StudyRequest, Told]) -> None:
    _, told = whole
    for row in told.tables["t0"]:
        assert (row["num_files"], row["num_ranks"], row["num_dropped"]) == (NUM_RANKS, NUM_RANKS, 0)


def test_findings_say_whether_the_cache_paid_off_and_what_the_flush_cost(
    whole: tuple[StudyRequest, Told],
) -> None:
    _, told = whole
    codes = [code for code, _, _ in told.findings]
    assert [codes.count(code) for code in ("S1", "S2", "S3", "S4")] == [1, 2, 1, 3]
    (verdicts,) = (says for code, _, says in told.findings if code == "S1")
    assert [said.partition(":")[0] for said in verdicts] == [
        "cached_flushed",
        "cached",
        "single",
        "single_flushed",
        "interval_flushed",
    ]
    assert all("paid off" in said or "did not pay off" in said for said in verdicts)


def test_a_study_leaves_its_report_and_nothing_on_the_levels(whole: tuple[StudyRequest, Told]) -> None:
    request, told = whole
    assert sorted(path.name for path in told.report) == ["report.html", "report.md", "tables.parquet"]
    assert "did not pay off" in told.report[0].read_text() or "paid off" in told.report[0].read_text()
    left = {path.name for path in request.out.iterdir()}
    assert left == {*EIGHT_ROWS, "runs.yaml", "study.json", "report.html", "report.md", "tables.parquet"}
    for level in (request.fast, request.slow):
        assert [path for path in level.rglob("*") if path.is_file()] == []


def test_rows_that_are_done_are_kept_and_an_interrupted_one_is_played_again(tmp_path: Path) -> None:
    alone = asked(
        tmp_path,
        layout=layout_for(1),
        names=("direct_slow", "direct_fast"),
        saving=SaveMode.BACKGROUND,
    )
    first = play(alone)
    assert first is not None
    (alone.out / "direct_fast" / "row.json").unlink()
    (alone.out / "direct_fast" / "traces" / "left.pfw.gz").write_bytes(b"of the interrupted one")
    again = play(replace(alone, names=("direct_slow", "direct_fast", "single")))
    assert again is not None
    assert list(again.rows) == ["direct_slow", "direct_fast", "single"]
    assert again.rows["direct_slow"] == first.rows["direct_slow"]
    assert again.rows["direct_fast"] != first.rows["direct_fast"]
    assert not (alone.out / "direct_fast" / "traces" / "left.pfw.gz").exists()


def test_a_folder_that_holds_another_study_is_refused(tmp_path: Path) -> None:
    alone = asked(tmp_path, layout=layout_for(1), names=("direct_fast",))
    play(alone)
    with pytest.raises(UsageError, match="another study: checkpoints was 2 and is now 4") as refused:
        play(replace(alone, num_checkpoints=4))
    assert "new folder" in str(refused.value)


def test_levels_without_room_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="Make room, or write fewer, or a smaller --scale"):
        play(asked(tmp_path, layout=a_million_times(layout_for(1)), names=("direct_fast",)))
    assert not (tmp_path / "fast").exists()


def test_a_state_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    huge = a_million_times(layout_for(1))
    with pytest.raises(UsageError, match="twice their state"):
        require_memory(asked(tmp_path, layout=huge), SoloComm("here"), ["here"])


@pytest.mark.parametrize("missing", ["torch", "duckdb"])
def test_a_study_says_before_it_saves_what_is_not_installed(missing: str) -> None:
    with pytest.raises(Unavailable, match=rf"{missing} is not installed.*penstock\[torch,trace\]"):
        require_libraries(lambda library: None if library == missing else library)


def a_million_times(layout: StateLayout) -> StateLayout:
    groups = tuple(replace(group, size_bytes=group.size_bytes * 10**6) for group in layout.groups)
    return replace(layout, groups=groups)
