"""Reports: figures run by run, fixed columns, files beside runs or in a folder of their own."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.submission.numbered_tree import Submission, valid_submission
from tests.support.submission.query_tree import valid_cache, valid_vectors
from tests.support.submission.timed_tree import valid_checkpointing, valid_round, valid_training

from penstock.submission.edition import load_edition
from penstock.submission.result_report import (
    RESULT_COLUMNS,
    ResultReport,
    plan_tree,
    report_all,
    report_document,
    write_files,
)
from penstock.submission.submission_pages import plan_folder

V1, V3 = load_edition("v1.0"), load_edition("v3.0")
RATES = [41.5, 41.6, 41.7, 41.8, 41.9]


def reported(submission: Submission, root: Path) -> ResultReport:
    (found,) = report_all(submission.write(root), V1)
    return found


def values(found: ResultReport, name: str) -> dict[str, float]:
    return next(figure.values for figure in found.figures if figure.name == name)


def test_a_trainings_figures_are_those_of_its_runs(tmp_path: Path) -> None:
    found = reported(valid_submission(), tmp_path)
    assert list(values(found, "throughput").values()) == pytest.approx(RATES)
    assert list(values(found, "throughput")) == ["run1", "run2", "run3", "run4", "run5"]
    assert list(values(found, "read bandwidth").values()) == pytest.approx(
        [rate * 146_600_628 / 2**20 for rate in RATES]
    )
    assert found.missing == ()
    assert found.row["Read B/W (GiB/s)"] == pytest.approx(41.7 * 146_600_628 / 2**30)


def test_a_figure_that_cannot_be_recomputed_is_named_and_the_others_stay(tmp_path: Path) -> None:
    submission = valid_submission()
    submission.configs()[2]["dataset"].pop("record_length")
    found = reported(submission, tmp_path)
    assert [figure.name for figure in found.figures] == ["throughput", "utilization"]
    (reason,) = found.missing
    assert reason.startswith("read bandwidth: there is no field workload.dataset.record_length (")
    assert found.row["Read B/W (GiB/s)"] is None
    assert found.v1 is None


def test_a_warm_up_counts_in_no_figure(tmp_path: Path) -> None:
    (found,) = report_all(valid_training().write(tmp_path), V3)
    assert list(values(found, "throughput").values()) == pytest.approx([328.5, 328.6, 328.7, 328.8, 328.9])


@pytest.mark.parametrize("num_invocations", [1, 2])
def test_a_checkpointings_figures_are_those_of_each_checkpoint(tmp_path: Path, num_invocations: int) -> None:
    (found,) = report_all(valid_checkpointing(num_invocations=num_invocations).write(tmp_path), V3)
    durations = [4.0 + number / 4 for number in range(10)]
    assert list(values(found, "write duration").values()) == durations
    assert list(values(found, "read bandwidth").values()) == pytest.approx(
        [104.75 / duration for duration in durations]
    )
    assert found.row["Checkpoint Write Duration (s)"] == 5.125
    assert found.row["Checkpoint Mode"] == "default"


def test_a_checkpoint_takes_as_long_as_on_rank_0_and_the_slowest_rank_is_beside_it(tmp_path: Path) -> None:
    tree = valid_checkpointing()
    (first, _) = tree.leaves("checkpointing")
    slower = json.loads(json.dumps(tree.document("checkpointing", 0, "/0_per_epoch_stats.json")))
    slower["1"]["save_ckpt3"]["duration"] = 99.0
    tree.files[f"{first}/1_per_epoch_stats.json"] = slower
    (found,) = report_all(tree.write(tmp_path), V3)
    assert values(found, "write duration")["1.save_ckpt3"] == 4.5
    assert values(found, "write duration, slowest rank")["1.save_ckpt3"] == 99.0
    assert found.row["Checkpoint Write Duration (s)"] == 5.125
    figures = {figure.name: figure for figure in found.figures}
    assert "read duration, slowest rank" not in figures
    (outlier,) = figures["write duration, slowest rank"].outliers
    assert outlier == "1.save_ckpt3"


def test_row_has_every_column_and_empty_cells_for_unknown_values(tmp_path: Path) -> None:
    training = next(
        each for each in report_all(valid_round().write(tmp_path), V3) if "fast" in each.checked.name
    )
    assert tuple(training.row) == RESULT_COLUMNS
    told = {name: cell for name, cell in training.row.items() if cell is not None}
    assert told["Description"] == "A fast storage"
    assert (told["Type"], told["Access Protocol"], told["# Client Nodes"]) == (
        "Shared remote file", "POSIX", 2,
    )  # fmt: skip
    assert (told["Availability"], told["Usable Capacity (TiB)"]) == ("available", 100.5)
    assert (told["RU's"], told["Provisioned Power (W)"]) == (4, 6400)
    assert (told["Verdict"], told["Issues"], told["Rules Edition"]) == ("valid", "", "v3.0")
    assert "Public ID" not in told
    assert "Integrated Client Storage (TiB)" not in told


def test_public_id_is_the_one_that_the_rounds_registry_gave(tmp_path: Path) -> None:
    tree = valid_training()
    entry = {"category": "closed", "organization": "acme", "system": "fast", "benchmark_type": "training"}
    keys = {
        "v3.0-0041": ["closed", "acme", "fast", "unet3d", "mi355"],
        "v3.0-0042": ["closed", "acme", "fast", "unet3d", "b200"],
    }
    tree.files["public_ids.json"] = {
        "assignments": [{**entry, "public_id": name, "key": key} for name, key in keys.items()]
    }
    (found,) = report_all(tree.write(tmp_path), V3)
    assert found.row["Public ID"] == "v3.0-0042"
    assert found.row["Verdict"] == "valid"


def test_issues_are_in_the_row_and_the_document(tmp_path: Path) -> None:
    submission = valid_submission()
    submission.drop("systems/")
    found = reported(submission, tmp_path)
    assert found.row["Verdict"] == "invalid"
    assert found.row["Issues"] == "structure.folders; structure.system"
    assert {issue["rule"] for issue in report_document(found)["issues"]} == {
        "structure.folders",
        "structure.system",
    }


def test_the_report_of_v1_is_the_one_that_the_benchmark_writes(tmp_path: Path) -> None:
    submission = valid_submission()
    found = reported(submission, tmp_path)
    stated = submission.report()
    assert found.v1 is not None
    overall: dict[str, Any] = found.v1["overall"]
    for name, value in stated.items():
        if name.startswith("train_throughput"):
            assert overall[name] == pytest.approx(value, rel=1e-9)
    assert (overall["model"], overall["accelerator"], overall["num_benchmark_runs"]) == ("unet3d", "h100", 5)
    assert list(found.v1["runs"]) == ["run1", "run2", "run3", "run4", "run5"]


def test_a_folder_of_a_report_holds_a_page_all_results_and_each_by_its_path(tmp_path: Path) -> None:
    all_reported = list(report_all(valid_round().write(tmp_path / "tree"), V3))
    out = tmp_path / "out"
    write_files(list(plan_folder(out, all_reported, "v3.0")))
    results = json.loads((out / "results.json").read_text())["results"]
    assert len(results) == 2
    with (out / "results.csv").open(newline="") as file:
        assert [row["Benchmark Type"] for row in csv.DictReader(file)] == ["training", "checkpointing"]
    for result in results:
        assert json.loads((out / result["name"] / "results.json").read_text()) == result
        assert (out / result["name"] / "results.csv").is_file()
    assert "<svg" in (out / "report.html").read_text()


def test_in_a_tree_only_our_own_files_are_replaced(tmp_path: Path) -> None:
    tree = valid_round()
    tree.drop("results.json")
    root = tree.write(tmp_path)
    before = {path for path in root.rglob("*") if path.is_file()}
    planned, kept = plan_tree(list(report_all(root, V3)))
    assert kept == []
    write_files(planned)
    added = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} - {
        path.relative_to(root).as_posix() for path in before
    }
    assert added == {
        "closed/acme/results/fast/training/unet3d/run/results.json",
        "closed/acme/results/fast/training/unet3d/run/results.csv",
        "closed/acme/results/small/checkpointing/llama3-8b/results.json",
        "closed/acme/results/small/checkpointing/llama3-8b/results.csv",
    }
    again = list(report_all(root, V3))
    assert [each.checked.verdict.value for each in again] == ["valid", "valid"]
    assert len(plan_tree(again)[0]) == 4


def test_report_of_another_tool_is_left_as_it_is(tmp_path: Path) -> None:
    planned, kept = plan_tree([reported(valid_submission(), tmp_path / "v1")])
    assert planned == []
    assert "another tool wrote this file; it is left as it is" in kept[0]
    root = valid_training().write(tmp_path / "v3")
    planned, kept = plan_tree(list(report_all(root, V3)))
    assert planned == []
    assert len(kept) == 1


def test_a_v1_tree_without_a_report_gets_one_that_the_check_accepts(tmp_path: Path) -> None:
    submission = valid_submission()
    submission.drop("results/fast/unet3d/mlperf_storage_report.json")
    planned, kept = plan_tree([reported(submission, tmp_path)])
    assert kept == []
    write_files(planned)
    (found,) = report_all(tmp_path, V1)
    assert found.checked.verdict.value == "valid"


def test_cache_is_reported_by_option(tmp_path: Path) -> None:
    (found,) = report_all(valid_cache().write(tmp_path), V3)
    assert (found.row["Benchmark Type"], found.row["Model"]) == ("kv_cache", "llama3.1-8b")
    assert found.row["# Client Nodes"] == 2
    assert found.row["llama3.1-8b Storage + Mem - Read B/W (GiB/s)"] == pytest.approx(8.46)
    assert found.row["llama3.1-70b Storage Only - P95 Read Latency (ms)"] == pytest.approx(3230)
    assert len(found.figures) == 15


def test_vector_search_is_reported_by_its_runs(tmp_path: Path) -> None:
    (found,) = report_all(valid_vectors().write(tmp_path), V3)
    assert (found.row["Model"], found.row["Index Type"]) == ("milvus/DISKANN", "DISKANN")
    assert (found.row["Vector Count"], found.row["Dimension"]) == ("1000000", "1536")
    assert found.row["Queries per Sec"] == pytest.approx(3_600_006 / 60.03)
    assert found.row["Recall Percentage"] == pytest.approx(95.0)
    assert len(values(found, "throughput")) == 5


def test_vector_search_without_summaries_is_reported_by_the_figures_over_all_ranks(tmp_path: Path) -> None:
    tree = valid_vectors()
    for path, value in tree.files.items():
        if path.endswith("vdb_multi_node_summary.json"):
            value.update(p99_latency_ms=107.4)
    is_summary = {path: "/run/" in path and path.endswith("/summary.json") for path in tree.files}
    tree.files = {path: value for path, value in tree.files.items() if not is_summary[path]}
    (found,) = report_all(tree.write(tmp_path), V3)
    assert found.row["Query Latency (ms)"] == pytest.approx(107.4)
    assert found.row["Recall Percentage"] == pytest.approx(95.0)


def test_a_result_without_runs_gets_no_file(tmp_path: Path) -> None:
    tree = valid_training()
    tree.drop("/run/")
    (found,) = report_all(tree.write(tmp_path), V3)
    planned, (sentence,) = plan_tree([found])
    assert planned == []
    assert "there are no runs" in sentence


@pytest.mark.parametrize("edition", ["v2.0", "v3.0"])
def test_later_editions_are_reported_alike(tmp_path: Path, edition: str) -> None:
    found = list(report_all(valid_round(edition).write(tmp_path), load_edition(edition)))
    assert [len(each.figures) for each in found] == [3, 4]
    assert [each.row["Rules Edition"] for each in found] == [edition, edition]


def test_results_on_two_accelerators_share_the_file_of_their_place(tmp_path: Path) -> None:
    tree, other = valid_training(num_runs=3), valid_training(accelerator="h100", num_runs=3)
    tree.files |= {
        path.replace("/run/20260701", "/run/20260702").replace("_20260701", "_20260702"): value
        for path, value in other.files.items()
        if "/run/2026" in path
    }
    tree.drop("results.json")
    all_reported = list(report_all(tree.write(tmp_path), V3))
    assert [each.checked.accelerator for each in all_reported] == ["b200", "h100"]
    (results, rows), kept = plan_tree(all_reported)
    assert kept == []
    assert [each["accelerator"] for each in json.loads(results[1])["results"]] == ["b200", "h100"]
    assert len(list(csv.DictReader(rows[1].splitlines()))) == 2


@pytest.mark.parametrize("text", ["", "[1, 2", "[]", '"text"', "[" * 100_000])
def test_a_file_that_cannot_be_understood_is_not_ours(tmp_path: Path, text: str) -> None:
    tree = valid_training()
    tree.files["closed/acme/results/fast/training/unet3d/run/results.json"] = text
    planned, (sentence,) = plan_tree(list(report_all(tree.write(tmp_path), V3)))
    assert planned == []
    assert "it is left as it is" in sentence


def test_a_folder_of_v1_holds_the_benchmarks_own_report_too(tmp_path: Path) -> None:
    found = reported(valid_submission(), tmp_path / "tree")
    write_files(list(plan_folder(tmp_path / "out", [found], "v1.0")))
    own = json.loads((tmp_path / "out" / found.checked.name / "mlperf_storage_report.json").read_text())
    assert own == found.v1


def test_a_checkpointing_without_times_says_what_is_missing(tmp_path: Path) -> None:
    timeless, empty = valid_checkpointing(num_invocations=1), valid_checkpointing(num_invocations=1)
    timeless.document("checkpointing", 0, "/0_per_epoch_stats.json")["1"]["save_ckpt2"]["duration"] = 0.0
    empty.drop("_per_epoch_stats.json")
    (found,) = report_all(timeless.write(tmp_path / "timeless"), V3)
    assert [figure.name for figure in found.figures] == ["read bandwidth", "read duration"]
    assert found.missing[0].startswith("write bandwidth: 1.save_ckpt2 took no time (")
    (found,) = report_all(empty.write(tmp_path / "empty"), V3)
    assert found.figures == ()
    assert all("no per_epoch_stats.json" in reason for reason in found.missing)


def test_infinite_figure_is_missing(tmp_path: Path) -> None:
    submission = valid_submission()
    for summary in submission.summaries():
        summary["metric"]["train_throughput_samples_per_second"] = [1.7e308, 1.7e308]
    found = reported(submission, tmp_path)
    assert [figure.name for figure in found.figures] == ["utilization"]
    assert [reason.partition(":")[0] for reason in found.missing] == ["throughput", "read bandwidth"]
    assert found.v1 is None
