"""Every number that the study printed is computed from its traces, to the last digit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.synthesize import read_description, synthesize

from penstock.trace.compare import report
from penstock.trace.compare.comparison import ComparisonResult, compare_runs
from penstock.trace.compare.findings import FINDING_RULES
from penstock.trace.compare.trace_study import ComparisonSpec, load_document, open_study
from penstock.trace.questions.answer import as_markdown

GOLDEN = Path(__file__).parents[3] / "golden" / "trace" / "seven_runs.md"


def rows(compared: ComparisonResult, table: str, **match: Any) -> list[Mapping[str, Any]]:
    found = compared.table(table).records()
    return [row for row in found if all(row[key] == value for key, value in match.items())]


def row(compared: ComparisonResult, table: str, **match: Any) -> Mapping[str, Any]:
    (found,) = rows(compared, table, **match)
    return found


def by_name(compared: ComparisonResult, table: str, run: str, **match: Any) -> dict[str, Any]:
    return {each["name"]: each[run] for each in rows(compared, table, **match) if each[run] is not None}


def test_t0_counts_files_lines_and_the_one_damaged_line(compared: ComparisonResult) -> None:
    report = {each["run"]: each for each in rows(compared, "t0")}
    assert [report[run]["num_files"] for run in compared.runs] == [16, 16, 16, 16, 16, 8, 16]
    assert [report[run]["num_salvaged"] for run in compared.runs] == [0, 0, 0, 0, 0, 0, 1]
    assert all(each["num_dropped"] == 0 for each in report.values())
    assert report["scr_ssd_nf_one"]["num_ranks"] == 8


def test_t1_is_the_seven_by_three_table(compared: ComparisonResult) -> None:
    assert [list(each) for each in compared.table("t1").rows] == [
        ["application event", 103057664, 126296083, 378215081, 349139191, 145122746, 153369808, 167234010],
        ["lustre I/O", 72638980, None, 1471540838, 19608824, 118421190, 0, 1060072770],
        ["ssd I/O", None, 97497736, 837766052, 308222378, 152704, 121076746, 472086514],
    ]
    printed = as_markdown(compared.table("t1"))
    assert "| lustre I/O | 72.638980 | 0 | 1471.540838 |" in printed


def test_t1_measures_set_sums_beside_unions_and_concurrency(compared: ComparisonResult) -> None:
    flush = row(compared, "t1_measures", run="scr_pfs_one", tier="lustre")
    assert flush["max_sum_us"] == 1060072770
    assert flush["max_union_us"] < flush["max_sum_us"] / 10
    assert flush["concurrency"] > 10
    assert flush["max_thread_us"] < flush["max_union_us"]
    direct = row(compared, "t1_measures", run="base", tier="lustre")
    assert direct["max_sum_us"] == direct["max_union_us"] == direct["max_thread_us"] == 72638980


def test_t2_has_all_the_digits_of_the_bytes(compared: ComparisonResult) -> None:
    whole = row(compared, "t2", run="base_ssd", tier="ssd")
    half = row(compared, "t2", run="scr_ssd_nf_one", tier="ssd")
    assert repr(whole["total_GiB"]) == "577.07171420753"
    assert repr(half["total_GiB"]) == "288.5385148981586"
    assert f"{half['total_GiB']:.4f}" == "288.5385"
    assert round(half["per_process_gib"], 2) == round(whole["per_process_gib"], 2)


def test_t3_has_bytes_and_time_of_each_class(compared: ComparisonResult) -> None:
    def shown(run: str) -> dict[str, tuple[str, str]]:
        return {
            each["file_class"]: (f"{each['max_size_gib']:.6f}", f"{each['max_sum_us'] / 1e6:.6f}")
            for each in rows(compared, "t3", run=run)
        }

    assert shown("base_ssd") == {
        "layer.pt": ("37.060777", "39.932368"),
        "model.pt": ("0.000172", "0.027605"),
        "optimizer.pt": ("31.434213", "68.512567"),
        "scr_base_megatron_deepspeed": ("0.000000", "0.000025"),
    }
    cached = shown("scr_ssd_nf_one")
    assert cached["filemap_"] == ("0.002303", "20.196445")
    assert cached["flush.scr"] == ("0.000011", "0.780726")
    assert cached["halt.scr"] == ("0.000000", "0.720644")
    assert cached["layer.pt"] == ("37.060777", "32.954393")
    assert cached["model.pt"] == ("0.000172", "0.001463")
    assert cached["nodes.scr"][1] == "0.000327"
    assert [cached[name][1] for name in (".scr", ".scrconf", "haridev", "index.scr")] == [
        "0.000230", "0.000035", "0.000037", "0.000028",
    ]  # fmt: skip


def test_t4_counts_calls_of_each_class(compared: ComparisonResult) -> None:
    assert by_name(compared, "t4", "base", file_class="model.pt") == {
        "write": 288, "open64": 96, "__fxstat64": 96, "lseek64": 96, "close": 96,
    }  # fmt: skip
    assert by_name(compared, "t4", "scr_ssd_nf_one", file_class="model.pt") == {
        "write": 144, "__xstat": 192, "access": 96, "open64": 48, "__fxstat64": 48, "lseek64": 48,
        "close": 48,
    }  # fmt: skip
    assert by_name(compared, "t4", "base", file_class="layer.pt") == {
        "write": 2640, "open64": 528, "__fxstat64": 528, "lseek64": 528, "close": 528,
    }  # fmt: skip
    assert by_name(compared, "t4", "scr_ssd_nf_one", file_class="layer.pt") == {
        "write": 1320, "__xstat": 1056, "access": 528, "open64": 264, "__fxstat64": 264, "lseek64": 264,
        "close": 264,
    }  # fmt: skip


def test_t5_has_the_writes_of_each_file(compared: ComparisonResult) -> None:
    files = [
        each
        for run in ("base_ssd", "scr_ssd_nf_one")
        for each in rows(compared, "t5", run=run, file_class="model.pt")
    ]
    assert {each["num_writes"] for each in files} == {3}
    assert {f"{each['size_gib']:.6f}" for each in files} == {"0.000029"}
    assert (min(each["sum_us"] for each in files), max(each["sum_us"] for each in files)) == (30, 13419)
    spread = row(compared, "t5_spread", run="base_ssd", file_class="layer.pt")
    assert (spread["num_files"], spread["min_writes"], spread["max_writes"]) == (528, 5, 5)


def test_t6_counts_the_calls_of_one_file(compared: ComparisonResult) -> None:
    plain = by_name(compared, "t6", "base", file="model-1-600-0.pt", tier="lustre")
    assert plain == {"write": 3, "open64": 1, "__fxstat64": 1, "lseek64": 1, "close": 1}
    cached = by_name(compared, "t6", "scr_ssd_nf_one", file="model-1-600-0.pt")
    assert cached == {
        "__xstat": 4, "write": 3, "access": 2, "open64": 1, "__fxstat64": 1, "lseek64": 1, "close": 1,
    }  # fmt: skip
    assert (sum(cached.values()), len(cached)) == (13, 7)
    layers = by_name(compared, "t6", "scr_ssd_nf_one", file="layer-*-1-600-0.pt")
    assert (layers["write"], layers["__xstat"], layers["access"]) == (220, 176, 88)
    assert by_name(compared, "t6", "base", file="layer-*-1-600-0.pt")["write"] == 220


def test_t7_times_the_calls_of_one_file(compared: ComparisonResult) -> None:
    assert by_name(compared, "t7", "base_ssd", file="model-1-600-0.pt") == {
        "__fxstat64": 2, "close": 9, "lseek64": 1, "open64": 111, "write": 151,
    }  # fmt: skip
    assert by_name(compared, "t7", "scr_ssd_nf_one", file="model-1-600-0.pt") == {
        "__fxstat64": 2, "__xstat": 27, "access": 10, "close": 10, "lseek64": 1, "open64": 35, "write": 33,
    }  # fmt: skip


@pytest.mark.parametrize("run", ["base_ssd", "scr_ssd_nf_one"])
def test_t8_counts_the_sizes_that_one_file_was_written_with(compared: ComparisonResult, run: str) -> None:
    def sizes(file: str) -> dict[int, int]:
        return {
            each["bytes"]: each[run] for each in rows(compared, "t8", file=file, tier="ssd", name="write")
        }

    assert sizes("model-1-600-0.pt") == {320: 1, 30102: 1, 405: 1}
    layer = dict.fromkeys((384, 129761280, 64, 20971520, 487), 1)
    assert sizes("layer-0-1-600-0.pt") == layer
    assert sizes("layer-*-1-600-0.pt") == dict.fromkeys(layer, 44)


def test_t9_shows_the_calls_after_the_close_24_seconds_later(compared: ComparisonResult) -> None:
    life = rows(compared, "t9", run="scr_ssd_nf_one")
    assert [each["name"] for each in life] == [
        "open64", "__fxstat64", "write", "write", "write", "lseek64", "close",
        "access", "access", "__xstat", "__xstat", "__xstat", "__xstat",
    ]  # fmt: skip
    assert life[7]["since_start_us"] == 1025776223
    close = life[6]
    assert 23_900_000 < life[7]["since_start_us"] - close["since_start_us"] - close["dur_us"] < 24_000_000


def test_t10_times_each_call_on_a_tier(compared: ComparisonResult) -> None:
    assert by_name(compared, "t10", "scr_pfs_one", tier="lustre") == {
        "__lxstat": 1416893, "__xstat": 314929, "__xstat64": 1076, "access": 23796, "chmod": 1043387,
        "chown": 1463341, "close": 1201000, "fsync": 10568369, "ftruncate": 15173, "lseek": 66,
        "mkdir": 10559,
        "open": 12207076, "read": 114711, "write": 1032015623,
    }  # fmt: skip
    assert by_name(compared, "t10", "base", tier="lustre") == {
        "__fxstat64": 156578, "__xstat64": 5139, "close": 179031, "lseek64": 629, "mkdir": 5487,
        "open64": 2708844, "write": 69628272,
    }  # fmt: skip


def test_t11_has_the_bytes_of_each_call_on_a_tier(compared: ComparisonResult) -> None:
    flushed = by_name(compared, "t11", "scr_pfs_one", tier="lustre")
    assert {name: f"{size:.6f}" for name, size in flushed.items()} == {
        "write": "576.791053",
        "read": "0.000106",
    }
    assert f"{by_name(compared, 't11', 'base', tier='lustre')['write']:.6f}" == "577.071714"


def test_t12_has_exact_medians(compared: ComparisonResult) -> None:
    assert by_name(compared, "t12", "base", tier="lustre") == {"write": 704.0}


def test_t13_describes_the_sizes_of_writes(compared: ComparisonResult) -> None:
    def shown(run: str) -> list[str]:
        found = row(compared, "t13", run=run, tier="lustre")
        return [f"{found[name]:.2f}" for name in ("count", "mean", "std", "min", "25%", "50%", "75%", "max")]

    assert shown("scr_pfs_one") == [
        "18936.00", "32706203.92", "4315202.44", "28.00", *["33554432.00"] * 4,
    ]  # fmt: skip
    assert shown("base") == [
        "3792.00", "163403490.24", "392716773.89", "64.00", "384.00", "704.00", "129761280.00",
        "1875123200.00",
    ]  # fmt: skip


def test_mismatches_come_before_all_tables(compared: ComparisonResult) -> None:
    found = {(each["what"], each["run"]): each for each in compared.mismatches.records()}
    ranks = found["ranks", "scr_ssd_nf_one"]
    assert (ranks["here"], ranks["base"], ranks["missing"]) == (8, 16, "8-15")
    assert ("damaged files", "scr_pfs_one") in found
    text = report.render_markdown(compared)
    assert text.index("Differences between the runs") < text.index("## Findings") < text.index("T1 Times")


def test_f1_names_the_eight_missing_ranks_and_shows_that_each_rank_wrote_as_much(
    compared: ComparisonResult,
) -> None:
    (finding,) = [each for each in compared.findings if each.code == "F1"]
    assert finding.runs == ["scr_ssd_nf_one"]
    assert "8, 9, 10, 11, 12, 13, 14, 15" in finding.says[0]
    model = next(each for each in finding.evidence.records() if each["file_class"] == "model.pt")
    assert (model["num_writes"], model["num_writes_base"]) == (144, 288)
    assert model["per_rank"] == model["per_rank_base"] == 18


def test_f2_counts_the_calls_that_each_file_costs_more(study_folder: Path) -> None:
    # They cost a fifth of a second of 18 minutes, which is no finding of the whole.
    with open_study(load_document(ComparisonSpec, study_folder / "runs.yaml"), study_folder) as study:
        finding = next(each for each in FINDING_RULES["F2"](study) if each.runs == ["scr_ssd_nf_one"])
    extra = {
        each["op"]: each["per_file"]
        for each in finding.evidence.records()
        if each["file_class"] == "model.pt"
    }
    assert extra == {"stat": 4, "access": 2}
    assert "+4 stat" in finding.says[0]


def test_f3_unmasks_sums_over_threads(compared: ComparisonResult) -> None:
    found = {
        (each.runs[0], each.evidence.records()[0]["tier"]): each
        for each in compared.findings
        if each.code == "F3"
    }
    assert set(found) == {
        (run, tier) for run in ("scr_ssd_a_pfs", "scr_pfs_one") for tier in ("lustre", "ssd")
    }
    evidence = found["scr_pfs_one", "lustre"].evidence.records()[0]
    assert evidence["sum_us"] == 1060072770
    assert "97 threads" in found["scr_pfs_one", "lustre"].says[0]


def test_f4_sees_the_flush_read_the_cache(compared: ComparisonResult) -> None:
    found = [each for each in compared.findings if each.code == "F4"]
    assert [each.runs[0] for each in found] == ["scr_ssd_a_pfs", "scr_pfs_one"]
    evidence = found[1].evidence.records()[0]
    assert (evidence["tier"], evidence["flushed_to"]) == ("ssd", "lustre")
    assert evidence["read_back_bytes"] == 619626034992


def test_f5_finds_a_nearer_tier_that_is_slower(compared: ComparisonResult) -> None:
    (finding,) = [each for each in compared.findings if each.code == "F5"]
    assert finding.title == "base_ssd: checkpoints are slower on ssd than on lustre"
    assert [each["app_us"] for each in finding.evidence.records()] == [103057664, 126296083]


def test_the_whole_report_is_what_it_was(compared: ComparisonResult) -> None:
    # After a wanted change, write what it renders now: `compared` is made by this folder's conftest.py.
    assert report.render_markdown(compared) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("generation", [2, 3])
def test_the_tables_do_not_depend_on_the_format_of_the_traces(
    compared: ComparisonResult, tmp_path: Path, generation: int
) -> None:
    description = read_description("seven_runs").model_copy(update={"generation": generation})
    synthesize(description, tmp_path / "study")
    asked = load_document(ComparisonSpec, tmp_path / "study" / "runs.yaml")
    with open_study(asked, tmp_path / "study") as study:
        again = compare_runs(study)
    for table in compared.tables:
        if table.name not in ("t0", "t9"):  # metadata lines, and numbers of threads
            assert again.table(table.name) == table


@pytest.mark.slow
def test_workers_of_dask_come_to_the_same_report(compared: ComparisonResult, study_folder: Path) -> None:
    asked = load_document(ComparisonSpec, study_folder / "runs.yaml")
    with open_study(asked, study_folder, dask="local") as study:
        again = compare_runs(study)
    assert report.render_markdown(again) == report.render_markdown(compared)
