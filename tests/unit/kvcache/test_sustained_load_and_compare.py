"""The search for the load at an objective, and runs beside each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import StorageError
from penstock.kvcache.cache_figures import compare_cache_runs, latency_note, read_cache_run
from penstock.kvcache.cache_run import LoadPoint, find_sustained_load


@pytest.mark.parametrize("limit", [0.013, 0.9, 1.0, 7.3, 900.0])
def test_search_finds_the_load_within_ten_percent(limit: float) -> None:
    def measure(speedup: float) -> LoadPoint:
        is_slow = speedup > limit
        return LoadPoint(
            speedup=speedup,
            requests_per_s=10 * speedup,
            load_p95_ms=900.0 if is_slow else 100.0,
            lag_p95_ms=0.0,
            answered=1.0,
        )

    best, _ = find_sustained_load(measure, objective_ms=500)
    assert best is not None
    assert 0.9 * limit <= best.speedup <= limit


def test_search_ends_where_an_idle_storage_misses_the_objective() -> None:
    def measure(speedup: float) -> LoadPoint:
        return LoadPoint(
            speedup=speedup,
            requests_per_s=speedup,
            load_p95_ms=700 + 100 * speedup,
            lag_p95_ms=0.0,
            answered=1.0,
            in_flight=4 * speedup,
        )

    best, points = find_sustained_load(measure, objective_ms=500)
    assert best is None
    assert [point.speedup for point in points] == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]


def test_a_storage_that_lags_behind_or_misses_sustains_nothing() -> None:
    turns = iter((False, True) * 20)

    def measure(speedup: float) -> LoadPoint:
        lags = next(turns)
        return LoadPoint(
            speedup=speedup,
            requests_per_s=1,
            load_p95_ms=1,
            lag_p95_ms=9000 if lags else 0,
            answered=float(lags),
        )

    best, points = find_sustained_load(measure, objective_ms=500)
    assert best is None
    assert len(points) == 13


def document_of(target: str, rate: float, p99_ms: float, digest: str = "d") -> dict[str, Any]:
    figures = {"gib_per_s": rate, "latency_ms": {"p99": p99_ms}}
    return {
        "format": 1,
        "target": target,
        "plan": {"digest": digest},
        "read": figures,
        "write": figures,
        "requests": {"load_ms": {"count": 0}},
        "time_to_first_token": {"hits_worth_it": None, "saved_s": 1.0},
    }


def test_comparison_orders_rates_down_and_times_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [document_of("slow", 1, 90), document_of("fast", 4, 20), document_of("middle", 2, 50)]
    comparison = compare_cache_runs(runs)
    assert comparison["is_comparable"]
    assert comparison["figures"]["read_gib_per_s"]["best_first"] == [1, 2, 0]
    assert comparison["figures"]["read_p99_ms"]["best_first"] == [1, 2, 0]
    assert comparison["figures"]["load_p95_ms"]["best_first"] == []
    busier = runs[0] | {"engine": {"streams": 64}, "ranks": 2}
    mixed = compare_cache_runs([busier, runs[1] | {"engine": {"streams": 4}, "ranks": 1}])
    assert mixed["in_flight"] == [128, 4]
    assert mixed["figures"]["read_gib_per_s"]["best_first"] == [1, 0]
    assert mixed["figures"]["read_p99_ms"]["best_first"] == []
    assert "128, 4 operations in flight" in str(latency_note(mixed))
    tied = compare_cache_runs([runs[0], runs[0], runs[1]])
    assert tied["figures"]["read_gib_per_s"]["best_first"] == []
    apart = compare_cache_runs([runs[0], document_of("other", 1.5, 1, digest="e")])
    assert not any(figure["best_first"] for figure in apart["figures"].values())
    for index, run in enumerate([runs[0], document_of("other", 1.5, 1, digest="e")]):
        (tmp_path / f"{index}").mkdir()
        (tmp_path / f"{index}" / "kvcache.json").write_text(json.dumps(run))
    page = tmp_path / "page.html"
    assert main(["kvcache", "compare", str(tmp_path / "0"), str(tmp_path / "1"), "--page", str(page)]) == 1
    assert "not comparable" in page.read_text()
    assert "is best" not in page.read_text()
    assert "cannot be compared" in capsys.readouterr().err
    with pytest.raises(StorageError, match=r"no kvcache\.json"):
        read_cache_run(tmp_path)
