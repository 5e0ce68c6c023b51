"""Changes that one file does not show: figures against accelerators, files and time, and records against
one another. `numbered_rule_trees` and `timed_rule_trees` have the trees of the other rules.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from tests.support.submission import tree_changes as do
from tests.support.submission.numbered_tree import RESULT, Submission, valid_submission
from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_cases import FAIL, NA, PASS, UNKNOWN, WARNING, ckpt, once, run
from tests.support.submission.timed_tree import Round

from penstock.submission.rules.rule import Verdict

RATES: Final = "train_throughput_samples_per_second"
UTILIZATION: Final = "train_au_percentage"
Numbered = Callable[[Submission], object]


def raised(summary: dict[str, Any], factor: float) -> None:
    """Raise all rates of a summary, as somebody does who knows what depends on them."""
    metric = summary["metric"]
    metric[RATES] = [rate * factor for rate in metric[RATES]]
    for name in ("train_throughput_mean_samples_per_second", "train_io_mean_MB_per_second"):
        metric[name] *= factor


def _tree(name: str, change: Numbered, verdict: Verdict = FAIL) -> RuleTree[Submission]:
    return RuleTree(
        name=name, make=lambda _: valid_submission(), change=change, verdict=verdict, editions=("v1.0",)
    )


def _summary(**values: object) -> Numbered:
    return lambda tree: tree.summary(3).update(values)


def _statistics(tree: Submission) -> dict[str, Any]:
    found: dict[str, Any] = tree.files[f"{RESULT}/run3/per_epoch_stats.json"]
    return found


def _report(**values: object) -> Numbered:
    return lambda tree: tree.report().update(values)


def _report_runs(factor: float, **values: object) -> Numbered:
    def change(tree: Submission) -> None:
        tree.files[f"{RESULT}/mlperf_storage_report.json"]["runs"] = {
            f"run{number}": {RATES: (41.4 + number / 10) * factor, "model": "unet3d", **values}
            for number in range(1, 6)
        }

    return change


def raise_everything(tree: Submission, factor: float) -> None:
    """Raise all runs, and the report with them."""
    for summary in tree.summaries():
        raised(summary, factor)
    report = tree.report()
    report.update({name: value * factor for name, value in report.items() if isinstance(value, float)})


def copy_run(tree: Submission) -> None:
    """Put one run in place of another."""
    for path, value in list(tree.files.items()):
        if path.startswith(f"{RESULT}/run4/"):
            tree.files[path.replace("/run4/", "/run3/")] = value


def _twice(text: str, line: str) -> str:
    return text.replace("{", "{" + line + ",", 1)


def give_key_twice(tree: Submission) -> None:
    """Say first that a run failed, and then that it succeeded."""
    text = json.dumps(tree.summary(3))
    tree.files[f"{RESULT}/run3/summary.json"] = text.replace(
        '"train_au_meet', '"train_au_meet_expectation": "fail", "train_au_meet'
    )


def swap_start_and_end(tree: Submission) -> None:
    """Let a run end before it began."""
    summary = tree.summary(3)
    summary["start"], summary["end"] = summary["end"], summary["start"]


def overlap(tree: Submission) -> None:
    """Move a run, with all its times, into the one before."""
    moved = -timedelta(minutes=10)
    summary = tree.summary(3)
    for record in (summary, *_records(_statistics(tree))):
        for key in ("start", "end"):
            record[key] = (datetime.fromisoformat(record[key]) + moved).isoformat()


def _records(statistics: dict[str, Any]) -> list[dict[str, Any]]:
    return [record for epoch in statistics.values() for record in (epoch, epoch["block1"])]


def _halve_a_block(tree: Submission) -> None:
    _statistics(tree)["2"]["block1"]["duration"] = "80.00"


def _busy(percent: float) -> Numbered:
    return lambda tree: tree.summary(3)["metric"].update({UTILIZATION: [97.0, 97.0, percent]})


def _epoch_duration(text: str) -> Numbered:
    return lambda tree: _statistics(tree)["2"].update(duration=text)


def _pause_after_last_step(tree: Submission) -> None:
    epoch = _statistics(tree)["5"]
    later = (datetime.fromisoformat(epoch["end"]) + timedelta(seconds=5)).isoformat()
    epoch["end"] = tree.summary(3)["end"] = later


def _epoch_outside(tree: Submission) -> None:
    tree.summary(3)["end"] = _statistics(tree)["4"]["end"]


def _slower_statistics(tree: Submission) -> None:
    tree.files[f"{RESULT}/run3/per_epoch_stats.json"] = _statistics(valid_submission())
    tree.summary(3)["metric"][RATES] = [rate / 2 for rate in tree.summary(3)["metric"][RATES]]


NUMBERED_CROSS_CHECKS: Final[Mapping[str, tuple[RuleTree[Submission], ...]]] = MappingProxyType(
    {
        "rates.maximum": (
            _tree("a tenth more", lambda tree: raised(tree.summary(3), 1.1)),
            _tree("all that is possible", lambda tree: raised(tree.summary(3), 43.34 / 41.7), PASS),
            _tree("half as much again in all runs and the report", lambda tree: raise_everything(tree, 1.5)),
        ),
        "utilization.maximum": (
            _tree("half as much again", _busy(150.0)),
            _tree("all of the time", _busy(100.4), PASS),
            _tree("not said", lambda tree: tree.summary(3)["metric"].pop(UTILIZATION), UNKNOWN),
        ),
        "rates.utilization": (
            _tree("more than busy for", lambda tree: raised(tree.summary(3), 43.3 / 41.7)),
            _tree("far less", lambda tree: raised(tree.summary(3), 0.6), WARNING),
            _tree("a little less", lambda tree: raised(tree.summary(3), 0.9), PASS),
        ),
        "rates.files": (
            _tree("a tenth more", lambda tree: raised(tree.summary(3), 1.1), WARNING),
            _tree("half", lambda tree: raised(tree.summary(3), 0.5), WARNING),
            _tree("fewer files", _summary(num_files_train=3500), WARNING),
            _tree("no statistics", lambda tree: tree.drop(f"{RESULT}/run"), UNKNOWN),
        ),
        "epochs.recorded": (
            _tree("none", lambda tree: _statistics(tree).clear()),
            _tree("one gone", lambda tree: _statistics(tree).pop("5")),
            _tree("no file", lambda tree: tree.files.pop(f"{RESULT}/run3/per_epoch_stats.json"), PASS),
        ),
        "times.recorded": (
            _tree("swapped", swap_start_and_end),
            _tree("half a block", _halve_a_block),
            _tree("an epoch outside", _epoch_outside),
            _tree("an epoch of a millisecond", _epoch_duration("0.001")),
            _tree("an epoch longer than it lasted", _epoch_duration("200.0")),
            _tree("an epoch with a pause after its last step", _pause_after_last_step, PASS),
            _tree("no date", _summary(start="soon"), UNKNOWN),
        ),
        "runs.distinct": (
            _tree("a copy", copy_run),
            _tree(
                "rates of another", lambda tree: tree.summary(3)["metric"].update(tree.summary(4)["metric"])
            ),
        ),
        "runs.overlap": (
            _tree("into the one before", overlap),
            _tree("no end", lambda tree: tree.summary(3).pop("end"), UNKNOWN),
        ),
        "runs.recorded": (
            _tree(
                "fewer files configured",
                lambda tree: tree.configs()[2]["dataset"].update(num_files_train=500),
            ),
            _tree("fewer files in the summary", _summary(num_files_train=500)),
            _tree(
                "files set",
                lambda tree: tree.overrides(3).append("++workload.dataset.num_files_train=500"),
                WARNING,
            ),
            _tree("epochs", _summary(epochs=1)),
            _tree("another model", lambda tree: tree.configs()[2].update(model="cosmoflow")),
        ),
        "hosts.memory": (
            _tree("less", _summary(host_memory_GB=[16.0])),
            _tree("twice, as real lists have it", _summary(host_memory_GB=[128.0]), PASS),
            _tree("not told", lambda tree: tree.summary(3).pop("host_meminfo"), PASS),
            _tree("an empty entry", _summary(host_memory_GB=[64.0, 0.0]), PASS),
            _tree("no number", _summary(host_meminfo={"MemTotal": "much"}), UNKNOWN),
            _tree("said to fit", _summary(potential_caching=[1], data_size_per_host_GB=955.7), WARNING),
            _tree("said not to fit", _summary(potential_caching=[0], data_size_per_host_GB=955.7), PASS),
            _tree("fits", _summary(potential_caching=[1], data_size_per_host_GB=32.0), PASS),
        ),
        "report.identity": (
            _tree("model", _report(model="cosmoflow")),
            _tree("accelerator", _report(accelerator="a100")),
            _tree("accelerators", _report(train_num_accelerators="12")),
            _tree("as text", _report(train_num_accelerators="2"), PASS),
            _tree("files", _report(num_files_train=42_000)),
            _tree("runs", _report(num_benchmark_runs=4)),
            _tree("each run", _report_runs(1.0), PASS),
            _tree("each run's rate", _report_runs(1.01)),
            _tree("each run's accelerators", _report_runs(1.0, train_num_accelerators="3")),
            _tree("runs as a list", lambda tree: tree.files.update(_with_list()), UNKNOWN),
        ),
        "files.keys": (
            _tree("in a summary", give_key_twice),
            _tree(
                "in a configuration",
                lambda tree: tree.files.update(
                    {f"{RESULT}/run2/configs/config.yaml": "workload: {model: a, model: unet3d}"}
                ),
            ),
        ),
    }
)


def _with_list() -> dict[str, Any]:
    return {f"{RESULT}/mlperf_storage_report.json": {"overall": {}, "runs": [1]}}


def _raise(factor: float) -> do.Change:
    return lambda tree: raised(tree.summary("run", 2), factor)


def _parameter(section: str, phase: str = "run", number: int = 2, **values: Any) -> do.Change:
    """Set values in the metadata's configuration alone."""
    return lambda tree: tree.metadata(phase, number)[do.key(tree)][section].update(values)


def _checkpoint(tree: Round, number: int, **values: Any) -> None:
    tree.document("checkpointing", number, "/0_per_epoch_stats.json")["1"]["save_ckpt3"].update(values)


def _give_metadata_key_twice(tree: Round) -> None:
    (path,) = [p for p in tree.files if p.startswith(tree.leaves("run")[2]) and p.endswith("_metadata.json")]
    tree.files[path] = _twice(json.dumps(tree.files[path]), '"exit_status": 1')


def _checkpoint_key_twice(tree: Round) -> None:
    path = f"{tree.leaves('checkpointing')[0]}/summary.json"
    tree.files[path] = _twice(json.dumps(tree.files[path]), '"num_hosts": 1')


def _copy_figures(tree: Round) -> None:
    tree.summary("run", 3)["metric"] = tree.summary("run", 4)["metric"]


def _keep_first_rank(tree: Round) -> None:
    for rank in range(1, 8):
        tree.drop(f"/{rank}_per_epoch_stats.json")


TIMED_CROSS_CHECKS: Final[Mapping[str, tuple[RuleTree[Round], ...]]] = MappingProxyType(
    {
        "rates.maximum": (run("half as much again", _raise(1.5)),),
        "utilization.maximum": (
            run("half as much again", do.metric(train_au_percentage=[150.0] * 5)),
            run("one epoch", do.metric(train_au_percentage=[97.0] * 4 + [101.0])),
        ),
        "rates.utilization": (
            run("all that is possible", _raise(1.04)),
            run("far less", _raise(0.6), WARNING),
            run(
                "more than busy for in the warm-up",
                lambda tree: raised(tree.summary("run", 0), 1.04),
                WARNING,
            ),
            run("far less in the warm-up", lambda tree: raised(tree.summary("run", 0), 0.6), WARNING),
        ),
        "rates.files": (
            run("a tenth more", _raise(1.1), WARNING),
            run("a tenth less", _raise(0.9), WARNING),
            run("half as much again in the warm-up", lambda tree: raised(tree.summary("run", 0), 1.5), PASS),
            run("no statistics", do.drop("_per_epoch_stats.json"), NA),
        ),
        "epochs.recorded": (
            run("none", do.replace("run", 2, "0_per_epoch_stats.json", {})),
            run("garbage", do.replace("run", 2, "0_per_epoch_stats.json", "{"), UNKNOWN),
        ),
        "times.recorded": (
            ckpt("half of a checkpoint", lambda tree: _checkpoint(tree, 0, duration=2.25)),
            run("shorter than it took", do.metadata(runtime=60.0), WARNING),
            run("without the tool's time", do.forget("runtime"), PASS),
        ),
        "runs.distinct": (run("figures of another", _copy_figures),),
        "runs.recorded": (
            run("files in the metadata", _parameter("dataset", num_files_train=500)),
            run("files as text", _parameter("dataset", num_files_train="28000"), PASS),
            run("files configured", do.config("dataset", num_files_train=500)),
            run("accelerators", do.args(num_accelerators=4)),
            run("processes", do.metadata(num_processes=4)),
            run("accelerator", do.metadata(accelerator="mi355")),
        ),
        "parameters.recorded": (
            run("batch in override_parameters", do.metadata(override_parameters={"reader.batch_size": "1"})),
            run("batch in params", do.args(params=["reader.batch_size=1"])),
            run("batch in nested params", do.args(params=[["++workload.reader.batch_size=1"]])),
            run("batch in a mapping of params", do.args(params={"reader.batch_size": 1})),
            run("batch in the command", do.metadata(executed_command="x ++workload.reader.batch_size=1")),
            run("a quote in the command", do.metadata(executed_command="x '++workload.reader"), PASS),
            run("batch in the metadata", _parameter("reader", batch_size=1)),
            run("empty params", do.args(params=""), PASS),
            run("threads", do.args(params=["reader.read_threads=24"]), PASS),
            ckpt("fsync in the metadata", _parameter("checkpoint", "checkpointing", 0, fsync=False)),
        ),
        "hosts.memory": (
            run("less", do.summary(host_memory_GB=[64.0, 64.0])),
            run(
                "less than system_info",
                do.metadata(system_info={"total_memory_bytes": 600 << 30, "num_hosts": 2}),
                WARNING,
            ),
            run(
                "as system_info",
                do.metadata(system_info={"total_memory_bytes": 512 << 30, "num_hosts": 2}),
                PASS,
            ),
            run("caches", do.summary(potential_caching=[0, 1], data_size_per_host_GB=500.0), WARNING),
        ),
        "files.keys": (
            run("in metadata", _give_metadata_key_twice),
            ckpt("in a summary", _checkpoint_key_twice),
        ),
        "checkpoint.ranks": (
            once("the last", do.drop("/7_per_epoch_stats.json")),
            once("all but the first", _keep_first_rank),
            once(
                "on two hosts",
                do.together(do.drop("/7_per_epoch_stats.json"), do.summary("checkpointing", 0, num_hosts=2)),
                WARNING,
            ),
            once(
                "one too many",
                lambda tree: tree.files.update(
                    {f"{tree.leaves('checkpointing')[0]}/8_per_epoch_stats.json": {}}
                ),
            ),
        ),
    }
)
