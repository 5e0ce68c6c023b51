"""For each rule of v1.0 changes of a valid submission: some that keep the rule, some that break it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tests.support.submission.cross_check_trees import NUMBERED_CROSS_CHECKS
from tests.support.submission.numbered_tree import NUM_FILES, RESULT, Submission, valid_submission
from tests.support.submission.rule_trees import RuleTree

from penstock.submission.rules.rule import Verdict

Change = Callable[[Submission], object]


def _set_files(num_files: int) -> Change:
    def change(submission: Submission) -> None:
        for summary in submission.summaries():
            summary["num_files_train"] = num_files

    return change


def _set_memory(gibibytes: float) -> Change:
    def change(submission: Submission) -> None:
        for summary in submission.summaries():
            summary["host_memory_GB"] = [gibibytes]

    return change


def _set_metric(**values: object) -> Change:
    return lambda submission: submission.summary(2)["metric"].update(values)


def _set_override(text: str) -> Change:
    return lambda submission: submission.overrides(3).append(text)


def _set_capacity(value: object) -> Change:
    description = {"nodes": [{"DRAM": {"capacity_GiB": value}}]}
    return lambda submission: submission.files.update({"systems/fast.json": description})


def _drop(prefix: str) -> Change:
    return lambda submission: submission.drop(prefix)


def _rename_runs(submission: Submission) -> None:
    submission.files = {path.replace("/run", "/test"): value for path, value in submission.files.items()}


def _tree(name: str, change: Change, verdict: Verdict = Verdict.FAIL) -> RuleTree[Submission]:
    return RuleTree(
        name=name,
        make=lambda _: valid_submission(),
        change=change,
        verdict=verdict,
        editions=("v1.0",),
    )


NUMBERED_TREES: Final[Mapping[str, tuple[RuleTree[Submission], ...]]] = MappingProxyType(
    {
        **NUMBERED_CROSS_CHECKS,
        "structure.folders": (
            _tree("no systems", _drop("systems/"), Verdict.FAIL),
            _tree("no code", _drop("code/"), Verdict.WARNING),
        ),
        "structure.stray": (
            _tree("a log", lambda s: s.files.update({f"{RESULT}/output.txt": "text"}), Verdict.WARNING),
        ),
        "structure.system": (
            _tree(
                "another name",
                lambda s: s.files.update({"systems/slow.json": s.files.pop("systems/fast.json")}),
                Verdict.WARNING,
            ),
            _tree("no description", _drop("systems/fast.json"), Verdict.FAIL),
            _tree(
                "a comma", lambda s: s.files.update({"systems/fast.json": '{"a": [1,],}'}), Verdict.WARNING
            ),
            _tree("garbage", lambda s: s.files.update({"systems/fast.json": '{"a'}), Verdict.NOT_CHECKED),
            _tree("nothing", lambda s: s.files.update({"systems/fast.json": {}}), Verdict.WARNING),
            _tree("no memory", _set_capacity(0), Verdict.WARNING),
            _tree("lots of memory", _set_capacity("lots"), Verdict.WARNING),
            _tree("memory in quotes", _set_capacity("64"), Verdict.PASS),
        ),
        "runs.number": (
            _tree("four", _drop(f"{RESULT}/run5/"), Verdict.FAIL),
            _tree(
                "six",
                lambda s: s.files.update({f"{RESULT}/run6/summary.json": s.summary(5)}),
                Verdict.FAIL,
            ),
            _tree("none by name", _rename_runs, Verdict.PASS),
            _tree("none", _drop(f"{RESULT}/run"), Verdict.NOT_CHECKED),
        ),
        "runs.files": (
            _tree("no summary", _drop(f"{RESULT}/run3/summary.json"), Verdict.FAIL),
            _tree("no configuration", _drop(f"{RESULT}/run3/configs/config.yaml"), Verdict.FAIL),
        ),
        "runs.workload": (
            _tree("capitals", lambda s: s.overrides(1).__setitem__(0, "workload=UNET3D_H100"), Verdict.PASS),
            _tree("bert", lambda s: s.overrides(1).__setitem__(0, "workload=bert_h100"), Verdict.FAIL),
            _tree("v100", lambda s: s.overrides(1).__setitem__(0, "workload=unet3d_v100"), Verdict.FAIL),
            _tree("unsaid", lambda s: s.overrides(1).pop(0), Verdict.NOT_CHECKED),
        ),
        "runs.same": (
            _tree("capitals", lambda s: s.overrides(1).__setitem__(0, "workload=UNET3D_H100"), Verdict.PASS),
            _tree("accelerators", lambda s: s.summary(4).update(num_accelerators=1), Verdict.FAIL),
            _tree("files", lambda s: s.summary(4).update(num_files_train=NUM_FILES + 1), Verdict.FAIL),
            _tree("samples a file", lambda s: s.summary(4).update(num_samples_per_file=2), Verdict.FAIL),
            _tree(
                "accelerator", lambda s: s.overrides(4).__setitem__(0, "workload=unet3d_a100"), Verdict.FAIL
            ),
        ),
        "sizing.steps": (
            _tree("one file more", _set_files(NUM_FILES + 1), Verdict.PASS),
            _tree("one file short", _set_files(NUM_FILES - 1), Verdict.FAIL),
        ),
        "sizing.memory": (
            _tree("smaller memory", _set_memory(1.0), Verdict.PASS),
            _tree("larger memory", _set_memory(256.0), Verdict.FAIL),
            # 7,000 files of 146,600,628 bytes are 5 x 191.14 GiB.
            _tree("typed in whole GiB", _set_memory(191.55), Verdict.WARNING),
            _tree("beyond whole GiB", _set_memory(192.1), Verdict.FAIL),
            _tree("an empty entry", _set_memory(0.0), Verdict.NOT_CHECKED),
        ),
        "utilization.minimum": (
            _tree("the minimum", _set_metric(train_au_percentage=[90.0, 90.0]), Verdict.PASS),
            _tree("a little less", _set_metric(train_au_percentage=[90.0, 89.9]), Verdict.FAIL),
        ),
        "utilization.stated": (_tree("fail", _set_metric(train_au_meet_expectation="fail"), Verdict.FAIL),),
        "means.run": (
            _tree("utilization", _set_metric(train_au_mean_percentage=97.001), Verdict.FAIL),
            _tree("samples", _set_metric(train_throughput_mean_samples_per_second=41.9), Verdict.FAIL),
            _tree("bytes", _set_metric(train_io_mean_MB_per_second=2900.0), Verdict.FAIL),
        ),
        "means.report": (
            _tree(
                "mean",
                lambda s: s.report().update(train_throughput_mean_samples_per_second=41.8),
                Verdict.FAIL,
            ),
            _tree(
                "deviation",
                lambda s: s.report().update(train_throughput_stdev_MB_per_second=0.5),
                Verdict.FAIL,
            ),
            _tree("no report", _drop(f"{RESULT}/mlperf_storage_report.json"), Verdict.NOT_CHECKED),
        ),
        "parameters.allowed": (
            _tree("a free key", _set_override("++workload.reader.read_threads=16"), Verdict.PASS),
            _tree("batch", _set_override("++workload.reader.batch_size=1"), Verdict.FAIL),
            _tree("open's", _set_override("++workload.dataset.format=hdf5"), Verdict.FAIL),
        ),
        "parameters.configuration": (
            _tree("as text", lambda s: s.configs()[3]["reader"].update(batch_size="7"), Verdict.PASS),
            _tree("batch", lambda s: s.configs()[3]["reader"].update(batch_size=1), Verdict.FAIL),
            _tree("record", lambda s: s.configs()[3]["dataset"].update(record_length=1), Verdict.FAIL),
            _tree("minimum", lambda s: s.configs()[3]["metric"].update(au=0.5), Verdict.FAIL),
            _tree(
                "computation", lambda s: s.configs()[3]["train"].update(computation_time=0.1), Verdict.FAIL
            ),
            _tree("text", lambda s: s.configs()[3]["reader"].update(batch_size="seven"), Verdict.FAIL),
            _tree("no batch", lambda s: s.configs()[3]["reader"].pop("batch_size"), Verdict.NOT_CHECKED),
            _tree("no sections", lambda s: s.configs()[3].clear(), Verdict.NOT_CHECKED),
        ),
    }
)
"""By rule."""
