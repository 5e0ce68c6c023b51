"""One way, at least, to break each rule: a change of a valid submission, and the verdict it must bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tests.support.submission.numbered_tree import NUM_FILES, RESULT, Submission

from penstock.submission.finding import Verdict

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


def _drop(prefix: str) -> Change:
    return lambda submission: submission.drop(prefix)


def _rename_runs(submission: Submission) -> None:
    submission.files = {path.replace("/run", "/test"): value for path, value in submission.files.items()}


BROKEN: Final[Mapping[str, tuple[tuple[str, Change, Verdict], ...]]] = MappingProxyType(
    {
        "structure.folders": (
            ("no systems", _drop("systems/"), Verdict.FAIL),
            ("no code", _drop("code/"), Verdict.WARNING),
        ),
        "structure.stray": (
            ("a log", lambda s: s.files.update({f"{RESULT}/output.txt": "text"}), Verdict.WARNING),
        ),
        "structure.system": (
            ("no description", _drop("systems/fast.json"), Verdict.FAIL),
            ("a comma", lambda s: s.files.update({"systems/fast.json": '{"a": [1,],}'}), Verdict.WARNING),
            ("garbage", lambda s: s.files.update({"systems/fast.json": '{"a'}), Verdict.NOT_CHECKED),
        ),
        "runs.number": (
            ("four", _drop(f"{RESULT}/run5/"), Verdict.FAIL),
            (
                "six",
                lambda s: s.files.update({f"{RESULT}/run6/summary.json": s.summary(5)}),
                Verdict.FAIL,
            ),
            ("none by name", _rename_runs, Verdict.NOT_CHECKED),
        ),
        "runs.files": (
            ("no summary", _drop(f"{RESULT}/run3/summary.json"), Verdict.FAIL),
            ("no configuration", _drop(f"{RESULT}/run3/configs/config.yaml"), Verdict.FAIL),
        ),
        "runs.workload": (
            ("bert", lambda s: s.overrides(1).__setitem__(0, "workload=bert_h100"), Verdict.FAIL),
            ("v100", lambda s: s.overrides(1).__setitem__(0, "workload=unet3d_v100"), Verdict.FAIL),
            ("unsaid", lambda s: s.overrides(1).pop(0), Verdict.NOT_CHECKED),
        ),
        "runs.same": (
            ("accelerators", lambda s: s.summary(4).update(num_accelerators=1), Verdict.FAIL),
            ("files", lambda s: s.summary(4).update(num_files_train=NUM_FILES + 1), Verdict.FAIL),
            ("samples a file", lambda s: s.summary(4).update(num_samples_per_file=2), Verdict.FAIL),
            ("accelerator", lambda s: s.overrides(4).__setitem__(0, "workload=unet3d_a100"), Verdict.FAIL),
        ),
        "sizing.steps": (("one file short", _set_files(NUM_FILES - 1), Verdict.FAIL),),
        "sizing.memory": (
            ("larger memory", _set_memory(256.0), Verdict.FAIL),
            ("an empty entry", _set_memory(0.0), Verdict.NOT_CHECKED),
        ),
        "utilization.minimum": (
            ("a little less", _set_metric(train_au_percentage=[90.0, 89.9]), Verdict.FAIL),
        ),
        "utilization.stated": (("fail", _set_metric(train_au_meet_expectation="fail"), Verdict.FAIL),),
        "means.run": (
            ("utilization", _set_metric(train_au_mean_percentage=97.001), Verdict.FAIL),
            ("samples", _set_metric(train_throughput_mean_samples_per_second=20.2), Verdict.FAIL),
            ("bytes", _set_metric(train_io_mean_MB_per_second=2900.0), Verdict.FAIL),
        ),
        "means.report": (
            (
                "mean",
                lambda s: s.report().update(train_throughput_mean_samples_per_second=20.3),
                Verdict.FAIL,
            ),
            (
                "deviation",
                lambda s: s.report().update(train_throughput_stdev_MB_per_second=0.5),
                Verdict.FAIL,
            ),
            ("no report", _drop(f"{RESULT}/mlperf_storage_report.json"), Verdict.NOT_CHECKED),
        ),
        "parameters.allowed": (
            ("batch", _set_override("++workload.reader.batch_size=1"), Verdict.FAIL),
            ("open's", _set_override("++workload.dataset.format=hdf5"), Verdict.FAIL),
        ),
        "parameters.configuration": (
            ("batch", lambda s: s.configs()[3]["reader"].update(batch_size=1), Verdict.FAIL),
            ("record", lambda s: s.configs()[3]["dataset"].update(record_length=1), Verdict.FAIL),
            ("minimum", lambda s: s.configs()[3]["metric"].update(au=0.5), Verdict.FAIL),
            ("computation", lambda s: s.configs()[3]["train"].update(computation_time=0.1), Verdict.FAIL),
            ("text", lambda s: s.configs()[3]["reader"].update(batch_size="seven"), Verdict.FAIL),
            ("no batch", lambda s: s.configs()[3]["reader"].pop("batch_size"), Verdict.NOT_CHECKED),
            ("no sections", lambda s: s.configs()[3].clear(), Verdict.NOT_CHECKED),
        ),
    }
)
"""By rule: the name of the change, the change, and the worst verdict that the rule then gives."""
