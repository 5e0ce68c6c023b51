"""For each rule of v2.0 and v3.0 changes of a valid tree: some that keep the rule, some that break it.

Invariant: the verdict of a change is the worst one of its rule, whatever other rules find as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from tests.support.submission import tree_changes as do
from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_tree import (
    NUM_FILES,
    PAUSE,
    RECORD_BYTES,
    RUN_TIME,
    SYSTEM,
    Round,
    valid_checkpointing,
    valid_training,
)

from penstock.submission.finding import Verdict

if TYPE_CHECKING:
    from tests.support.submission.tree_changes import Change

TRAINING: Final = f"closed/acme/results/{SYSTEM}/training/unet3d"
CHECKPOINTING: Final = f"closed/acme/results/{SYSTEM}/checkpointing/llama3-8b"
DESCRIBED: Final = f"closed/acme/systems/{SYSTEM}.yaml"
_FAIL, _WARNING, _UNKNOWN, _PASS = Verdict.FAIL, Verdict.WARNING, Verdict.NOT_CHECKED, Verdict.PASS
_NA: Final = Verdict.NOT_APPLICABLE


def base_tree(base: str, edition: str) -> Round:
    """A valid tree: of a training, of a checkpointing in two invocations, or in one."""
    if base == "training":
        return valid_training(edition)
    return valid_checkpointing(edition, num_invocations=1 if base == "together" else 2)


def _of(base: Literal["training", "checkpointing", "together"]) -> Callable[..., RuleTree[Round]]:
    def case(
        name: str, change: Change, verdict: Verdict = _FAIL, editions: tuple[str, ...] = ("v2.0", "v3.0")
    ) -> RuleTree[Round]:
        return RuleTree(
            name=name, make=partial(base_tree, base), change=change, verdict=verdict, editions=editions
        )

    return case


_run, _ckpt, _once = _of("training"), _of("checkpointing"), _of("together")
_NEW: Final = ("v3.0",)
RESULTS: Final = f"{TRAINING}/run/results.json"


TIMED_TREES: Final[Mapping[str, tuple[RuleTree[Round], ...]]] = MappingProxyType(
    {
        "structure.names": (
            _run("dot, minus and underscore", do.rename(f"/{SYSTEM}", "/fast_1.0-b"), _PASS),
            _run("organisation", lambda tree: setattr(tree, "organisation", "acme & sons")),
            _run("system", do.rename(f"/{SYSTEM}", "/fast one")),
        ),
        "structure.divisions": (
            _run("a division in capitals", do.add("OPEN/notes.txt"), _PASS),
            _run("folder", do.add("backup/notes.txt")),
            _run("file", do.add("notes.txt"), _WARNING),
        ),
        "structure.submitter": (
            _run("a folder in capitals", do.add("closed/acme/RESULTS2/x"), _FAIL),
            _run("a hidden file", do.add("closed/acme/.gitignore"), _PASS),
            _run("folder", do.add("closed/acme/results_old/notes.txt")),
            _run("file", do.add("closed/acme/notes.txt"), _WARNING),
            _run("old code", do.add("closed/acme/code/main.py"), _FAIL, _NEW),
        ),
        "structure.folders": (
            _run("no systems", do.drop("/systems/")),
            _run("no code", do.drop("/code/"), _WARNING, ("v2.0",)),
        ),
        "structure.systems": (
            _run("a text beside them", do.add(f"closed/acme/systems/{SYSTEM}.md"), _PASS),
            _run("no document", do.drop(f"{SYSTEM}.pdf")),
            _ckpt("no description", do.drop(f"{SYSTEM}.yaml")),
            _run("a folder", do.add("closed/acme/systems/old/fast.yaml")),
            _run("another system's", do.add("closed/acme/systems/slow.yaml", {}), _WARNING),
        ),
        "structure.categories": (
            _run("in capitals", do.add(f"closed/acme/results/{SYSTEM}/KV_Cache/x/notes"), _PASS),
            _run("misspelt", do.add(f"closed/acme/results/{SYSTEM}/trainings/x")),
        ),
        "structure.phases": (
            _run("no datasize", do.drop("/datasize/"), _PASS),
            _run("no datagen", do.drop("/datagen/")),
            _run("a folder", do.add(f"{TRAINING}/old/notes.txt")),
        ),
        "structure.stray": (
            _run("results.csv", do.add(f"{TRAINING}/run/results.csv"), _PASS),
            _run("a hidden file", do.add(f"{TRAINING}/run/.DS_Store"), _PASS),
            _run("a file", do.add(f"{TRAINING}/run/notes.txt"), _WARNING),
            _ckpt("a folder", do.add(f"{CHECKPOINTING}/old/notes.txt"), _WARNING),
        ),
        "system.schema": (
            _run("a port that is down", do.take_port_down, _PASS, _NEW),
            _run("a value", lambda tree: tree.system().update(deployment="basement"), _FAIL, _NEW),
            _ckpt("a key", do.solution(friendly="yes"), _FAIL, _NEW),
            _run(
                "a port", lambda tree: tree.system()["clients"][0]["networking"][0].pop("speed"), _FAIL, _NEW
            ),
            _run("not YAML", do.add(DESCRIBED, "a: [1"), _UNKNOWN, _NEW),
        ),
        "system.name": (_run("another name", do.solution(submission_name="faster"), _FAIL, _NEW),),
        "system.hosts": (
            _run("memory within the tolerance", do.summary(host_memory_GB=[281.0, 281.0]), _PASS, _NEW),
            _run("too little memory", do.summary(host_memory_GB=[229.0, 231.0]), _FAIL, _NEW),
            _ckpt("one host for one", do.capability(multi_host=False), _PASS, _NEW),
            _ckpt("not described", do.drop(f"{SYSTEM}.yaml"), _UNKNOWN, _NEW),
            _run("of some hosts", do.metadata(cluster_information={"is_partial": True}), _UNKNOWN, _NEW),
            _run("hosts", do.summary(num_hosts=4), _FAIL, _NEW),
            _run("memory", do.summary(host_memory_GB=[512.0, 512.0]), _FAIL, _NEW),
            _run("one alone", do.capability(multi_host=False), _FAIL, _NEW),
            _run("no list", do.no_client_list, _UNKNOWN, _NEW),
        ),
        "code.pointer": (
            _run("no pointer", do.without("run", 1, ".mlps-code-image"), _FAIL, _NEW),
            _run("no image", do.drop("code-images/code-"), _FAIL, _NEW),
            _ckpt(
                "another image",
                do.replace("checkpointing", 0, ".mlps-code-image", f"md5-tree-v2:{'a' * 32}"),
                _FAIL,
                _NEW,
            ),
            _run("garbage", do.replace("run", 1, ".mlps-code-image", "somewhere"), _UNKNOWN, _NEW),
        ),
        "code.image": (
            _run("no pointer", do.drop(".mlps-code-image"), _UNKNOWN, _NEW),
            _run("changed", do.change_code, _FAIL, _NEW),
            _run("added", do.add_code, _FAIL, _NEW),
            _run("renamed", do.another_digest, _FAIL, _NEW),
            _run("another digest", do.another_algorithm, _UNKNOWN, _NEW),
        ),
        "code.pool": (_run("an orphan", do.add("code-images/code-01234567/main.py"), _WARNING, _NEW),),
        "provenance.run": (
            _run("declared", do.without("run", 1, "provenance.json"), _FAIL, _NEW),
            _ckpt(
                "another image",
                do.file("checkpointing", 1, "provenance.json", tool={"code_image": "md5-tree-v2:0"}),
                _FAIL,
                _NEW,
            ),
        ),
        "provenance.edition": (
            _run("with its v", do.file("run", 1, "provenance.json", rules_edition="v3.0"), _PASS, _NEW),
            _run("another", do.file("run", 1, "provenance.json", rules_edition="4.0"), _FAIL, _NEW),
        ),
        "provenance.manifest": (
            _run(
                "not listed",
                lambda tree: tree.files["closed/acme/submission.yaml"]["runs"].pop(),
                _FAIL,
                _NEW,
            ),
            _run("not there", do.drop("/run/20260701_114000/"), _FAIL, _NEW),
            _ckpt(
                "edition",
                lambda tree: tree.files["closed/acme/submission.yaml"].update(rules_edition="2.0"),
                _FAIL,
                _NEW,
            ),
            _run("garbage", do.add("closed/acme/submission.yaml", "runs: ["), _UNKNOWN, _NEW),
        ),
        "runs.metadata": (
            _run("capitals", do.metadata(model="UNET3D"), _PASS),
            _run("another workload", do.metadata(model="retinanet")),
            _run("another command", do.metadata(command="datagen")),
            _ckpt("another time", do.metadata("checkpointing", 0, run_datetime="20260101_000000")),
            _run("another benchmark", do.metadata(benchmark_type="checkpointing")),
            _run("no command", do.forget("command"), _UNKNOWN),
            _run(
                "no metadata",
                lambda tree: tree.drop("120000_metadata") or tree.drop("run/20260701_112000/training_"),
                _UNKNOWN,
            ),
        ),
        "runs.exit": (
            _run("as text", do.metadata(exit_status="0"), _PASS),
            _run("failed", do.metadata(exit_status=1)),
            _ckpt("killed", do.metadata("checkpointing", 1, exit_status=-9)),
            _run("unsaid", do.forget("exit_status"), _UNKNOWN),
        ),
        "runs.division": (
            _run("small letters", do.metadata(verification="closed"), _PASS),
            _run("in open", do.together(do.hand_in_as_open, do.metadata(verification="Open")), _PASS),
            _run("better than open", do.hand_in_as_open, _PASS),
            _run("open", do.metadata(verification="OPEN")),
            _run("the tool's own verdict", do.metadata(verification="INVALID"), _WARNING),
        ),
        "datagen.number": (
            _run("two", do.second_datagen),
            _run("none", do.drop("/datagen/")),
        ),
        "datagen.files": (_run("no log", do.without("datagen", 0, "dlio.log")),),
        "runs.number": (
            _run("five", do.drop("/run/20260701_114000/")),
            _run("none", do.drop("/run/2026"), _UNKNOWN),
        ),
        "runs.files": (
            _run("no log", do.without("run", 2, "training_run.stdout.log")),
            _run("no summary", do.without("run", 2, "summary.json")),
            _ckpt("no output", do.without("checkpointing", 1, "0_output.json")),
        ),
        "runs.configuration": (
            _run("no hydra", do.without("run", 2, "dlio_config/hydra.yaml")),
            _ckpt("too much", do.replace("checkpointing", 0, "dlio_config/notes.txt", "text")),
            _run("of datagen", do.without("datagen", 0, "dlio_config/hydra.yaml")),
        ),
        "runs.results": (
            _run("none", do.drop("/run/results.json")),
            _ckpt("none", do.drop("llama3-8b/results.json")),
            _run("garbage", do.add(f"{TRAINING}/run/results.json", "{"), _UNKNOWN),
        ),
        "runs.workload": (
            _run("a folder in capitals", do.rename("/unet3d/", "/UNET3D/"), _PASS),
            _run("another edition's", lambda tree: do.set_workload(tree, "unet3d_v100")),
            _run("another folder's", lambda tree: do.set_workload(tree, f"dlrm_{do.kind(tree)}")),
            _run("misplaced", do.rename("/unet3d/", "/other/")),
            _ckpt("another model", do.metadata("checkpointing", 0, model="llama2")),
            _run("unsaid", lambda tree: tree.overrides("run", 1).pop(0), _UNKNOWN),
        ),
        "runs.same": (
            _run("accelerators", do.summary(num_accelerators=16)),
            _run("files", do.summary(num_files_train=NUM_FILES + 1)),
            _ckpt("accelerators", do.summary("checkpointing", 1, num_accelerators=16)),
        ),
        "runs.pauses": (
            _run("none at all", do.shift("run", 5, -PAUSE), _PASS),
            _run("a long pause", do.shift("run", 5, RUN_TIME)),
            _run("an overlap", do.shift("run", 5, timedelta(minutes=-3))),
            _run(
                "no date",
                do.together(do.forget("invocation_start_time"), do.summary(start="yesterday")),
                _UNKNOWN,
            ),
        ),
        "paths.set": (
            _run("equal", do.args(results_dir="/mnt/data/")),
            _run("not set", do.args(data_dir=None)),
            _ckpt("equal", do.args("checkpointing", 0, results_dir="/mnt/checkpoints")),
            _run("unsaid", lambda tree: tree.metadata("run", 2)["args"].pop("results_dir"), _UNKNOWN),
        ),
        "paths.filesystems": (
            _run(
                "objects",
                lambda tree: [
                    m["args"].update(data_dir="s3://b/d") for m in tree.documents("run", "_metadata.json")
                ],
                _NA,
            ),
            _run("a file URI", do.args(data_dir="file:///mnt/data"), _PASS),
            _run("one", do.file("run", 1, "fs_separation.json", same_filesystem=True)),
            _ckpt("one", do.file("checkpointing", 1, "fs_separation.json", same_filesystem=True)),
            _run("unsaid", do.without("run", 1, "fs_separation.json"), _UNKNOWN),
        ),
        "dataset.sized": (
            _run("fewer sized", lambda tree: do.set_sized(tree, NUM_FILES - 1), _PASS, _NEW),
            _run("never", do.drop("/datasize/"), _FAIL, _NEW),
            _run("too few", lambda tree: do.set_sized(tree, NUM_FILES + 1), _FAIL, _NEW),
            _run("another folder", do.args("datasize", 0, data_dir="/mnt/other"), _FAIL, _NEW),
            _run("another accelerator", do.metadata("datasize", 0, accelerator="mi355"), _FAIL, _NEW),
        ),
        "dataset.generated": (
            _run("more generated", lambda tree: do.set_generated(tree, NUM_FILES + 1), _PASS),
            _run("too few", lambda tree: do.set_generated(tree, NUM_FILES - 1)),
            _run("other folders", do.config("dataset", num_subfolders_train=4)),
            _run("unsaid", lambda tree: tree.metadata("datagen")[do.key(tree)].pop("dataset"), _UNKNOWN),
        ),
        "dataset.bytes": (
            _run(
                "long records",
                do.config("dataset", "datagen", 0, record_length_bytes=RECORD_BYTES + 1),
                _PASS,
            ),
            _run("short records", do.config("dataset", "datagen", 0, record_length_bytes=1)),
            _run("no generation", do.drop("/datagen/"), _UNKNOWN),
        ),
        "sizing.steps": (
            _run("one file more", do.summary(num_files_train=NUM_FILES + 1), _PASS),
            _run("no samples", do.summary(num_samples_per_file=0), _UNKNOWN),
            _run("one file short", do.summary(num_files_train=NUM_FILES - 1)),
            _run("no batch", lambda tree: tree.config("run", 2)["reader"].pop("batch_size"), _UNKNOWN),
        ),
        "sizing.memory": (
            _run("of some hosts", do.metadata(cluster_information={"is_partial": True}), _UNKNOWN),
            _run("larger memory", do.summary(host_memory_GB=[512.0, 512.0])),
            _run("no memory", do.summary(host_memory_GB=[0.0, 0.0]), _UNKNOWN),
            _run(
                "no length",
                lambda tree: tree.config("run", 2)["dataset"].pop("record_length_bytes"),
                _UNKNOWN,
            ),
        ),
        "hosts.accelerators": (
            _run("two on two hosts", do.summary(num_accelerators=2), _PASS),
            _run("two", do.summary(num_hosts=1, num_accelerators=2), _WARNING),
        ),
        "hosts.single": (
            _run("one named", do.together(do.summary(num_hosts=1), do.args(hosts=["node1"])), _PASS),
            _run("one named as text", do.together(do.summary(num_hosts=1), do.args(hosts="node1")), _PASS),
            _run("none named", do.together(do.summary(num_hosts=1), do.args(hosts=None)), _PASS),
            _run("two named", do.summary(num_hosts=1)),
            _run("two named as text", do.together(do.summary(num_hosts=1), do.args(hosts="node1,node2"))),
        ),
        "hosts.equal": (
            _run("eight on two", do.summary(num_accelerators=8), _PASS),
            _run("nine on two", do.summary(num_accelerators=9)),
            _run("no host", do.summary(num_hosts=0), _UNKNOWN),
        ),
        "hosts.alike": (
            _run("half as much again", do.summary(host_memory_GB=[256.0, 384.0]), _PASS),
            _run("an empty entry", do.summary(host_cpu_count=[0, 64]), _WARNING),
            _run("of some hosts", do.metadata(cluster_information={"is_partial": True}), _UNKNOWN),
            _run("memory", do.summary(host_memory_GB=[256.0, 512.0]), _WARNING),
            _run("cores", do.summary(host_cpu_count=[32, 64]), _WARNING),
            _run("doubled entries", do.summary(host_memory_GB=[256.0] * 4), _WARNING),
        ),
        "utilization.minimum": (
            _run("a little less", do.metric(train_au_percentage=[90.0] * 4 + [89.9])),
            _run("misspelt", do.misspelt, _UNKNOWN),
            _run("the warm-up", do.metric(number=0, train_au_percentage=[50.0] * 5), _WARNING),
        ),
        "utilization.stated": (
            _run("fail", do.metric(train_au_meet_expectation="fail")),
            _run("the warm-up", do.metric(number=0, train_au_meet_expectation="fail"), _WARNING),
        ),
        "means.epochs": (
            _run("the warm-up", do.metric(number=0, train_au_percentage=[]), _WARNING),
            _run("none", do.metric(train_au_percentage=[])),
            _run("too few", do.metric(train_au_percentage=[97.0] * 4), _WARNING),
        ),
        "means.run": (
            _run("utilization", do.metric(train_au_mean_percentage=97.001)),
            _run("samples", do.metric(train_throughput_mean_samples_per_second=30.0)),
            _run("bytes", do.metric(train_io_mean_MB_per_second=1e6)),
        ),
        "means.checkpoint": (
            _ckpt("rate", do.metric("checkpointing", 0, save_checkpoint_io_mean_GB_per_second=26.2)),
            _ckpt("duration", do.metric("checkpointing", 1, load_checkpoint_duration_mean_seconds=1.0)),
            _once("no statistics", lambda tree: tree.drop("0_per_epoch_stats.json"), _UNKNOWN),
        ),
        "means.results": (
            _run(
                "overall", lambda tree: tree.files[RESULTS].update(overall={"train_au_mean_percentage": 1.0})
            ),
            _run("at the top", lambda tree: tree.files[RESULTS].update(train_au_mean_percentage=1.0)),
            _run("nothing known", do.add(RESULTS, {"metrics": {}}), _NA),
            _run("with the warm-up", do.results(train_throughput_mean_samples_per_second=20.25)),
            _ckpt("made up", do.results("llama3-8b", save_checkpoint_duration_mean_seconds=1.0)),
        ),
        "parameters.allowed": (
            _run("a free key", do.override("++workload.reader.read_threads=16"), _PASS),
            _run(
                "free in open",
                do.together(do.hand_in_as_open, do.override("++workload.dataset.format=hdf5")),
                _PASS,
            ),
            _run("batch", do.override("++workload.reader.batch_size=1")),
            _run("open's", do.override("++workload.dataset.format=hdf5")),
            _ckpt("model", do.override("++workload.model.num_layers=1", "checkpointing", 0)),
        ),
        "parameters.odirect": (
            _run("for unet3d", do.override("++workload.reader.odirect=True"), _PASS),
            _run(
                "switched off",
                do.together(
                    do.override("++workload.reader.odirect=False"),
                    lambda tree: do.set_workload(tree, f"other_{do.kind(tree)}"),
                ),
                _PASS,
            ),
            _run(
                "another workload",
                do.together(
                    do.override("++workload.reader.odirect=True"),
                    lambda tree: do.set_workload(tree, f"other_{do.kind(tree)}"),
                ),
            ),
        ),
        "parameters.configuration": (
            _run("as text", do.config("reader", batch_size="7"), _PASS),
            _run("as a real number", do.config("reader", batch_size=7.0), _PASS),
            _run("free in open", do.together(do.hand_in_as_open, do.config("dataset", format="hdf5")), _PASS),
            _run("unknown", lambda tree: do.set_workload(tree, f"other_{do.kind(tree)}"), _UNKNOWN),
            _run("batch", do.config("reader", batch_size=1)),
            _run("time", do.config("train", computation_time=9.0)),
            _ckpt("layers", do.config("model", "checkpointing", 0, num_layers=1)),
            _run("no batch", lambda tree: tree.config("run", 2)["reader"].pop("batch_size"), _UNKNOWN),
        ),
        "checkpoint.invocations": (
            _once("any number in open", do.together(do.hand_in_as_open, do.invocations((3, 4))), _PASS),
            _ckpt("none", do.drop("llama3-8b/2026"), _UNKNOWN),
            _ckpt("three", do.third_invocation),
            _ckpt("two of both", do.invocations((10, 10), (10, 10))),
            _ckpt("read first", do.invocations((0, 10), (10, 0))),
            _ckpt("overlap", do.shift("checkpointing", 1, timedelta(minutes=-30))),
        ),
        "checkpoint.counts": (
            _ckpt("minus one is none", do.args("checkpointing", 0, num_checkpoints_read=-1), _PASS),
            _ckpt("none of both", do.invocations((0, 0), (0, 10))),
            _once("no statistics", lambda tree: tree.drop("0_per_epoch_stats.json"), _UNKNOWN),
            _once("five", do.args("checkpointing", 0, num_checkpoints_write=5)),
            _ckpt(
                "one is missing",
                lambda tree: tree.document("checkpointing", 0, "0_per_epoch_stats.json")["1"].pop(
                    "save_ckpt3"
                ),
            ),
            _once(
                "unsaid",
                lambda tree: tree.metadata("checkpointing")["args"].pop("num_checkpoints_read"),
                _UNKNOWN,
            ),
        ),
        "checkpoint.gap": (
            _ckpt("no gap", do.shift("checkpointing", 1, timedelta(seconds=-20)), _PASS),
            _once("one invocation", do.drop("nothing"), _NA),
            _ckpt("none", do.drop("llama3-8b/2026"), _UNKNOWN),
            _ckpt("long", do.shift("checkpointing", 1, timedelta(seconds=11))),
            _ckpt("clocks", do.shift("checkpointing", 1, timedelta(seconds=-21)), _WARNING),
        ),
        "checkpoint.duration": (
            _ckpt("none", do.drop("llama3-8b/2026"), _UNKNOWN),
            _ckpt("clocks", do.shift("checkpointing", 1, timedelta(hours=-2)), _WARNING),
            _ckpt(
                "no date",
                do.together(
                    do.forget("invocation_end_time", "checkpointing", 1),
                    do.summary("checkpointing", 1, end="late"),
                ),
                _UNKNOWN,
            ),
        ),
        "checkpoint.remap": (
            _ckpt(
                "declared alone",
                do.capability(remap_time_in_seconds=20, simultaneous_read=False),
                _PASS,
                _NEW,
            ),
            _ckpt("not spent", do.capability(remap_time_in_seconds=60), _FAIL, _NEW),
            _ckpt("both declared", do.capability(remap_time_in_seconds=30), _WARNING, _NEW),
        ),
        "checkpoint.shared": (
            _ckpt("declared", do.summary("checkpointing", 0, num_hosts=2), _PASS, _NEW),
            _ckpt("one host", do.capability(simultaneous_write=False), _PASS, _NEW),
            _ckpt(
                "not declared",
                do.together(
                    do.summary("checkpointing", 0, num_hosts=2), do.capability(simultaneous_read=False)
                ),
                _WARNING,
                _NEW,
            ),
        ),
        "checkpoint.fsync": (
            _ckpt("as text", do.config("checkpoint", "checkpointing", 0, fsync="True"), _PASS),
            _ckpt("off", do.config("checkpoint", "checkpointing", 0, fsync=False)),
            _ckpt(
                "unsaid", lambda tree: tree.config("checkpointing", 0)["checkpoint"].pop("fsync"), _UNKNOWN
            ),
        ),
        "checkpoint.processes": (
            _ckpt(
                "none",
                do.together(
                    do.hand_in_as_open,
                    do.metadata("checkpointing", 0, num_processes=0),
                    do.summary("checkpointing", 0, num_accelerators=0),
                ),
            ),
            _ckpt(
                "twice the unit in open",
                do.together(
                    do.hand_in_as_open,
                    do.metadata("checkpointing", 0, num_processes=16),
                    do.summary("checkpointing", 0, num_accelerators=16),
                ),
                _PASS,
            ),
            _once("a whole subset", do.config("checkpoint", "checkpointing", 0, mode="Subset"), _PASS),
            _ckpt("of another model", do.metadata("checkpointing", 0, model="llama2"), _UNKNOWN),
            _ckpt("sixteen", do.metadata("checkpointing", 0, num_processes=16)),
            _ckpt("summary", do.summary("checkpointing", 0, num_accelerators=16)),
        ),
        "checkpoint.hosts": (
            _ckpt("five on one", do.summary("checkpointing", 0, num_accelerators=5), _PASS),
            _ckpt("open", do.hand_in_as_open, _NA),
            _ckpt("spread", do.summary("checkpointing", 0, num_hosts=4)),
            _ckpt("just four", do.summary("checkpointing", 0, num_hosts=2), _WARNING),
        ),
        "checkpoint.subset": (
            _ckpt("eight", do.config("checkpoint", "checkpointing", 0, mode="subset"), _PASS),
            _ckpt(
                "sixteen in open",
                do.together(
                    do.hand_in_as_open,
                    do.config("checkpoint", "checkpointing", 0, mode="subset"),
                    do.summary("checkpointing", 0, num_accelerators=16),
                ),
                _PASS,
            ),
            _ckpt(
                "sixteen",
                do.together(
                    do.config("checkpoint", "checkpointing", 0, mode="subset"),
                    do.summary("checkpointing", 0, num_accelerators=16),
                ),
            ),
            _ckpt(
                "by option",
                do.together(
                    do.args("checkpointing", 0, checkpoint_subset=True),
                    do.summary("checkpointing", 0, num_accelerators=4),
                ),
            ),
        ),
        "checkpoint.memory": (
            _ckpt("too much", do.metric("checkpointing", 0, checkpoint_size_GB=2000.0)),
            _ckpt("unknown", do.metadata("checkpointing", 0, accelerator="v100")),
            _ckpt("unsaid", do.forget("accelerator", "checkpointing", 0), _UNKNOWN),
        ),
        "checkpoint.ratio": (
            _ckpt("nothing written", do.invocations((0, 10), (0, 10)), _UNKNOWN),
            _ckpt(
                "of some hosts",
                do.metadata("checkpointing", 0, cluster_information={"is_partial": True}),
                _UNKNOWN,
            ),
            _ckpt("large memory", do.summary("checkpointing", 0, host_memory_GB=[512.0]), _WARNING),
        ),
        "checkpoint.size": (
            _once(
                "half of it for half of the ranks",
                do.together(
                    do.config("checkpoint", "checkpointing", 0, mode="subset"),
                    do.summary("checkpointing", 0, num_accelerators=4),
                    do.metric("checkpointing", 0, checkpoint_size_GB=52.4),
                ),
                _PASS,
            ),
            _ckpt("small", do.metric("checkpointing", 0, checkpoint_size_GB=10.0), _WARNING),
        ),
        "order.left_out": (
            _run("seven too many", do.more_samples, _WARNING),
            _run("no record", do.drop("/run.json"), _NA),
            _run("no ranks", do.first_epoch(ranks=[]), _UNKNOWN),
            _run("no epochs", do.record(epochs=[]), _UNKNOWN),
            _run("seven", do.fewer_samples, _WARNING),
            _run("no plan", lambda tree: tree.document("run", 2, "run.json").pop("plan"), _UNKNOWN),
        ),
        "order.shuffled": (
            _run("one order that was asked for", do.keep_order, _PASS),
            _run("no order that was asked for", do.unshuffled, _PASS),
            _run("no record", do.drop("/run.json"), _NA),
            _run("off", do.record(shuffle="off"), _WARNING),
            _run("one order", do.same_epochs, _WARNING),
        ),
        "order.once": (
            _run("no record", do.drop("/run.json"), _NA),
            _run("no samples", do.record(item_samples=0), _UNKNOWN),
            _run("no digest", do.first_epoch(left_out={"samples": 0, "digest": "none"}), _UNKNOWN),
            _run("twice", do.sample_twice, _WARNING),
        ),
        "scope.benchmark": (
            _run("vector search", do.rename("/training/", "/vector_database/"), _UNKNOWN),
            _ckpt("key-value cache", do.rename("/checkpointing/", "/kv_cache/"), _UNKNOWN),
        ),
    }
)
"""By rule."""
