"""The trees of rules about checkpointing; see `timed_rule_trees`."""

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final

from tests.support.submission import tree_changes as do
from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_cases import FAIL, NA, NEW, PASS, UNKNOWN, WARNING, ckpt, once, softened
from tests.support.submission.timed_tree import SYSTEM, Round

CHECKPOINTING: Final = f"closed/acme/results/{SYSTEM}/checkpointing/llama3-8b"

CHECKPOINT_TREES: Final[Mapping[str, tuple[RuleTree[Round], ...]]] = MappingProxyType(
    {
        "checkpoint.invocations": (
            once("any number in open", do.together(do.hand_in_as_open, do.invocations((3, 4))), PASS),
            ckpt("none", do.drop("llama3-8b/2026"), UNKNOWN),
            ckpt("three", do.third_invocation),
            ckpt("two of both", do.invocations((10, 10), (10, 10))),
            ckpt("read first", do.invocations((0, 10), (10, 0))),
            ckpt("overlap", do.shift("checkpointing", 1, timedelta(minutes=-30))),
        ),
        "checkpoint.counts": (
            ckpt("minus one is none", do.args("checkpointing", 0, num_checkpoints_read=-1), PASS),
            ckpt("none of both", do.invocations((0, 0), (0, 10))),
            once("no statistics", lambda tree: tree.drop("_per_epoch_stats.json"), UNKNOWN),
            once("five", do.args("checkpointing", 0, num_checkpoints_write=5)),
            ckpt(
                "one is missing",
                lambda tree: tree.document("checkpointing", 0, "0_per_epoch_stats.json")["1"].pop(
                    "save_ckpt3"
                ),
            ),
            once(
                "unsaid",
                lambda tree: tree.metadata("checkpointing")["args"].pop("num_checkpoints_read"),
                UNKNOWN,
            ),
        ),
        "checkpoint.gap": (
            ckpt("no gap", do.shift("checkpointing", 1, timedelta(seconds=-20)), PASS),
            once("one invocation", do.drop("nothing"), NA),
            ckpt("none", do.drop("llama3-8b/2026"), UNKNOWN),
            ckpt("long in v2.0", do.shift("checkpointing", 1, timedelta(seconds=11)), FAIL, ("v2.0",)),
            *softened(ckpt, "long", do.shift("checkpointing", 1, timedelta(seconds=11))),
            ckpt("clocks", do.shift("checkpointing", 1, timedelta(seconds=-21)), WARNING),
        ),
        "checkpoint.duration": (
            ckpt("none", do.drop("llama3-8b/2026"), UNKNOWN),
            ckpt("clocks", do.shift("checkpointing", 1, timedelta(hours=-2)), WARNING),
            ckpt(
                "no date",
                do.together(
                    do.forget("invocation_end_time", "checkpointing", 1),
                    do.summary("checkpointing", 1, end="late"),
                ),
                UNKNOWN,
            ),
        ),
        "checkpoint.remap": (
            ckpt(
                "declared alone",
                do.capability(remap_time_in_seconds=20, simultaneous_read=False),
                PASS,
                NEW,
            ),
            ckpt("not spent", do.capability(remap_time_in_seconds=60), FAIL, NEW),
            ckpt("both declared", do.capability(remap_time_in_seconds=30), WARNING, NEW),
        ),
        "checkpoint.shared": (
            ckpt("declared", do.summary("checkpointing", 0, num_hosts=2), PASS, NEW),
            ckpt("one host", do.capability(simultaneous_write=False), PASS, NEW),
            ckpt(
                "not declared",
                do.together(
                    do.summary("checkpointing", 0, num_hosts=2), do.capability(simultaneous_read=False)
                ),
                WARNING,
                NEW,
            ),
        ),
        "checkpoint.fsync": (
            ckpt("as text", do.config("checkpoint", "checkpointing", 0, fsync="True"), PASS),
            ckpt("off", do.config("checkpoint", "checkpointing", 0, fsync=False)),
            ckpt("unsaid", lambda tree: tree.config("checkpointing", 0)["checkpoint"].pop("fsync"), UNKNOWN),
        ),
        "checkpoint.processes": (
            ckpt(
                "none",
                do.together(
                    do.hand_in_as_open,
                    do.metadata("checkpointing", 0, num_processes=0),
                    do.summary("checkpointing", 0, num_accelerators=0),
                ),
            ),
            ckpt(
                "twice the unit in open",
                do.together(
                    do.hand_in_as_open,
                    do.metadata("checkpointing", 0, num_processes=16),
                    do.summary("checkpointing", 0, num_accelerators=16),
                ),
                PASS,
            ),
            once("a whole subset", do.config("checkpoint", "checkpointing", 0, mode="Subset"), PASS),
            ckpt("of another model", do.metadata("checkpointing", 0, model="llama2"), UNKNOWN),
            ckpt("sixteen", do.metadata("checkpointing", 0, num_processes=16)),
            ckpt("summary", do.summary("checkpointing", 0, num_accelerators=16)),
        ),
        "checkpoint.hosts": (
            ckpt("five on one", do.summary("checkpointing", 0, num_accelerators=5), PASS),
            ckpt("open", do.hand_in_as_open, NA),
            ckpt("spread", do.summary("checkpointing", 0, num_hosts=4)),
            ckpt("just four", do.summary("checkpointing", 0, num_hosts=2), WARNING),
        ),
        "checkpoint.subset": (
            ckpt("eight", do.config("checkpoint", "checkpointing", 0, mode="subset"), PASS),
            ckpt(
                "sixteen in open",
                do.together(
                    do.hand_in_as_open,
                    do.config("checkpoint", "checkpointing", 0, mode="subset"),
                    do.summary("checkpointing", 0, num_accelerators=16),
                ),
                PASS,
            ),
            ckpt(
                "sixteen",
                do.together(
                    do.config("checkpoint", "checkpointing", 0, mode="subset"),
                    do.summary("checkpointing", 0, num_accelerators=16),
                ),
            ),
            ckpt(
                "by option",
                do.together(
                    do.args("checkpointing", 0, checkpoint_subset=True),
                    do.summary("checkpointing", 0, num_accelerators=4),
                ),
            ),
        ),
        "checkpoint.memory": (
            ckpt("too much", do.metric("checkpointing", 0, checkpoint_size_GB=2000.0)),
            ckpt("unknown", do.metadata("checkpointing", 0, accelerator="v100")),
            ckpt("unsaid", do.forget("accelerator", "checkpointing", 0), WARNING, NEW),
            ckpt(
                "unsaid and large",
                do.together(
                    do.forget("accelerator", "checkpointing", 0),
                    do.metric("checkpointing", 0, checkpoint_size_GB=2000.0),
                ),
                UNKNOWN,
                NEW,
            ),
        ),
        "checkpoint.ratio": (
            ckpt("nothing written", do.invocations((0, 10), (0, 10)), UNKNOWN),
            ckpt(
                "of some hosts",
                do.metadata("checkpointing", 0, cluster_information={"is_partial": True}),
                UNKNOWN,
            ),
            ckpt("large memory", do.summary("checkpointing", 0, host_memory_GB=[512.0]), WARNING),
        ),
        "checkpoint.size": (
            once(
                "half of it for half of the ranks",
                do.together(
                    do.config("checkpoint", "checkpointing", 0, mode="subset"),
                    do.summary("checkpointing", 0, num_accelerators=4),
                    do.metric("checkpointing", 0, checkpoint_size_GB=52.4),
                ),
                PASS,
            ),
            ckpt("small", do.metric("checkpointing", 0, checkpoint_size_GB=10.0), WARNING),
        ),
    }
)
"""By rule."""
