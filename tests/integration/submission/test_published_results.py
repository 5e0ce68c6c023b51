"""Published results of v1.0 and v3.0, with the figures that were published."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.submission.check import check
from penstock.submission.edition import choose_edition, load_edition
from penstock.submission.find_results import search_tree
from penstock.submission.result_report import report_all
from penstock.submission.rules.rule import Validity, Verdict

PUBLISHED = os.environ.get("PENSTOCK_MLPERF_RESULTS", "")
TABLE = Path(PUBLISHED or "/nowhere", "published.csv")
only_v1 = pytest.mark.skipif(
    not PUBLISHED or TABLE.is_file(), reason="PENSTOCK_MLPERF_RESULTS names no results of v1.0"
)
only_v3 = pytest.mark.skipif(
    not TABLE.is_file(), reason="PENSTOCK_MLPERF_RESULTS names no results of v3.0 with published.csv"
)


@only_v1
def test_published_results_are_valid_with_their_figures() -> None:
    root = Path(PUBLISHED)
    judged = list(check(root, load_edition("v1.0")))
    assert judged
    for result in judged:
        overall = json.loads((root / result.name / "mlperf_storage_report.json").read_text())["overall"]
        assert result.verdict is Validity.VALID, result.name
        assert result.workload == overall["model"]
        assert result.accelerator == overall["accelerator"]
        assert result.num_accelerators == int(overall["train_num_accelerators"])
        for name, value in result.metrics.items():
            if name in overall:
                assert value == pytest.approx(overall[name], rel=1e-9), name
        assert sum(name in overall for name in result.metrics) == 4


@only_v1
def test_reports_are_those_that_were_published() -> None:
    root = Path(PUBLISHED)
    for each in report_all(root, load_edition("v1.0")):
        published = json.loads((root / each.checked.name / "mlperf_storage_report.json").read_text())
        assert each.v1 is not None
        assert each.v1["overall"].keys() == published["overall"].keys()
        assert each.v1["runs"].keys() == published["runs"].keys()
        assert each.v1["overall"] == close_to(published["overall"])
        # One submitter's report numbers its runs in another order than its folders.
        by_rate = [sorted(map(rate, report["runs"].values())) for report in (each.v1, published)]
        assert by_rate[0] == pytest.approx(by_rate[1], rel=1e-9)
        assert {frozenset(run) for run in each.v1["runs"].values()} == {
            frozenset(run) for run in published["runs"].values()
        }


def close_to(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        for name, value in figures.items()
    }


def rate(run: dict[str, Any]) -> float:
    return float(run["train_throughput_MB_per_second"])


TRAINED = "aws_c5n18xlarge_i3en24xlarge_8c_10s_8a"
LACKING_FILES = {
    # PDFs, datagen/ and datasize/, the image's files, logs, hydra.yaml, results.json, metadata of five runs
    "structure.systems", "structure.phases", "code.image", "datagen.number", "runs.files",
    "runs.configuration", "runs.results", "runs.metadata", "runs.exit", "runs.division", "paths.set",
    "paths.filesystems", "dataset.sized", "dataset.generated", "dataset.bytes", "hosts.single",
    "means.results",
}  # fmt: skip
COLUMNS = {
    "org": "Organization",
    "division": "Division",
    "system": "Name",
    "type": "Type",
    "access_protocol": "Access Protocol",
    "availability": "Availability",
    "usable_capacity_tib": "Usable Capacity (TiB)",
    "rack_units": "RU's",
    "provisioned_power_w": "Provisioned Power (W)",
    "workload": "Benchmark Type",
    "model": "Model",
}
"""Of published.csv, and of our rows."""


def published_rows(*, with_figures: bool = False) -> dict[tuple[str, str], dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["system"]]
    return {(row["org"], row["system"]): row for row in rows if row["figures"] or not with_figures}


@pytest.fixture(scope="module")
def published_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample with the copies of files that the published tree holds once more."""
    root = tmp_path_factory.mktemp("published") / "v3"
    shutil.copytree(PUBLISHED, root)
    with (root / "DUPLICATES.tsv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            target = root / row["to"]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / row["copy_from"], target)
    return root


@only_v3
def test_v3_is_found_though_some_organisations_have_only_descriptions(published_tree: Path) -> None:
    edition = choose_edition("auto", published_tree)
    assert edition.edition == "v3.0"
    found = search_tree(published_tree)
    assert found.without_results == ("closed/Everpure", "closed/NVIDIA", "closed/TuringData")
    assert (found.leftovers, found.unreadable) == ((), ())
    names = [(location.submitter.organisation, location.benchmark.value) for location in found.results]
    assert names == [
        ("Alluxio", "training"),
        ("HPE", "kv_cache"),
        ("TTA", "vector_database"),
        ("ZettaLane", "kv_cache"),
    ]


@only_v3
def test_rows_of_v3_are_the_published_ones_column_by_column(published_tree: Path) -> None:
    rows = published_rows(with_figures=True)
    seen = set()
    for report in report_all(published_tree, load_edition("v3.0")):
        published = rows.get((report.checked.organisation, report.checked.system))
        if published is None:  # the round withheld it
            continue
        seen.add(report.checked.organisation)
        ours = {name: report.row[column] for name, column in COLUMNS.items()}
        assert {name: "" if cell is None else str(cell) for name, cell in ours.items()} == {
            name: published[name] for name in COLUMNS
        }
    assert seen == {"Alluxio", "HPE", "TTA"}


@only_v3
def test_training_figures_of_v3_are_the_published_ones(published_tree: Path) -> None:
    published = json.loads(published_rows(with_figures=True)["Alluxio", TRAINED]["figures"])
    report = next(iter(report_all(published_tree, load_edition("v3.0"))))
    figures = {figure.name: figure.values for figure in report.figures}
    counted = [values for name, values in sorted(published.items())][1:]
    names = {
        "throughput": "train_throughput_mean_samples_per_second",
        "read bandwidth": "train_io_mean_MB_per_second",
        "utilization": "train_au_mean_percentage",
    }
    for ours, theirs in names.items():
        assert list(figures[ours].values()) == pytest.approx([run[theirs] for run in counted], rel=1e-12)
    mib = [run["train_io_mean_MB_per_second"] for run in counted]
    assert report.row["Read B/W (GiB/s)"] == pytest.approx(sum(mib) / 5 / 1024, rel=1e-12)


@only_v3
def test_published_v3_has_no_finding_but_for_what_the_sample_lacks(published_tree: Path) -> None:
    training, *_ = check(published_tree, load_edition("v3.0"))
    bad = {f.rule for f in training.findings if f.verdict in (Verdict.FAIL, Verdict.NOT_CHECKED)}
    assert bad <= LACKING_FILES
    strange = [
        f for f in training.findings if f.rule in {"system.schema", "structure.divisions", "runs.exit"}
    ]
    assert {f.verdict for f in strange} <= {Verdict.PASS, Verdict.NOT_APPLICABLE, Verdict.NOT_CHECKED}
