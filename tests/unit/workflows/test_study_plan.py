"""The rows of a study, and what is refused before any of them is played."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.state_layout import LayoutRequest, StateLayout, plan_layout
from penstock.checkpoint.levels.options import check_schemes, scheme_for
from penstock.environment import TRACE
from penstock.errors import StorageError, UsageError
from penstock.workflows.levels_study.study_plan import (
    DEFAULT_TOTAL_BYTES,
    NUM_KEPT,
    SaveMode,
    StudyLevel,
    StudyRequest,
    check_request,
    choose_rows,
    default_scale,
    list_rows,
)
from penstock.workflows.levels_study.study_records import (
    ROW_FILE,
    RowRecord,
    StudyIdentity,
    begin_study,
    finish_row,
    read_row,
    read_study,
    require_same,
    row_folder,
)
from penstock.workload.load_workload import load_model


def layout_for(ranks: int) -> StateLayout:
    return plan_layout(
        LayoutRequest(model=load_model("llama3-8b"), num_processes=ranks, scale=Fraction(1, 1000))
    )


def asked(**changes: Any) -> StudyRequest:
    request = StudyRequest(
        model="llama3-8b",
        layout=layout_for(4),
        scale=Fraction(1, 1000),
        fast=Path("/local/fast"),
        slow=Path("/pfs/slow"),
        out=Path("/home/me/study"),
    )
    return replace(request, **changes)


@given(st.integers(2, 300), st.integers(2, 20))
def test_every_row_has_a_scheme_for_every_checkpoint(ranks: int, parity_every: int) -> None:
    for row in list_rows(ranks, parity_every=parity_every):
        if row.caching is not None:
            check_schemes(row.caching.schemes)
            for number in range(1, 2 * parity_every + 1):
                scheme = scheme_for(number, row.caching.schemes)
                assert scheme.members <= max(2, ranks)


def test_the_last_row_protects_only_every_so_manieth_checkpoint() -> None:
    last = list_rows(4, parity_every=3)[-1]
    assert last.caching is not None
    assert [scheme_for(number, last.caching.schemes).losses for number in range(1, 7)] == [0, 0, 1, 0, 0, 1]


def test_four_rows_end_on_the_slow_level_behind_a_cache_or_without_one() -> None:
    rows = list_rows(4, parity_every=3)
    assert len(rows) == len({row.name for row in rows}) == 8
    assert [row.name for row in rows if row.level is StudyLevel.SLOW] == ["direct_slow", "bypass"]
    assert [row.name for row in rows if row.reaches_slow and row.caching] == [
        "cached_flushed",
        "single_flushed",
        "interval_flushed",
    ]
    assert [row.name for row in rows if row.is_bare] == ["direct_slow", "direct_fast"]


def test_chosen_rows_keep_the_order_of_the_study_and_unknown_ones_are_named() -> None:
    rows = list_rows(4, parity_every=3)
    assert [row.name for row in choose_rows(("single", "direct_slow"), rows)] == ["direct_slow", "single"]
    assert choose_rows((), rows) == rows
    with pytest.raises(UsageError, match=r"no configuration 'cachd'.*Did you mean cached"):
        choose_rows(("cachd",), rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slow": Path("/local/fast")}, "overlap"),
        ({"slow": Path("/local/fast/below")}, "overlap"),
        ({"fast": Path("/pfs/slow/below")}, "overlap"),
        (
            {"layout": layout_for(1)},
            "interval_flushed, needs at least two ranks",
        ),
        ({"num_checkpoints": 2}, "None of 2 checkpoints would be protected with --parity-every 3"),
    ],
)
def test_impossible_study_is_refused_with_a_fix(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_request(asked(**changes), {}, trace_variable=TRACE)


def test_trace_option_is_refused_because_each_row_is_traced() -> None:
    with pytest.raises(UsageError, match="Leave out --trace"):
        check_request(asked(), {TRACE: "/somewhere"}, trace_variable=TRACE)


def test_one_rank_can_run_rows_without_redundancy() -> None:
    check_request(
        asked(layout=layout_for(1), names=("direct_slow", "bypass", "single_flushed")),
        {},
        trace_variable=TRACE,
    )


def test_room_is_for_what_stays_what_is_written_and_parity() -> None:
    request = asked()
    shares = request.layout.bytes_of_processes().tolist()
    room = request.room_bytes()
    assert room[request.slow] == [(NUM_KEPT + 1) * share for share in shares]
    assert room[request.fast] == [(NUM_KEPT + 1) * (share + max(shares)) for share in shares]
    bare = asked(names=("direct_slow",)).room_bytes()
    assert set(bare[request.fast]) == {0}


@given(st.integers(1, 1 << 50))
def test_a_default_scale_keeps_checkpoints_at_or_below_the_default_size(total_bytes: int) -> None:
    scaled = total_bytes * default_scale(total_bytes)
    assert scaled <= DEFAULT_TOTAL_BYTES
    assert scaled == total_bytes or scaled > DEFAULT_TOTAL_BYTES / 2


def record_of(request: StudyRequest) -> StudyIdentity:
    return StudyIdentity(
        place="penstock-study-1",
        identity=request.identity(),
        penstock="0",
        hosts=("here",),
        command=("penstock",),
    )


def test_study_continues_with_other_rows_but_not_with_other_parameters(tmp_path: Path) -> None:
    request = asked(out=tmp_path / "out")
    assert read_study(request.out) is None
    begin_study(request.out, record_of(request))
    found = read_study(request.out)
    assert found == record_of(request)
    require_same(found, replace(request, names=("single",)).identity(), request.out)
    with pytest.raises(UsageError, match="saving was blocking and is now background; parity_every was 3"):
        require_same(
            found, replace(request, saving=SaveMode.BACKGROUND, parity_every=4).identity(), request.out
        )


def test_row_without_a_record_is_removed(tmp_path: Path) -> None:
    record = RowRecord(name="single", says="...", blocked_s=(1.5, 2.0), drain_s=0.0, took_s=4.0)
    folder = row_folder(tmp_path, "single")
    (folder / "traces").mkdir(parents=True)
    assert read_row(tmp_path, "single") is None
    assert not folder.exists()
    folder.mkdir()
    finish_row(tmp_path, record)
    assert read_row(tmp_path, "single") == record
    assert [path.name for path in folder.iterdir()] == [ROW_FILE]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StorageError, match=r"Cannot write it.*out/study"):
        begin_study(tmp_path / "out", record_of(asked()))


def test_malformed_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"version": 7}')
    with pytest.raises(UsageError, match=r"study\.json is not a record of a study"):
        read_study(tmp_path)
