"""Where the reference tool and its own rules disagreed, row by row: each with what the rules give here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.submission import tree_changes as do
from tests.support.submission.query_tree import valid_cache, valid_vectors
from tests.support.submission.timed_tree import (
    BATCH,
    NUM_FILES,
    Round,
    valid_checkpointing,
    valid_round,
    valid_training,
)

from penstock.bench.state_layout import LayoutRequest, plan_layout
from penstock.submission.check import CheckedResult, check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Finding, Validity, Verdict
from penstock.submission.rules import rule_by_id
from penstock.submission.rules.rule import Case
from penstock.workload.load_workload import load_model

EDITION: Final = load_edition("v3.0")
ORDER: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING, Verdict.PASS, Verdict.NOT_APPLICABLE)
PASS, FAIL, WARNING, UNKNOWN = Verdict.PASS, Verdict.FAIL, Verdict.WARNING, Verdict.NOT_CHECKED


@dataclass(kw_only=True)
class Judge:
    """Writes trees, each to a folder of its own, and says what a rule found.

    Of v3.0 it is judged in earnest, without what the round let pass.
    """

    root: Path
    count: int = 0

    def results(self, tree: Round) -> list[CheckedResult]:
        """All results of a tree."""
        self.count += 1
        edition = "v3.0-strict" if tree.edition == "v3.0" else tree.edition
        return list(check(tree.write(self.root / str(self.count)), load_edition(edition)))

    def of_rule(self, rule: str, tree: Round) -> Verdict:
        """The worst verdict of one rule over a whole tree."""
        found = {f.verdict for each in self.results(tree) for f in each.findings if f.rule == rule}
        return next(verdict for verdict in ORDER if verdict in found)

    def training(self, rule: str, *changes: do.Change, workload: str = "unet3d") -> Verdict:
        """The same of a valid training after changes."""
        tree = valid_training(workload=workload)
        do.together(*changes)(tree)
        return self.of_rule(rule, tree)

    def checkpointing(self, rule: str, *changes: do.Change, num_invocations: int = 2) -> Verdict:
        """The same of a valid checkpointing."""
        tree = valid_checkpointing(num_invocations=num_invocations)
        do.together(*changes)(tree)
        return self.of_rule(rule, tree)


def _more_files_than_needed(judge: Judge) -> None:
    assert judge.training("sizing.steps", do.summary(num_files_train=NUM_FILES * 2)) is PASS


def _too_few_steps(judge: Judge) -> None:
    assert judge.training("sizing.steps", do.summary(num_files_train=NUM_FILES - BATCH)) is FAIL


def _memory_is_summed(judge: Judge) -> None:
    # Twice the first host's would ask for 37,501 files, and in the second case for 1,172.
    assert judge.training("sizing.memory", do.summary(host_memory_GB=[512.0, 16.0])) is PASS
    assert judge.training("sizing.memory", do.summary(host_memory_GB=[16.0, 800.0])) is FAIL


def _files_are_rounded_up(judge: Judge) -> None:
    memory = do.summary(host_memory_GB=[500.0, 500.0], num_files_train=36_621)  # of 36,621.3
    assert judge.training("sizing.memory", memory) is FAIL
    assert judge.training("sizing.memory", memory, do.summary(num_files_train=36_622)) is PASS


def _utilization_of_real_fields(judge: Judge) -> None:
    metric = valid_training().summary("run")["metric"]
    assert {"train_au_mean_percentage", "train_au_meet_expectation"} <= metric.keys()
    assert judge.training("utilization.stated") is PASS
    assert judge.training("utilization.minimum") is PASS


def _retinanet_has_its_own_minimum(judge: Judge) -> None:
    for percent, verdict in ((85.0, PASS), (84.9, FAIL)):
        change = do.metric(train_au_percentage=[percent] * 8)
        assert judge.training("utilization.minimum", change, workload="retinanet") is verdict


def _sizes_of_every_workload_are_compared(judge: Judge) -> None:
    as_text = do.metadata("datasize", 0, dataset={"num_files_train": str(NUM_FILES)})
    too_many = do.metadata("datasize", 0, dataset={"num_files_train": str(NUM_FILES + 1)})
    assert judge.training("dataset.sized", as_text, workload="retinanet") is PASS
    assert judge.training("dataset.sized", too_many, workload="retinanet") is FAIL


def _datasize_is_a_phase(judge: Judge) -> None:
    assert judge.training("structure.phases") is PASS
    assert judge.training("structure.phases", do.drop("/datasize/")) is FAIL
    assert judge.training("dataset.sized", do.drop("/datasize/")) is FAIL


def _generation_writes_no_figures(judge: Judge) -> None:
    assert not any("summary.json" in path for path in valid_training().files if "/datagen/" in path)
    assert judge.training("datagen.files") is PASS


def _other_benchmarks_may_lie_beside(judge: Judge) -> None:
    others = [do.add(f"closed/acme/results/fast/{name}/x/notes") for name in ("vector_database", "kv_cache")]
    assert judge.training("structure.categories", *others) is PASS


def _two_accelerators_are_two_results(judge: Judge) -> None:
    tree = valid_training(workload="retinanet", num_runs=12)
    for number in range(6, 12):
        tree.overrides("run", number)[0] = "workload=retinanet_mi355"
    results = judge.results(tree)
    assert [each.accelerator for each in results] == ["b200", "mi355"]
    assert len({each.name for each in results}) == 2
    for each in results:
        assert {f.verdict for f in each.findings if f.rule == "runs.number"} == {PASS}


def _exactly_six(judge: Judge) -> None:
    found = [judge.of_rule("runs.number", valid_training(num_runs=number)) for number in (5, 6, 7)]
    assert found == [FAIL, PASS, FAIL]


def _ten_operations_in_one_or_two_leaves(judge: Judge) -> None:
    for num_invocations in (1, 2):
        assert judge.checkpointing("checkpoint.invocations", num_invocations=num_invocations) is PASS


def _pauses_by_the_runs_own_times(judge: Judge) -> None:
    # 17:59 after an 18 minutes' run: shorter than a run, and from start to start shorter than two.
    assert judge.training("runs.pauses", do.shift("run", 5, timedelta(minutes=15, seconds=59))) is PASS
    assert judge.training("runs.pauses", do.shift("run", 5, timedelta(minutes=16))) is FAIL


def _all_checkpoints_count(judge: Judge) -> None:
    tree = valid_checkpointing()
    assert tree.summary("checkpointing")["metric"]["checkpoint_size_GB"] < 3 * 256
    assert judge.checkpointing("checkpoint.ratio") is PASS


def _four_on_a_host_are_left_to_the_reviewer(judge: Judge) -> None:
    assert judge.checkpointing("checkpoint.hosts", do.summary("checkpointing", 0, num_hosts=2)) is WARNING


def _rules_of_closed_hold_in_any_case(judge: Judge) -> None:
    for said in ("CLOSED", "closed"):
        change = do.metadata("checkpointing", 0, num_processes=16, verification=said)
        assert judge.checkpointing("checkpoint.processes", change) is FAIL
    assert judge.checkpointing("checkpoint.hosts", do.summary("checkpointing", 0, num_hosts=4)) is FAIL


def _gap_by_the_tools_own_marks(judge: Judge) -> None:
    early = do.summary("checkpointing", 0, end="2026-07-01T10:10:00")
    assert judge.checkpointing("checkpoint.gap", early) is PASS


def _capabilities_by_the_schemas_keys(judge: Judge) -> None:
    assert judge.checkpointing("checkpoint.shared", do.summary("checkpointing", 0, num_hosts=2)) is PASS
    old = do.solution(shared_capabilities={"multi_host_support": True})
    assert judge.checkpointing("system.schema", old) is FAIL


def _unet3d_on_mi355_has_no_parameters(judge: Judge) -> None:
    def change(tree: Round) -> None:
        do.set_workload(tree, "unet3d_mi355")

    assert judge.training("runs.workload", change) is PASS
    assert judge.training("parameters.configuration", change) is UNKNOWN


def _digests_by_their_names(judge: Judge) -> None:
    def older(tree: Round) -> None:
        tree.files[f"{do.image(tree)}/.code-hash.json"]["algorithm"] = "md5-tree-v1"

    assert judge.training("code.image") is PASS
    assert judge.training("code.image", older) is UNKNOWN


def _divisions_in_capitals(judge: Judge) -> None:
    tree = valid_round()
    tree.division = "Closed"
    assert {each.verdict for each in judge.results(tree)} == {Validity.VALID}


def _metadata_of_run(tree: Round) -> dict[str, Any]:
    found: dict[str, Any] = next(
        value for path, value in tree.files.items() if "/run/" in path and path.endswith("_metadata.json")
    )
    return found


def _options_by_the_table_of_the_text(judge: Judge) -> None:
    tree = valid_cache()
    _metadata_of_run(tree)["args"].update(cpu_mem_gb=32.0, gpu_mem_gb=16.0, duration=60)
    assert judge.of_rule("kvcache.table", tree) is PASS
    for entry in _metadata_of_run(tree)["command_output_files"]:
        entry["command"] = entry["command"].replace("--duration 300", "--duration 60")
    assert judge.of_rule("kvcache.table", tree) is FAIL


def _degree_of_an_index_is_free(judge: Judge) -> None:
    for degree in (16, 64):
        tree = valid_vectors()
        _metadata_of_run(tree)["override_parameters"] = {"index.max_degree": degree, "index.M": degree}
        assert judge.of_rule("vectors.parameters", tree) is PASS


def _inserted_vectors_are_equal(judge: Judge) -> None:
    for inserted, verdict in ((999_999, FAIL), (1_000_000, PASS), (1_000_001, FAIL)):
        tree = valid_vectors()
        path = next(path for path in tree.files if "/run/" in path and path.endswith("/summary.json"))
        tree.files[path]["inserted_vectors"] = inserted
        assert judge.of_rule("vectors.inserted", tree) is verdict


def _cache_and_results_are_apart(judge: Judge) -> None:
    tree = valid_cache()
    assert judge.of_rule("paths.filesystems", tree) is PASS
    path = next(path for path in tree.files if path.endswith("fs_separation.json"))
    tree.files[path] = {"version": 1, "same_filesystem": True}
    assert judge.of_rule("paths.filesystems", tree) is FAIL


def _summary_is_matched_by_its_dot(judge: Judge) -> None:
    change = do.together(do.without("run", 2, "summary.json"), do.replace("run", 2, "summary,json", "{}"))
    assert judge.training("runs.files", change) is FAIL


def _shared_data_is_for_the_reviewer(judge: Judge) -> None:
    assert any("visible on all hosts (3.3.5)" in point for point in EDITION.for_the_reviewer)
    assert judge.training("structure.names") is PASS


def _memory_by_accelerator(judge: Judge) -> None:
    size = do.metric("checkpointing", 0, checkpoint_size_GB=1_000.0)  # more than 8 x 80 GB
    assert judge.checkpointing("checkpoint.memory", size) is PASS
    mi355 = do.together(size, do.metric("checkpointing", 0, checkpoint_size_GB=2_000.0))
    assert judge.checkpointing("checkpoint.memory", mi355) is FAIL
    assert (
        judge.checkpointing("checkpoint.memory", mi355, do.metadata("checkpointing", 0, accelerator="mi355"))
        is PASS
    )


def _unet3d_without_checkpoints(judge: Judge) -> None:
    assert valid_training().config("run")["workflow"]["checkpoint"] is False
    assert judge.training("parameters.configuration") is PASS
    assert judge.training("parameters.allowed", do.override("++workload.workflow.checkpoint=False")) is PASS


def _both_sizes_of_the_largest_model(judge: Judge) -> None:
    for gib, verdict in ((15_427.0, PASS), (18_000.0, PASS), (16_700.0, WARNING)):
        size = do.metric("checkpointing", 0, checkpoint_size_GB=gib)
        found = judge.checkpointing(
            "checkpoint.size", lambda tree: tree.rename_model("llama3-1t"), size, num_invocations=1
        )
        assert found is verdict


def _one_list_of_free_keys(judge: Judge) -> None:
    for key in ("storage.storage_options.prefetch_window=4", "checkpoint.checkpoint_folder=/mnt/c"):
        assert judge.training("parameters.allowed", do.override(f"++workload.{key}")) is PASS


def _minus_one_is_none(judge: Judge) -> None:
    change = do.args("checkpointing", 0, num_checkpoints_read=-1)
    for rule in ("checkpoint.counts", "checkpoint.invocations"):
        assert judge.checkpointing(rule, change) is PASS


def _descriptions_keep_their_schema(judge: Judge) -> None:
    def older(tree: Round) -> None:
        tree.system()["clients"][0]["networking"][0].pop("state")
        tree.system()["clients"][0]["chassis"]["power"] = {"power_capacity_watts": 800}

    assert judge.training("system.schema", older) is FAIL
    (result,) = judge.results(_after(valid_training(), older))
    told = " ".join(finding.proof for finding in result.findings if finding.rule == "system.schema")
    assert "power_capacity_watts: there is no such key" in told
    assert "networking.0.state" in told
    assert "line 0" not in told


def _after(tree: Round, change: do.Change) -> Round:
    change(tree)
    return tree


def _no_rank_has_the_whole_model(judge: Judge) -> None:
    assert judge.checkpointing("checkpoint.size") is PASS
    layout = plan_layout(LayoutRequest(model=load_model("llama3-405b")))
    # Its 512 ranks have 10.3 GiB each on average; rank 0 with the whole model would have 764.
    assert layout.bytes_of_processes().max() < 20 << 30


def _a_defect_names_its_cause(judge: Judge) -> None:
    tree = valid_training(num_runs=2)
    root = tree.write(judge.root / "defect")
    (result,) = check(root, EDITION, rules=[replace(rule_by_id("runs.exit"), judge=_divide_by_zero)])
    (finding,) = result.findings
    assert (finding.verdict, result.verdict) == (UNKNOWN, Validity.NOT_CHECKED)
    assert "ZeroDivisionError: division by zero" in finding.proof


def _divide_by_zero(case: Case) -> Iterator[Finding]:
    yield from ()
    _ = 1 / len(case.name[:0])


ROWS: Final[dict[str, Callable[[Judge], None]]] = {
    "D-1": _more_files_than_needed,
    "D-2": _too_few_steps,
    "D-3": _memory_is_summed,
    "D-4": _files_are_rounded_up,
    "D-5": _utilization_of_real_fields,
    "D-6": _retinanet_has_its_own_minimum,
    "D-7": _sizes_of_every_workload_are_compared,
    "D-8": _datasize_is_a_phase,
    "D-9": _generation_writes_no_figures,
    "D-10": _other_benchmarks_may_lie_beside,
    "D-11": _two_accelerators_are_two_results,
    "D-12": _exactly_six,
    "D-13": _ten_operations_in_one_or_two_leaves,
    "D-14": _pauses_by_the_runs_own_times,
    "D-15": _all_checkpoints_count,
    "D-16": _four_on_a_host_are_left_to_the_reviewer,
    "D-17": _rules_of_closed_hold_in_any_case,
    "D-18": _gap_by_the_tools_own_marks,
    "D-19": _capabilities_by_the_schemas_keys,
    "D-20": _unet3d_on_mi355_has_no_parameters,
    "D-21": _digests_by_their_names,
    "D-22": _divisions_in_capitals,
    "D-23": _options_by_the_table_of_the_text,
    "D-24": _degree_of_an_index_is_free,
    "D-25": _summary_is_matched_by_its_dot,
    "D-26": _shared_data_is_for_the_reviewer,
    "D-27": _memory_by_accelerator,
    "D-28": _unet3d_without_checkpoints,
    "D-29": _both_sizes_of_the_largest_model,
    "D-30": _inserted_vectors_are_equal,
    "D-31": _one_list_of_free_keys,
    "D-32": _minus_one_is_none,
    "D-33": _descriptions_keep_their_schema,
    "D-34": _cache_and_results_are_apart,
    "D-35": _no_rank_has_the_whole_model,
    "D-36": _a_defect_names_its_cause,
}


@pytest.mark.parametrize("row", ROWS)
def test_the_rules_decide(row: str, tmp_path: Path) -> None:
    ROWS[row](Judge(root=tmp_path))


def test_all_rows_are_there() -> None:
    assert list(ROWS) == [f"D-{number}" for number in range(1, 37)]


def _subset(model: str) -> do.Change:
    def change(tree: Round) -> None:
        tree.rename_model(model)
        tree.config("checkpointing")["checkpoint"]["mode"] = "subset"
        tree.overrides("checkpointing").append("++workload.checkpoint.mode=subset")

    return change


@pytest.mark.parametrize(
    ("edition", "model", "verdict"),
    [
        ("v2.0", "llama3-8b", PASS),
        ("v2.0", "llama3-70b", PASS),
        ("v2.0", "llama3-1t", PASS),
        ("v3.0", "llama3-8b", PASS),
        ("v3.0", "llama3-70b", FAIL),
    ],
)
def test_subset_mode_is_judged_by_its_edition(
    edition: str, model: str, verdict: Verdict, tmp_path: Path
) -> None:
    judge = Judge(root=tmp_path)
    tree = _after(valid_checkpointing(edition, num_invocations=1), _subset(model))
    assert judge.of_rule("checkpoint.subset", tree) is verdict
    for rule in ("checkpoint.processes", "parameters.allowed"):
        assert judge.of_rule(rule, tree) is PASS


def _columns(tree: Round) -> None:
    """A sample of 1,000 x 4 + 8 bytes, no length of a record, and hosts with as little memory."""
    for number in range(len(tree.leaves("run"))):
        tree.summary("run", number)["host_memory_GB"] = [0.01, 0.01]
        dataset = tree.config("run", number)["dataset"]
        del dataset["record_length_bytes"]
        columns = [{"name": "x", "dtype": "float32", "size": 1_000}, {"name": "y", "dtype": "int64"}]
        dataset |= {"format": "parquet", "parquet": {"columns": columns}}


def test_parquet_without_a_record_length_is_judged_by_its_columns_and_samples(tmp_path: Path) -> None:
    judge = Judge(root=tmp_path)
    # 5 x 0.02 GiB / 4,008 B are 26,790.8 samples.
    for gib, verdict in ((0.02, PASS), (0.03, FAIL)):
        assert judge.training("sizing.memory", _columns, do.summary(host_memory_GB=[gib, 0.0])) is verdict
    assert judge.training("sizing.steps", _columns) is PASS
    assert judge.training("sizing.steps", _columns, do.summary(num_files_train=NUM_FILES - 1)) is FAIL


def test_parquet_without_length_and_columns_is_not_checked_and_named(tmp_path: Path) -> None:
    judge = Judge(root=tmp_path)
    tree = _after(valid_training(), _columns)
    tree.config("run", 2)["dataset"].pop("parquet")
    assert judge.of_rule("sizing.steps", tree) is PASS
    (result,) = judge.results(tree)
    told = {f.proof for f in result.findings if f.rule == "sizing.memory" and f.verdict is UNKNOWN}
    assert told == {"there is no field workload.dataset.record_length"}


def test_a_run_whose_launcher_failed_is_no_result(tmp_path: Path) -> None:
    assert Judge(root=tmp_path).training("runs.exit", do.metadata(exit_status=1)) is FAIL
