"""MLPerf Storage v3.0's key-value cache benchmark: its plan, its files, and what our edition says to them."""

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.rank_threads import ThreadComm, on_ranks
from tests.support.submission.query_tree import CACHE, OPTIONS, valid_cache

from penstock.cli.app import main
from penstock.kvcache.cache_figures import LatencyHistogram
from penstock.kvcache.entries import EntryOutcome
from penstock.kvcache.io_engine import TIMED, EngineSettings
from penstock.kvcache.io_plan import IoPlan, Op
from penstock.kvcache.mlperf_files import TrialResult, judge_trial, summarize
from penstock.kvcache.mlperf_plan import OptionSettings, plan_option
from penstock.kvcache.mlperf_run import MlperfRequest, load_limits, run_mlperf
from penstock.kvcache.models import find_model
from penstock.progress import Progress
from penstock.storage.in_memory import MemoryStorage
from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.parsed_file import read_file
from penstock.submission.result_figures import recompute_option
from penstock.submission.result_files import read_rank_results
from penstock.submission.rules.rule import Verdict

LIMITS = load_limits()
PUBLISHED_RANKS = Path(__file__).parents[2] / "golden" / "kvcache_published_v3.json"
PUBLISHED = Path(os.environ.get("PENSTOCK_MLPERF_RESULTS", "/nowhere"))


def planned_settings(number: int, *, seed: int = 42, capacity: int | None = 100 << 20) -> OptionSettings:
    option = LIMITS.options[str(number)]
    return OptionSettings(
        number=number,
        option=option,
        model=find_model(option.model),
        seed=seed,
        scale=Fraction(1, 1000),
        duration_s=20,
        capacity_bytes=capacity,
    )


def planned(number: int, *, seed: int = 42, capacity: int | None = 100 << 20) -> IoPlan:
    return plan_option(planned_settings(number, seed=seed, capacity=capacity))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_plan_reads_only_what_is_there_and_keeps_to_its_capacity(number: int) -> None:
    plan = planned(number)
    stored: dict[int, int] = {}
    for row in plan.in_storage:
        entry = int(row["entry"])
        assert (entry in stored) == (row["op"] != Op.WRITE)
        if row["op"] == Op.WRITE:
            stored[entry] = int(row["bytes"])
        elif row["op"] == Op.DELETE:
            del stored[entry]
        assert sum(stored.values()) <= 100 << 20
    assert plan.requests["turn_hits"].sum() > 100
    in_memory = plan.document()["hit_bytes_by_tier"]["cpu"]
    assert (in_memory > 0) is (number == 2)


def test_a_plan_follows_from_its_seed() -> None:
    assert planned(1).digest == planned(1).digest
    assert len({planned(1, seed=seed).digest for seed in range(42, 46)}) == 4


@pytest.mark.parametrize(("number", "capacity"), [(2, None), (1, 1 << 20)])
def test_a_run_that_ends_early_counts_no_requests_that_it_did_not_come_to(
    number: int, capacity: int | None
) -> None:
    """Neither those that host memory would have served, nor those that found no room."""
    plan = planned(number, capacity=capacity)
    operations = plan.in_storage
    timed = np.zeros(len(operations), TIMED)
    timed["outcome"][: len(operations) // 4] = EntryOutcome.DONE
    timed["busy_ns"] = timed["end_ns"] = 1000
    settings = planned_settings(number, capacity=capacity)
    judged = judge_trial(plan, settings, operations, timed, trial=0, rank=0)
    reached_s = operations["time_s"][len(operations) // 4]
    active = np.isin(np.arange(len(plan.requests)), plan.operations["request"])
    most = (plan.requests["is_taken"] & active & (plan.requests["taken_s"] <= reached_s)).sum()
    assert 0 < judged.document["requests_completed"] <= most


@pytest.fixture(scope="module")
def leaf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a small run on two ranks of each of two hosts."""
    results = tmp_path_factory.mktemp("results")

    def program(comm: ThreadComm) -> dict[str, Any]:
        request = MlperfRequest(
            results=results,
            limits=LIMITS,
            engine=EngineSettings(streams=4),
            cache="/mnt/cache",
            scale=Fraction(1, 100_000),
            duration_s=1.5,
            pause_s=0,
        )
        return run_mlperf(request, MemoryStorage(), comm=comm, progress=Progress())

    document = on_ranks(4, program, hosts=["a", "a", "b", "b"])[0]
    assert not any(option["misses"] for option in document["options"].values())
    return Path(document["leaf"])


def test_figures_are_those_of_the_files_of_ranks(leaf: Path) -> None:
    summary = json.loads((leaf / "summary.json").read_text())
    ranks = read_rank_results(leaf, leaf)
    assert len(ranks) == 3 * 3 * 4
    for number, option in summary["options"].items():
        for name, value in recompute_option(ranks, int(number)).items():
            assert option[name] == pytest.approx(value, rel=1e-9)


def test_a_trial_that_ends_before_its_duration_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--scale", "1/100000", "--options", "2", "--trials", "1", "--duration", "20s"]
    where = ["--to", str(tmp_path / "kv"), "--results", str(tmp_path / "results")]
    assert main(["kvcache", "run", "mlperf-v3", *small, *where]) == 0
    assert "all requests of its 20.0 s were answered" in " ".join(capsys.readouterr().out.split())


def test_honest_figures_stand_beside_each_metric(leaf: Path) -> None:
    options = json.loads((leaf / "honest_figures.json").read_text())["options"]
    summary = json.loads((leaf / "summary.json").read_text())["options"]
    for number, option in options.items():
        for name, metric in option["metrics"].items():
            assert metric["theirs"] == summary[number][name]
            assert metric["honest"] > 0
            assert metric["why"]
        assert option["kind"] == "storage"


def test_the_tree_is_accepted_by_our_edition(leaf: Path, tmp_path: Path) -> None:
    """A full run differs from a scaled one in the numbers of its commands alone: they are put into these."""
    tree = valid_cache()
    root = tree.write(tmp_path)
    [place] = (root / CACHE / "run").iterdir()
    for path in [*place.glob("option_*/*/*/*"), *place.glob("*_metadata.json"), place / "summary.json"]:
        path.unlink()
    for path in leaf.rglob("*.json"):
        text = path.read_text().replace(leaf.name, place.name)
        for entry in json.loads(text).get("command_output_files", []):
            number = int(entry["command"].split("/option_")[1][0])
            scaled = entry["command"][entry["command"].index("--model") :]
            text = text.replace(scaled, OPTIONS[number])
        target = place / str(path.relative_to(leaf)).replace(leaf.name, place.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace('"inter_option_delay": 0', '"inter_option_delay": 90'))
    [result] = check(root, load_edition("v3.0"))
    wrong = {
        (finding.rule, finding.proof)
        for finding in result.findings
        if finding.verdict in (Verdict.FAIL, Verdict.WARNING, Verdict.NOT_CHECKED)
    }
    assert not wrong


def test_a_published_result_is_recomputed_from_the_files_of_its_ranks(tmp_path: Path) -> None:
    """By the rules that check submissions, and by what writes our own summaries."""
    published = json.loads(PUBLISHED_RANKS.read_text())
    ours = []
    for option, trial, average, storage, p95, read, write, device_read, device_write, entries in published[
        "ranks"
    ]:
        summary = {
            "avg_throughput_tokens_per_sec": average,
            "storage_throughput_tokens_per_sec": storage,
            "storage_io_latency_ms": {"p95": p95},
            "cache_stats": {
                "tier_storage_read_bandwidth_gbps": read,
                "tier_storage_write_bandwidth_gbps": write,
                "storage_read_device_p95_ms": device_read,
                "storage_write_device_p95_ms": device_write,
                "storage_entries": entries,
            },
        }
        path = tmp_path / f"option_{option}" / f"trial_{trial}" / "rank_0" / "kvcache_results_1.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"summary": summary}))
        ours.append(_result(option, trial, {"summary": summary}))
    ranks = read_rank_results(tmp_path, tmp_path)
    summarized = summarize(ours, time="20260627_194318", hosts=1, ranks=1)["options"]
    for number, figures in published["options"].items():
        checked = recompute_option(ranks, int(number))
        for name, value in figures.items():
            assert checked[name] == pytest.approx(value, rel=1e-9)
            assert summarized[number][name] == pytest.approx(value, rel=1e-9)
        assert summarized[number]["cpu_tier_ranks"] == []


def _result(option: int, trial: int, document: dict[str, Any]) -> TrialResult:
    nothing = LatencyHistogram.of(np.zeros(0))
    return TrialResult(
        option=option,
        trial=trial,
        rank=0,
        document=document,
        reads=nothing,
        writes=nothing,
        requests=nothing,
        read_bytes=0,
        written_bytes=0,
        tokens=0,
        elapsed_s=300.0,
        misses=0,
    )


@pytest.mark.skipif(
    not (PUBLISHED / "published.csv").is_file(), reason="PENSTOCK_MLPERF_RESULTS names no results of v3.0"
)
def test_published_figures_have_the_fields_of_ours(leaf: Path) -> None:
    ours = json.loads((leaf / "summary.json").read_text())
    for path in PUBLISHED.glob("closed/*/results/*/kv_cache/*/run/*/summary.json"):
        theirs = read_file(path, PUBLISHED).content
        assert set(theirs) == set(ours)
        for option in theirs["options"].values():
            assert set(option) <= set(ours["options"]["1"])
