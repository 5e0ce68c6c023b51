"""For each rule of v2.0 and v3.0 changes of a valid tree: some that keep the rule, some that break it.

Invariant: the verdict of a change is the worst one of its rule, whatever other rules find as well.
"""

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final

from tests.support.submission import tree_changes as do
from tests.support.submission.checkpoint_rule_trees import CHECKPOINT_TREES
from tests.support.submission.cross_check_trees import TIMED_CROSS_CHECKS
from tests.support.submission.query_rule_trees import QUERY_TREES
from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_cases import (
    FAIL,
    NA,
    NEW,
    PASS,
    STRICT,
    UNKNOWN,
    WARNING,
    ckpt,
    once,
    run,
    softened,
)
from tests.support.submission.timed_tree import (
    NUM_FILES,
    PAUSE,
    RECORD_BYTES,
    RUN_TIME,
    SYSTEM,
    Round,
)

TRAINING: Final = f"closed/acme/results/{SYSTEM}/training/unet3d"
CHECKPOINTING: Final = f"closed/acme/results/{SYSTEM}/checkpointing/llama3-8b"
DESCRIBED: Final = f"closed/acme/systems/{SYSTEM}.yaml"
RESULTS: Final = f"{TRAINING}/run/results.json"


_TREES: Final[Mapping[str, tuple[RuleTree[Round], ...]]] = MappingProxyType(
    {
        **CHECKPOINT_TREES,
        **TIMED_CROSS_CHECKS,
        "structure.names": (
            run("dot, minus and underscore", do.rename(f"/{SYSTEM}", "/fast_1.0-b"), PASS),
            run("organisation", lambda tree: setattr(tree, "organisation", "acme & sons")),
            run("system", do.rename(f"/{SYSTEM}", "/fast one")),
        ),
        "structure.divisions": (
            run("a division in capitals", do.add("OPEN/notes.txt"), PASS),
            run("folder", do.add("backup/notes.txt")),
            run("file", do.add("notes.txt"), WARNING),
        ),
        "structure.submitter": (
            run("a folder in capitals", do.add("closed/acme/RESULTS2/x"), FAIL),
            run("a hidden file", do.add("closed/acme/.gitignore"), PASS),
            run("folder", do.add("closed/acme/results_old/notes.txt")),
            run("file", do.add("closed/acme/notes.txt"), WARNING),
            run("old code", do.add("closed/acme/code/main.py"), FAIL, NEW),
        ),
        "structure.folders": (
            run("no systems", do.drop("/systems/")),
            run("no code", do.drop("/code/"), WARNING, ("v2.0",)),
        ),
        "structure.systems": (
            run("a text beside them", do.add(f"closed/acme/systems/{SYSTEM}.md"), PASS),
            run("no document", do.drop(f"{SYSTEM}.pdf")),
            ckpt("no description", do.drop(f"{SYSTEM}.yaml")),
            run("a folder", do.add("closed/acme/systems/old/fast.yaml")),
            run("another system's", do.add("closed/acme/systems/slow.yaml", {}), WARNING),
        ),
        "structure.categories": (
            run("in capitals", do.add(f"closed/acme/results/{SYSTEM}/KV_Cache/x/notes"), PASS),
            run("misspelt", do.add(f"closed/acme/results/{SYSTEM}/trainings/x")),
        ),
        "structure.phases": (
            run("no datasize", do.drop("/datasize/"), PASS, ("v2.0",)),
            *softened(run, "no datasize", do.drop("/datasize/")),
            run("no datagen", do.drop("/datagen/")),
            run("a folder", do.add(f"{TRAINING}/old/notes.txt")),
        ),
        "structure.stray": (
            run("results.csv", do.add(f"{TRAINING}/run/results.csv"), PASS),
            run("a hidden file", do.add(f"{TRAINING}/run/.DS_Store"), PASS),
            run("a file", do.add(f"{TRAINING}/run/notes.txt"), WARNING),
            ckpt("a folder", do.add(f"{CHECKPOINTING}/old/notes.txt"), WARNING),
        ),
        "system.schema": (
            run("a port that is down", do.take_port_down, PASS, NEW),
            run("a value", lambda tree: tree.system().update(deployment="basement"), FAIL, NEW),
            ckpt("a key", do.solution(friendly="yes"), FAIL, NEW),
            run("a port", lambda tree: tree.system()["clients"][0]["networking"][0].pop("speed"), FAIL, NEW),
            run("not YAML", do.add(DESCRIBED, "a: [1"), UNKNOWN, NEW),
        ),
        "system.name": (run("another name", do.solution(submission_name="faster"), FAIL, NEW),),
        "system.hosts": (
            run("memory within the tolerance", do.summary(host_memory_GB=[281.0, 281.0]), PASS, NEW),
            run("too little memory", do.summary(host_memory_GB=[229.0, 231.0]), FAIL, NEW),
            ckpt("one host for one", do.capability(multi_host=False), PASS, NEW),
            ckpt("not described", do.drop(f"{SYSTEM}.yaml"), UNKNOWN, NEW),
            run("of some hosts", do.metadata(cluster_information={"is_partial": True}), UNKNOWN, NEW),
            run("hosts", do.summary(num_hosts=4), FAIL, NEW),
            run("memory", do.summary(host_memory_GB=[512.0, 512.0]), FAIL, NEW),
            run("one alone", do.capability(multi_host=False), FAIL, NEW),
            run("no list", do.no_client_list, UNKNOWN, NEW),
        ),
        "code.pointer": (
            run("no pointer", do.without("run", 1, ".mlps-code-image"), FAIL, NEW),
            run("no image", do.drop("code-images/code-"), FAIL, NEW),
            ckpt(
                "another image",
                do.replace("checkpointing", 0, ".mlps-code-image", f"md5-tree-v2:{'a' * 32}"),
                FAIL,
                NEW,
            ),
            run("garbage", do.replace("run", 1, ".mlps-code-image", "somewhere"), UNKNOWN, NEW),
        ),
        "code.image": (
            run("no pointer", do.drop(".mlps-code-image"), UNKNOWN, NEW),
            *softened(run, "changed", do.change_code),
            *softened(run, "added", do.add_code),
            run("emptied", do.empty_code, FAIL, NEW),
            run("renamed", do.another_digest, FAIL, NEW),
            run("another digest", do.another_algorithm, UNKNOWN, NEW),
        ),
        "code.pool": (run("an orphan", do.add("code-images/code-01234567/main.py"), WARNING, NEW),),
        "provenance.run": (
            run("declared", do.without("run", 1, "provenance.json"), FAIL, NEW),
            ckpt(
                "another image",
                do.file("checkpointing", 1, "provenance.json", tool={"code_image": "md5-tree-v2:0"}),
                FAIL,
                NEW,
            ),
        ),
        "provenance.edition": (
            run("with its v", do.file("run", 1, "provenance.json", rules_edition="v3.0"), PASS, NEW),
            run("another", do.file("run", 1, "provenance.json", rules_edition="4.0"), FAIL, NEW),
        ),
        "provenance.manifest": (
            run(
                "not listed",
                lambda tree: tree.files["closed/acme/submission.yaml"]["runs"].pop(),
                FAIL,
                NEW,
            ),
            run("not there", do.drop("/run/20260701_114000/"), FAIL, NEW),
            ckpt(
                "edition",
                lambda tree: tree.files["closed/acme/submission.yaml"].update(rules_edition="2.0"),
                FAIL,
                NEW,
            ),
            run("garbage", do.add("closed/acme/submission.yaml", "runs: ["), UNKNOWN, NEW),
        ),
        "runs.metadata": (
            run("capitals", do.metadata(model="UNET3D"), PASS),
            run("another workload", do.metadata(model="retinanet")),
            run("another command", do.metadata(command="datagen")),
            ckpt("another time", do.metadata("checkpointing", 0, run_datetime="20260101_000000")),
            run("another benchmark", do.metadata(benchmark_type="checkpointing")),
            run("no command", do.forget("command"), UNKNOWN),
            run(
                "no metadata",
                lambda tree: tree.drop("120000_metadata") or tree.drop("run/20260701_112000/training_"),
                UNKNOWN,
            ),
        ),
        "runs.exit": (
            run("as text", do.metadata(exit_status="0"), PASS),
            run("failed", do.metadata(exit_status=1)),
            ckpt("killed", do.metadata("checkpointing", 1, exit_status=-9)),
            run("unsaid in one", do.forget("exit_status"), PASS),
        ),
        "runs.division": (
            run("small letters", do.metadata(verification="closed"), PASS),
            run("in open", do.together(do.hand_in_as_open, do.metadata(verification="Open")), PASS),
            run("better than open", do.hand_in_as_open, PASS),
            run("open", do.metadata(verification="OPEN")),
            run("the tool's own verdict", do.metadata(verification="INVALID"), WARNING),
        ),
        "datagen.number": (
            run("two", do.second_datagen),
            run("none", do.drop("/datagen/")),
        ),
        "datagen.files": (run("no log", do.without("datagen", 0, "dlio.log")),),
        "runs.number": (
            run("five", do.drop("/run/20260701_114000/")),
            run("none", do.drop("/run/2026"), UNKNOWN),
        ),
        "runs.files": (
            run("no log", do.without("run", 2, "training_run.stdout.log")),
            run("no summary", do.without("run", 2, "summary.json")),
            ckpt("no output", do.without("checkpointing", 1, "0_output.json")),
        ),
        "runs.configuration": (
            run("no hydra", do.without("run", 2, "dlio_config/hydra.yaml")),
            ckpt("too much", do.replace("checkpointing", 0, "dlio_config/notes.txt", "text")),
            run("of datagen", do.without("datagen", 0, "dlio_config/hydra.yaml")),
        ),
        "runs.results": (
            run("none", do.drop("/run/results.json")),
            ckpt("none", do.drop("llama3-8b/results.json")),
            run("garbage", do.add(f"{TRAINING}/run/results.json", "{"), UNKNOWN),
        ),
        "runs.workload": (
            run("a folder in capitals", do.rename("/unet3d/", "/UNET3D/"), PASS),
            run("another edition's", lambda tree: do.set_workload(tree, "unet3d_v100")),
            run("another folder's", lambda tree: do.set_workload(tree, f"dlrm_{do.kind(tree)}")),
            run("misplaced", do.rename("/unet3d/", "/other/")),
            ckpt("another model", do.metadata("checkpointing", 0, model="llama2")),
            run("unsaid", lambda tree: tree.overrides("run", 1).pop(0), UNKNOWN),
        ),
        "runs.same": (
            run("accelerators", do.summary(num_accelerators=16)),
            run("files", do.summary(num_files_train=NUM_FILES + 1)),
            ckpt("accelerators", do.summary("checkpointing", 1, num_accelerators=16)),
        ),
        "runs.pauses": (
            run("none at all", do.shift("run", 5, -PAUSE), PASS),
            run("a long pause", do.shift("run", 5, RUN_TIME)),
            run("an overlap", do.shift("run", 5, timedelta(minutes=-3))),
            run(
                "no date",
                do.together(do.forget("invocation_start_time"), do.summary(start="yesterday")),
                UNKNOWN,
            ),
        ),
        "paths.set": (
            run("equal", do.args(results_dir="/mnt/data/")),
            run("not set", do.args(data_dir=None)),
            ckpt("equal", do.args("checkpointing", 0, results_dir="/mnt/checkpoints")),
            run("unsaid", lambda tree: tree.metadata("run", 2)["args"].pop("results_dir"), UNKNOWN),
        ),
        "paths.filesystems": (
            run(
                "objects",
                lambda tree: [
                    m["args"].update(data_dir="s3://b/d") for m in tree.documents("run", "_metadata.json")
                ],
                NA,
            ),
            run("a file URI", do.args(data_dir="file:///mnt/data"), PASS),
            run("one", do.file("run", 1, "fs_separation.json", same_filesystem=True)),
            ckpt("one", do.file("checkpointing", 1, "fs_separation.json", same_filesystem=True)),
            run("unsaid in v2.0", do.without("run", 1, "fs_separation.json"), FAIL, ("v2.0",)),
            *softened(run, "unsaid", do.without("run", 1, "fs_separation.json")),
        ),
        "dataset.sized": (
            run("fewer sized", lambda tree: do.set_sized(tree, NUM_FILES - 1), PASS, NEW),
            *softened(run, "never", do.drop("/datasize/")),
            *softened(run, "too few", lambda tree: do.set_sized(tree, NUM_FILES + 1)),
            *softened(run, "another folder", do.args("datasize", 0, data_dir="/mnt/other")),
            *softened(run, "another accelerator", do.metadata("datasize", 0, accelerator="mi355")),
        ),
        "dataset.generated": (
            run("more generated", lambda tree: do.set_generated(tree, NUM_FILES + 1), PASS),
            run("too few in v2.0", lambda tree: do.set_generated(tree, NUM_FILES - 1), FAIL, ("v2.0",)),
            *softened(run, "too few", lambda tree: do.set_generated(tree, NUM_FILES - 1)),
            run("other folders", do.config("dataset", num_subfolders_train=4)),
            run("unsaid", lambda tree: tree.metadata("datagen")[do.key(tree)].pop("dataset"), UNKNOWN),
        ),
        "dataset.bytes": (
            run(
                "long records",
                do.config("dataset", "datagen", 0, record_length_bytes=RECORD_BYTES + 1),
                PASS,
            ),
            run("short records", do.config("dataset", "datagen", 0, record_length_bytes=1)),
            run("no generation", do.drop("/datagen/"), UNKNOWN),
        ),
        "sizing.steps": (
            run("one file more", do.summary(num_files_train=NUM_FILES + 1), PASS),
            run("no samples", do.summary(num_samples_per_file=0), UNKNOWN),
            run("one file short", do.summary(num_files_train=NUM_FILES - 1)),
            run("no batch", lambda tree: tree.config("run", 2)["reader"].pop("batch_size"), UNKNOWN),
        ),
        "sizing.memory": (
            run("of some hosts", do.metadata(cluster_information={"is_partial": True}), UNKNOWN),
            run("larger memory", do.summary(host_memory_GB=[512.0, 512.0])),
            run("whole GiB of two hosts", do.typed_memory(500.5), WARNING, NEW),
            run("whole GiB of two small hosts", do.typed_memory(50.9), FAIL, NEW),
            run("whole GiB, in earnest", do.typed_memory(500.5), FAIL, STRICT),
            run("no memory", do.summary(host_memory_GB=[0.0, 0.0]), UNKNOWN),
            run(
                "no length",
                lambda tree: tree.config("run", 2)["dataset"].pop("record_length_bytes"),
                UNKNOWN,
            ),
        ),
        "hosts.accelerators": (
            run("two on two hosts", do.summary(num_accelerators=2), PASS),
            run("two", do.summary(num_hosts=1, num_accelerators=2), WARNING),
        ),
        "hosts.single": (
            run("one named", do.together(do.summary(num_hosts=1), do.args(hosts=["node1"])), PASS),
            run("one named as text", do.together(do.summary(num_hosts=1), do.args(hosts="node1")), PASS),
            run("none named", do.together(do.summary(num_hosts=1), do.args(hosts=None)), PASS),
            run("two named", do.summary(num_hosts=1)),
            run("two named as text", do.together(do.summary(num_hosts=1), do.args(hosts="node1,node2"))),
        ),
        "hosts.equal": (
            run("eight on two", do.summary(num_accelerators=8), PASS),
            run("nine on two", do.summary(num_accelerators=9)),
            run("no host", do.summary(num_hosts=0), UNKNOWN),
        ),
        "hosts.alike": (
            run("half as much again", do.summary(host_memory_GB=[256.0, 384.0]), PASS),
            run("an empty entry", do.summary(host_cpu_count=[0, 64]), WARNING),
            run("of some hosts", do.metadata(cluster_information={"is_partial": True}), UNKNOWN),
            run("memory", do.summary(host_memory_GB=[256.0, 512.0]), WARNING),
            run("cores", do.summary(host_cpu_count=[32, 64]), WARNING),
            run("doubled entries", do.summary(host_memory_GB=[256.0] * 4), WARNING),
            run("doubled, alike in the metadata", do.doubled_memory(256, 256), PASS),
            run("doubled, unlike in the metadata", do.doubled_memory(256, 512), WARNING),
        ),
        "utilization.minimum": (
            run("a little less", do.metric(train_au_percentage=[90.0] * 4 + [89.9])),
            run("misspelt", do.misspelt, UNKNOWN),
            run("the warm-up", do.metric(number=0, train_au_percentage=[50.0] * 5), WARNING),
        ),
        "utilization.stated": (
            run("fail", do.metric(train_au_meet_expectation="fail")),
            run("the warm-up", do.metric(number=0, train_au_meet_expectation="fail"), WARNING),
        ),
        "means.epochs": (
            run("the warm-up", do.metric(number=0, train_au_percentage=[]), WARNING),
            run("none", do.metric(train_au_percentage=[])),
            run("too few", do.metric(train_au_percentage=[97.0] * 4), WARNING),
        ),
        "means.run": (
            run("utilization", do.metric(train_au_mean_percentage=97.001)),
            run("samples", do.metric(train_throughput_mean_samples_per_second=30.0)),
            run("bytes", do.metric(train_io_mean_MB_per_second=1e6)),
        ),
        "means.checkpoint": (
            ckpt("rate", do.metric("checkpointing", 0, save_checkpoint_io_mean_GB_per_second=26.2)),
            ckpt("duration", do.metric("checkpointing", 1, load_checkpoint_duration_mean_seconds=1.0)),
            once("no statistics", lambda tree: tree.drop("_per_epoch_stats.json"), UNKNOWN),
        ),
        "means.results": (
            run(
                "overall", lambda tree: tree.files[RESULTS].update(overall={"train_au_mean_percentage": 1.0})
            ),
            run("at the top", lambda tree: tree.files[RESULTS].update(train_au_mean_percentage=1.0)),
            run("nothing known", do.add(RESULTS, {"metrics": {}}), NA),
            run("with the warm-up", do.results(train_throughput_mean_samples_per_second=328.65)),
            ckpt("made up", do.results("llama3-8b", save_checkpoint_duration_mean_seconds=1.0)),
        ),
        "parameters.allowed": (
            run("a free key", do.override("++workload.reader.read_threads=16"), PASS),
            run(
                "free in open",
                do.together(do.hand_in_as_open, do.override("++workload.dataset.format=hdf5")),
                PASS,
            ),
            run("batch", do.override("++workload.reader.batch_size=1")),
            run("open's", do.override("++workload.dataset.format=hdf5")),
            ckpt("model", do.override("++workload.model.num_layers=1", "checkpointing", 0)),
        ),
        "parameters.odirect": (
            run("for unet3d", do.override("++workload.reader.odirect=True"), PASS),
            run(
                "switched off",
                do.together(
                    do.override("++workload.reader.odirect=False"),
                    lambda tree: do.set_workload(tree, f"other_{do.kind(tree)}"),
                ),
                PASS,
            ),
            run(
                "another workload",
                do.together(
                    do.override("++workload.reader.odirect=True"),
                    lambda tree: do.set_workload(tree, f"other_{do.kind(tree)}"),
                ),
            ),
        ),
        "parameters.configuration": (
            run("as text", do.config("reader", batch_size="7"), PASS),
            run("as a real number", do.config("reader", batch_size=7.0), PASS),
            run("free in open", do.together(do.hand_in_as_open, do.config("dataset", format="hdf5")), PASS),
            run("unknown", lambda tree: do.set_workload(tree, f"other_{do.kind(tree)}"), UNKNOWN),
            run("batch", do.config("reader", batch_size=1)),
            run("time", do.config("train", computation_time=9.0)),
            ckpt("layers", do.config("model", "checkpointing", 0, num_layers=1)),
            run("no batch", lambda tree: tree.config("run", 2)["reader"].pop("batch_size"), UNKNOWN),
        ),
        "order.left_out": (
            run("seven too many", do.more_samples, WARNING),
            run("no record", do.drop("/run.json"), NA),
            run("no ranks", do.first_epoch(ranks=[]), UNKNOWN),
            run("no epochs", do.record(epochs=[]), UNKNOWN),
            run("seven", do.fewer_samples, WARNING),
            run("no plan", lambda tree: tree.document("run", 2, "run.json").pop("plan"), UNKNOWN),
        ),
        "order.shuffled": (
            run("one order that was asked for", do.keep_order, PASS),
            run("no order that was asked for", do.unshuffled, PASS),
            run("no record", do.drop("/run.json"), NA),
            run("off", do.record(shuffle="off"), WARNING),
            run("one order", do.same_epochs, WARNING),
        ),
        "reads.memory": (
            run("no record", do.drop("/run.json"), PASS),
            run("from a drive", do.reads("pass"), PASS),
            run("from memory", do.reads("fail"), WARNING),
        ),
        "order.once": (
            run("no record", do.drop("/run.json"), NA),
            run("no samples", do.record(item_samples=0), UNKNOWN),
            run("no digest", do.first_epoch(left_out={"samples": 0, "digest": "none"}), UNKNOWN),
            run("twice", do.sample_twice, WARNING),
        ),
        "scope.benchmark": (
            run(
                "vector search",
                do.rename("/training/unet3d", "/vector_database/milvus/x"),
                UNKNOWN,
                ("v2.0",),
            ),
            ckpt("key-value cache", do.rename("/checkpointing/", "/kv_cache/"), UNKNOWN, ("v2.0",)),
        ),
        "runs.rehearsal": (
            run("a run", do.metadata(rehearsal={"scale": 0.001})),
            run("a data set", do.metadata("datagen", 0, rehearsal={"scale": 0.5})),
            run("of unknown scale", do.metadata(rehearsal={})),
            run("null", do.metadata(rehearsal=None), PASS),
            once("checkpoints", do.metadata("checkpointing", 0, rehearsal={"scale": 0.001})),
        ),
    }
)
TIMED_TREES: Final[Mapping[str, tuple[RuleTree[Round], ...]]] = MappingProxyType(
    {rule: (*_TREES.get(rule, ()), *QUERY_TREES.get(rule, ())) for rule in {**_TREES, **QUERY_TREES}}
)
"""By rule."""
