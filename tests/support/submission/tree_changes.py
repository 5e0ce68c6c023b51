"""Changes of valid trees of v2.0 and v3.0, to put together what `tampered` and `boundaries` try."""

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from tests.support.submission.timed_tree import RECORD_BYTES, Round

Change = Callable[[Round], object]


def add(path: str, value: Any = "text") -> Change:
    """Write a file, whether or not there is one."""
    return lambda tree: tree.files.update({path: value})


def drop(part: str) -> Change:
    """Take out all files whose path has `part` in it."""
    return lambda tree: tree.drop(part)


def rename(old: str, new: str) -> Change:
    """Put `new` for `old` in all paths."""
    return lambda tree: tree.rename(old, new)


def summary(phase: str = "run", number: int = 2, **values: Any) -> Change:
    """Set values of a leaf's summary."""
    return lambda tree: tree.summary(phase, number).update(values)


def typed_memory(each_gib: float) -> Change:
    """A run on two hosts whose data set is large enough for their memory in whole GiB, and no larger."""
    needed = math.ceil(5 * 2 * int(each_gib) * 2**30 / RECORD_BYTES)
    return together(
        summary("run", 0, num_files_train=40_000),
        summary("run", 1, host_memory_GB=[each_gib] * 2, num_files_train=needed),
    )


def doubled_memory(*gib: int) -> Change:
    """A list of memory as DLIO fills it on clusters, and the hosts' own facts in the metadata."""
    hosts = [{"memory": {"total": each * 2**30}} for each in gib]
    return together(summary(host_memory_GB=[256.0] * 2 * len(gib)), metadata(system_info={"hosts": hosts}))


def metric(phase: str = "run", number: int = 2, **values: Any) -> Change:
    """Set figures of a leaf's summary."""
    return lambda tree: tree.summary(phase, number)["metric"].update(values)


def results(above: str = "run", **values: Any) -> Change:
    """Set figures of the results' file."""

    def change(tree: Round) -> None:
        path = next(path for path in tree.files if path.endswith(f"/{above}/results.json"))
        tree.files[path]["metrics"].update(values)

    return change


def metadata(phase: str = "run", number: int = 2, **values: Any) -> Change:
    """Set values of a leaf's metadata."""
    return lambda tree: tree.metadata(phase, number).update(values)


def args(phase: str = "run", number: int = 2, **values: Any) -> Change:
    """Set what a leaf's command line had."""
    return lambda tree: tree.metadata(phase, number)["args"].update(values)


def config(section: str, phase: str = "run", number: int = 2, **values: Any) -> Change:
    """Set values of a section of a leaf's configuration."""
    return lambda tree: tree.config(phase, number)[section].update(values)


def override(text: str, phase: str = "run", number: int = 2) -> Change:
    """Add to what a leaf's command line set."""
    return lambda tree: tree.overrides(phase, number).append(text)


def solution(**values: Any) -> Change:
    """Set values of the described solution."""
    return lambda tree: tree.system()["solution"].update(values)


def capability(**values: Any) -> Change:
    """Set what the description says the system can do."""
    return lambda tree: tree.system()["solution"]["capabilities"].update(values)


def file(phase: str, number: int, name: str, **values: Any) -> Change:
    """Set values of a file of a leaf."""
    return lambda tree: tree.document(phase, number, name).update(values)


def replace(phase: str, number: int, name: str, value: Any) -> Change:
    """Write a file of a leaf anew."""

    def change(tree: Round) -> None:
        leaf = tree.leaves(phase)[number]
        tree.files[f"{leaf}/{name}"] = value

    return change


def without(phase: str, number: int, name: str) -> Change:
    """Take a file out of a leaf."""
    return lambda tree: tree.drop(f"{tree.leaves(phase)[number]}/{name}")


def forget(key: str, phase: str = "run", number: int = 2) -> Change:
    """Take a value out of a leaf's metadata."""
    return lambda tree: tree.metadata(phase, number).pop(key)


def together(*changes: Change) -> Change:
    """One change after the other."""

    def change(tree: Round) -> None:
        for each in changes:
            each(tree)

    return change


def shift(phase: str, number: int, by: timedelta) -> Change:
    """Move one invocation in time, in all its files but their names."""

    def change(tree: Round) -> None:
        for document, keys in (
            (tree.metadata(phase, number), ("invocation_start_time", "invocation_end_time")),
            (tree.summary(phase, number), ("start", "end")),
        ):
            for key in keys:
                document[key] = (datetime.fromisoformat(document[key]) + by).isoformat()

    return change


def second_datagen(tree: Round) -> None:
    """Generate the data set twice."""
    leaf = tree.leaves("datagen")[0]
    copied = {path: value for path, value in tree.files.items() if path.startswith(leaf)}
    tree.files |= {path.replace("20260701_080000", "20260701_083000"): v for path, v in copied.items()}


def record(**values: Any) -> Change:
    """Set values of the plan in a run's record."""
    return lambda tree: tree.document("run", 2, "run.json")["plan"].update(values)


def reads(verdict: str) -> Change:
    """Let a run's record say how devices carried what was read."""
    delivery = {"direction": "read", "verdict": verdict, "why": "devices moved 0 B"}
    return lambda tree: tree.document("run", 2, "run.json").update(deliveries=[delivery])


def first_epoch(**values: Any) -> Change:
    """Set values of the first epoch in a run's record."""
    return lambda tree: tree.document("run", 2, "run.json")["plan"]["epochs"][0].update(values)


def same_epochs(tree: Round) -> None:
    """Deal out the second epoch as the first."""
    epochs = tree.document("run", 2, "run.json")["plan"]["epochs"]
    epochs[1]["ranks"] = epochs[0]["ranks"]


def sample_twice(tree: Round) -> None:
    """Give one rank what another has."""
    ranks = tree.document("run", 2, "run.json")["plan"]["epochs"][1]["ranks"]
    ranks[0] = ranks[1]


def fewer_samples(tree: Round) -> None:
    """Leave seven samples out of one epoch."""
    tree.document("run", 2, "run.json")["plan"]["epochs"][1]["ranks"][0]["samples"] -= 7


def invocations(*counts: tuple[int, int]) -> Change:
    """Set the writes and reads of each invocation."""

    def change(tree: Round) -> None:
        for number, (writes, reads) in enumerate(counts):
            tree.metadata("checkpointing", number)["args"].update(
                num_checkpoints_write=writes, num_checkpoints_read=reads
            )

    return change


def third_invocation(tree: Round) -> None:
    """Add an invocation."""
    leaf = tree.leaves("checkpointing")[1]
    copied = {path: value for path, value in tree.files.items() if path.startswith(leaf)}
    name = leaf.rpartition("/")[2]
    tree.files |= {path.replace(name, "20260701_130000"): value for path, value in copied.items()}


def misspelt(tree: Round) -> None:
    """Call a figure by another name."""
    metric = tree.summary("run", 3)["metric"]
    metric["train_au_percent"] = metric.pop("train_au_percentage")


def no_client_list(tree: Round) -> None:
    """Describe clients by a word."""
    tree.system()["clients"] = "two"


def kind(tree: Round) -> str:
    """The accelerator of the tree."""
    accelerator: str = tree.metadata("run")["accelerator"]
    return accelerator


def key(tree: Round) -> str:
    """By which name the tree's metadata have the configuration."""
    return "combined_params" if tree.edition == "v2.0" else "parameters"


def set_workload(tree: Round, name: str) -> None:
    """Name another workload in all runs."""
    for number in range(len(tree.leaves("run"))):
        tree.overrides("run", number)[0] = f"workload={name}"


def set_sized(tree: Round, num_files: int) -> None:
    """Size the data set otherwise."""
    tree.metadata("datasize")["dataset"]["num_files_train"] = num_files


def set_generated(tree: Round, num_files: int) -> None:
    """Generate another number of files."""
    tree.metadata("datagen")[key(tree)]["dataset"]["num_files_train"] = num_files


def image(tree: Round) -> str:
    """The folder of the code image."""
    found = next(path for path in tree.files if path.endswith("/.code-hash.json"))
    return found.rpartition("/")[0]


def change_code(tree: Round) -> None:
    """Change the program after its image was taken."""
    tree.files[f"{image(tree)}/main.py"] = "print('another program')\n"


def add_code(tree: Round) -> None:
    """Add to the program after its image was taken."""
    tree.files[f"{image(tree)}/more.py"] = "MORE = 1\n"


def empty_code(tree: Round) -> None:
    """Take all files out of the program's image but its digest."""
    tree.files = {
        path: value
        for path, value in tree.files.items()
        if not path.startswith(f"{image(tree)}/") or path.endswith(".code-hash.json")
    }


def another_digest(tree: Round) -> None:
    """State another digest of the program."""
    tree.files[f"{image(tree)}/.code-hash.json"]["hash"] = "0" * 32


def another_algorithm(tree: Round) -> None:
    """State the digest of the program in a way that is not known."""
    tree.files[f"{image(tree)}/.code-hash.json"]["algorithm"] = "sha1-tree"


def hand_in_as_open(tree: Round) -> None:
    """Hand it in as OPEN."""
    tree.division = "open"


def take_port_down(tree: Round) -> None:
    """Describe a port that is down."""
    tree.system()["clients"][0]["networking"] = [{"unit_count": 1, "type": "other", "state": "down"}]


def more_samples(tree: Round) -> None:
    """Read seven samples of one epoch twice."""
    tree.document("run", 2, "run.json")["plan"]["epochs"][1]["ranks"][0]["samples"] += 7


def keep_order(tree: Round) -> None:
    """Deal out two epochs alike, as the workload asks for."""
    same_epochs(tree)
    tree.document("run", 2, "run.json")["workload"]["train"]["seed_change_epoch"] = False


def unshuffled(tree: Round) -> None:
    """Read without any shuffle, as the workload asks for."""
    record = tree.document("run", 2, "run.json")
    record["workload"]["reader"] |= {"file_shuffle": "off", "sample_shuffle": "off"}
    record["plan"]["shuffle"] = "off"
    same_epochs(tree)
