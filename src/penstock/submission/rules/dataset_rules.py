"""Rules about the data set: its place and size, its generation, and the order in which its samples are read.

Sizes are computed in exact fractions, because a single file can decide a verdict. Rules about order use the
`run.json` of our own runs. No edition has rules about order, so these rules only warn, and do not apply to a
run without `run.json`.
"""

import math
import posixpath
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import numpy as np

from penstock.results.step_events import digest_samples
from penstock.submission.edition import Edition
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.result_figures import num_accelerators, record_bytes
from penstock.submission.result_files import ResultDir
from penstock.submission.rules.rule import (
    BOTH,
    EVERY,
    LATER,
    NEWEST,
    Case,
    Finding,
    Rule,
    Verdict,
    check,
    limit,
    not_applicable,
    nothing,
    num_hosts,
    pass_if,
    require_all_hosts,
    require_datagen,
)
from penstock.submission.rules.tree_rules import leaves
from penstock.submission.tree_layout import Benchmark
from penstock.workload.sizing import bytes_text, quotient_text

_STORAGE_KEYS: Final = {
    Benchmark.TRAINING: "data_dir",
    Benchmark.CHECKPOINTING: "checkpoint_folder",
    Benchmark.VECTOR_SEARCH: "storage_root",
    Benchmark.KV_CACHE: "cache_dir",
}
"""The argument that names the storage under test, by benchmark."""
_MOUNT: Final = re.compile(r"^(\S+)\s+\d+\s+\d+\s+\d+\s+\d+%\s+(/\S*)$", re.MULTILINE)
"""A line of `df`: the device, four figures, and the mount point."""
_MEMORY_LIMIT: Final = re.compile(
    r"\b(\d+)\s*([MGT])i?B?\b[^&;|]{0,80}>\s{0,9}\S{0,200}memory\.(?:max|limit_in_bytes)", re.IGNORECASE
)
"""A shell command that limits a cgroup's memory, as descriptions quote it."""
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_GIB: Final = 1 << 30
_SIZING_SOURCE: Final = "v1.0 rules and sizing command; 3.1.2 of later editions"
_ORDER: Final[Any] = {
    "editions": LATER,
    "source": "ours",
    "at": attrgetter("run.record.file"),
    "unless": lambda case: "the run has no run.json" if case.run.record.is_missing else "",
}
_MODULUS: Final = 1 << 64
_CHUNK_ITEMS: Final = 1 << 20
"""The number of items that are hashed together; more would take more memory."""
MAX_ITEMS: Final = 50_000_000
"""The most items whose digest is computed, which takes a second."""


def _path_argument(run: ResultDir, key: str) -> str:
    if run.benchmark is Benchmark.VECTOR_SEARCH and not run.metadata.has("args", key):
        run.metadata.value("args")
        return ""  # older tools wrote none, and the rule says so
    path = run.metadata.value("args", key)
    return "" if path is None else str(path)


def _judge_paths(case: Case) -> Iterator[Finding]:
    key = _STORAGE_KEYS[case.run.benchmark]
    under_test, results = _path_argument(case.run, key), _path_argument(case.run, "results_dir")
    unset = [name for name, path in ((key, under_test), ("results_dir", results)) if not path]
    yield pass_if(
        not unset and posixpath.normpath(under_test) != posixpath.normpath(results),
        evidence=case.run.metadata.file,
        value=under_test,
        limit=f"not {results}",
        proof=(
            f"{' and '.join(unset)} is not set" if unset else f"{key} is {under_test}, results_dir {results}"
        ),
        fix="Repeat the run with results elsewhere than on the storage under test.",
        otherwise=case.verdict_of_round if unset == ["storage_root"] else Verdict.FAIL,
    )


def _judge_file_systems(case: Case) -> Iterator[Finding]:
    run, under_test = case.run, _path_argument(case.run, _STORAGE_KEYS[case.run.benchmark])
    if "://" in under_test and not under_test.startswith("file://"):
        yield not_applicable(run.metadata.file, "the storage under test holds objects")
        return
    if not run.separation.is_missing:
        is_same = run.separation.boolean("same_filesystem")
        yield pass_if(
            not is_same,
            value=f"same_filesystem {is_same}",
            limit="same_filesystem False",
            proof=f"results and storage under test are on {'one file system' if is_same else 'two'}",
            fix="Repeat the run with results on another file system.",
        )
        return
    # Before tools probed the file systems, they wrote the output of `df` to the run's log.
    has_log = run.benchmark in BOTH or not run.log.is_missing
    mounts = [mount for _, mount in _MOUNT.findall(str(run.log.value()))] if has_log else []
    if not mounts:
        yield Finding(
            verdict=Verdict.WARNING if run.benchmark is Benchmark.KV_CACHE else case.verdict_of_round,
            proof="there is no fs_separation.json, and the run's log has no df",
            fix="Let the reviewer ask where the results were written.",
        )
        return
    paths = (under_test, _path_argument(run, "results_dir"))
    tested, results = (_mount_point(path, mounts) for path in paths)
    yield pass_if(
        tested != results,
        evidence=run.log.file,
        value=results,
        limit=f"not {tested}",
        proof=f"df: the storage under test is mounted at {tested}, the results' at {results}",
        fix="Repeat the run with results on another file system.",
    )


def _mount_point(path: str, mounts: list[str]) -> str:
    """Return the longest mount point above `path`."""
    absolute = posixpath.normpath(posixpath.join("/", path))
    above = [mount for mount in mounts if f"{absolute}/".startswith(f"{mount.rstrip('/')}/")]
    return max(above, key=len, default="/")


def _num_files(directory: ResultDir, case: Case) -> int:
    """Return the data set's number of files from the summary in the metadata, or else the configuration."""
    metadata = directory.metadata
    if metadata.has("dataset", "num_files_train"):
        return metadata.integer("dataset", "num_files_train")
    # Tools of different ages wrote the configuration under different names.
    known = case.edition.timed.metadata_parameters
    section = next((name for name in known if metadata.has(name)), None)
    if section is None:
        metadata.value()
        raise MissingFact(f"there is no field {' or '.join(known)}", where=metadata.file)
    return metadata.integer(section, "dataset", "num_files_train")


def _judge_sized_files(case: Case) -> Iterator[Finding]:
    run = case.run
    data_folder = run.metadata.value("args", "data_dir")
    sizings = [
        directory
        for directory in case.result.datasize
        if directory.metadata.value("args", "data_dir") == data_folder
        and directory.accelerator() == run.accelerator()
    ]
    if not sizings:
        yield Finding(
            verdict=case.verdict_of_round,
            evidence=case.result.name,
            proof=f"nothing in datasize/ is for {data_folder} on {run.accelerator()}",
            fix="Size the data set (penstock training size), and submit the result directory.",
        )
        return
    sized, read = _num_files(sizings[-1], case), run.summary.integer("num_files_train")
    yield pass_if(
        sized <= read,
        value=f"{read:,} files",
        limit=f"{sized:,} files",
        proof=f"{sized:,} files sized {'<=' if sized <= read else '>'} {read:,} files read",
        fix=f"Generate at least {sized:,} files and repeat the runs.",
        otherwise=case.verdict_of_round,
    )


def _judge_generated_files(case: Case) -> Iterator[Finding]:
    datagen = require_datagen(case)
    generated, read = _num_files(datagen, case), case.run.summary.integer("num_files_train")
    yield pass_if(
        read <= generated,
        evidence=datagen.metadata.file,
        value=f"{read:,} files",
        limit=f"{generated:,} files",
        proof=f"{read:,} files read {'<=' if read <= generated else '>'} {generated:,} files generated",
        fix="Generate all files that the runs read.",
        otherwise=case.verdict_of_round,
    )
    folders = ("workload", "dataset", "num_subfolders_train")
    generated, read = datagen.config.integer(*folders), case.run.config.integer(*folders)
    yield pass_if(
        generated == read,
        evidence=case.run.config.file,
        value=f"{read:,} folders",
        limit=f"{generated:,} folders",
        proof=f"{generated:,} folders generated, {read:,} read",
        fix="Read the folders that were generated.",
    )


def _file_bytes(directory: ResultDir) -> int:
    samples = directory.config.integer("workload", "dataset", "num_samples_per_file")
    return round(samples * record_bytes(directory))


def _min_files(samples: Fraction, samples_per_file: int, edition: Edition) -> int:
    """Return the number of whole files that hold `samples`, rounded as the edition requires."""
    exact = samples / samples_per_file
    return math.ceil(exact) if edition.sizing.rounding == "up" else math.floor(exact)


def _judge_steps(case: Case) -> Finding:
    first, steps = case.run, case.edition.sizing.min_steps
    batch = first.config.integer("workload", "reader", "batch_size")
    per_file, files = _read_files(first)
    accelerators = num_accelerators(case.whole_run)
    samples = Fraction(steps * batch * accelerators)
    needed = _min_files(samples, per_file, case.edition)
    return pass_if(
        files >= needed,
        value=f"{files:,} files",
        limit=f"{needed:,} files",
        proof=(
            f"{steps} steps x {batch:,} samples x {accelerators:,} accelerators / "
            f"{per_file:,} samples per file = {quotient_text(samples / per_file)} -> "
            f"{needed:,} files {'<=' if files >= needed else '>'} {files:,}"
        ),
        fix=f"Generate at least {needed:,} files and repeat the runs.",
    )


def _judge_memory(case: Case) -> Finding:
    """Judge the size by the memory that the hosts have, then by the part that they were allowed to use."""
    first, edition, dirs = case.run, case.edition, case.whole_run.dirs
    require_all_hosts(first)
    hosts = tuple(memory for run_dir in dirs for memory in _read_memory(run_dir.summary, edition))
    physical = _compare_with_memory(first, hosts, edition)
    if physical.verdict is Verdict.PASS:
        return physical
    if typed := _compare_with_typed_memory(first, hosts, edition):
        return replace(typed, proof=f"{physical.proof}; {typed.proof}")
    limit_of_host = find_memory_limit(case.result.systems)
    if limit_of_host is None:
        for system in case.result.systems:  # a description that cannot be read may state a limit
            system.value()
        return physical
    limit_bytes, evidence = limit_of_host
    limited = tuple(min(memory, Fraction(limit_bytes)) for memory in hosts)
    if limited == hosts:
        return physical
    return _compare_with_memory(first, limited, edition, f"limited to this by {evidence}")


def _compare_with_memory(
    run: ResultDir, hosts: tuple[Fraction, ...], edition: Edition, counted: str = ""
) -> Finding:
    length = record_bytes(run)
    per_file, files = _read_files(run)
    multiple, memory = edition.sizing.memory_multiple, sum(hosts, Fraction(0))
    needed = _min_files(multiple * memory / length, per_file, edition)
    holds = files >= needed
    note = f" ({counted})" if counted else ""
    return pass_if(
        holds and not counted,
        value=f"{files:,} files",
        limit=f"{needed:,} files",
        proof=(
            f"{multiple} x {float(memory / _GIB):.6g} GiB of memory{note} / {bytes_text(length)} B / "
            f"{per_file:,} samples per file -> {needed:,} files {'<=' if holds else '>'} {files:,}"
        ),
        # Only a reviewer can find out whether the hosts really had only this much memory.
        fix=(
            "Let the reviewer confirm this amount of memory."
            if holds
            else f"Generate at least {needed:,} files and repeat the runs."
        ),
        otherwise=Verdict.WARNING if holds else Verdict.FAIL,
    )


def _compare_with_typed_memory(
    run: ResultDir, hosts: tuple[Fraction, ...], edition: Edition
) -> Finding | None:
    """Return a warning if the data set is large enough for the memory in whole GiB, as people type it.

    Returns None if the data set is too small even then, or if rounding leaves out more memory than the
    edition tolerates.
    """
    memory = sum(hosts, Fraction(0))
    # If only the sum is known, all hosts are assumed to be equal.
    num_each = 1 if edition.sizing.host_memory == "each" else num_hosts(run)
    typed = tuple(Fraction(host // (num_each * _GIB) * num_each * _GIB) for host in hosts)
    if sum(typed) < memory * (1 - Fraction(edition.sizing.memory_tolerance)):
        return None
    note = f"whole GiB, which leaves out {float(1 - sum(typed) / memory):.2%}"
    finding = _compare_with_memory(run, typed, edition, note)
    return finding if finding.verdict is Verdict.WARNING else None


def _read_files(run: ResultDir) -> tuple[int, int]:
    """Return the number of samples per file, and the number of files."""
    per_file = run.summary.integer("num_samples_per_file")
    if per_file < 1:
        raise MissingFact("num_samples_per_file is not positive", where=run.summary.file)
    return per_file, run.summary.integer("num_files_train")


def _read_memory(summary: ParsedFile, edition: Edition) -> tuple[Fraction, ...]:
    """Return each host's memory in bytes, or the sum over all hosts if only the sum is right."""
    stated = summary.numbers("host_memory_GB")
    hosts = summary.integer("num_hosts")
    if edition.sizing.host_memory == "sum":
        if min(stated) < 0 or sum(stated) <= 0:
            raise MissingFact(
                f"host_memory_GB is {stated!r:.60}, which is not an amount of memory", where=summary.file
            )
        return (sum(map(Fraction, stated), Fraction(0)) * _GIB,)
    if len(stated) != hosts or min(stated) <= 0:
        raise MissingFact(
            f"host_memory_GB has {len(stated)} entries, {sum(entry <= 0 for entry in stated)} of them empty, "
            f"for {hosts} hosts: the benchmark of this edition fills the list wrongly",
            where=summary.file,
            fix="Let the reviewer compare the hosts' memory with the number of files.",
        )
    return tuple(Fraction(entry) * _GIB for entry in stated)


def find_memory_limit(systems: tuple[ParsedFile, ...]) -> tuple[int, str] | None:
    """Return a host's memory limit in bytes, and the file that states it; None unless exactly one does."""
    limits = {
        (int(match[1]) * _UNITS[match[2].upper()], system.file)
        for system in systems
        if not system.problem
        for _, value in leaves(system.content)
        for match in _MEMORY_LIMIT.finditer(str(value))
    }
    return limits.pop() if len(limits) == 1 else None


def _epochs(record: ParsedFile) -> list[tuple[ParsedFile, list[ParsedFile]]]:
    """Return each epoch of the plan in `run.json`, with the shares of its ranks."""
    epochs = [
        (epoch, list(epoch.parts("ranks").values())) for epoch in record.parts("plan", "epochs").values()
    ]
    if not epochs or not all(ranks for _, ranks in epochs):
        raise MissingFact("plan.epochs has no epochs, or one without ranks", where=record.file)
    return epochs


def _find_reads_from_memory(case: Case) -> Iterator[str]:
    record = case.run.record
    for one in record.parts("deliveries").values() if record.has("deliveries") else ():
        if one.text("direction") == "read" and one.text("verdict") == "fail":
            yield one.text("why")


def _num_samples(record: ParsedFile) -> int:
    dataset = ("workload", "dataset")
    return record.integer(*dataset, "num_files_train") * record.integer(*dataset, "num_samples_per_file")


def _digest(share: ParsedFile, *path: str) -> int:
    text = share.text(*path, "digest")
    try:
        return int(text, 16)
    except ValueError as error:
        raise MissingFact(f"digest is {text!r:.60}, not a number", where=share.file) from error


def _remainder(case: Case) -> dict[str, Any]:
    """Return how many samples the worst epoch leaves out (negative if it reads some twice), and the total."""
    total, epochs = _num_samples(case.run.record), _epochs(case.run.record)
    left = max((total - sum(rank.integer("samples") for rank in ranks) for _, ranks in epochs), key=abs)
    policy = case.run.record.text("plan", "division")
    return {"left": left, "total": total, "share": left / total if total else 0.0, "policy": policy}


def _judge_shuffle(case: Case) -> Iterator[Finding]:
    """Yield a finding for the order, and one for its change from epoch to epoch."""
    record = case.run.record
    is_requested = any(
        record.text("workload", "reader", key).lower() != "off" for key in ("file_shuffle", "sample_shuffle")
    )
    is_shuffled = record.text("plan", "shuffle").lower() != "off"
    yield pass_if(
        is_shuffled or not is_requested,
        value=f"shuffled: {is_shuffled}",
        limit=f"shuffled: {is_requested}",
        proof=f"shuffled: {is_requested} in the workload, {is_shuffled} in the run",
        fix="Repeat the run with the workload's own shuffles.",
        otherwise=Verdict.WARNING,
    )
    orders = [tuple(map(_digest, ranks)) for _, ranks in _epochs(record)]
    # A single rank has all samples in each epoch, so its digest never changes.
    must_change = (
        is_requested and len(orders[0]) > 1 and record.boolean("workload", "train", "seed_change_epoch")
    )
    num_orders = len(set(orders))
    yield pass_if(
        not must_change or num_orders == len(orders),
        value=f"{num_orders} orders",
        limit=f"{len(orders)} orders",
        proof=f"{len(orders)} epochs deal out {num_orders} different ways",
        fix="Repeat the run with seed_change_epoch.",
        otherwise=Verdict.WARNING,
    )


def _judge_repeated_samples(case: Case) -> Iterator[Finding]:
    record = case.run.record
    total, item_samples = _num_samples(record), record.integer("plan", "item_samples")
    per_file = record.integer("workload", "dataset", "num_samples_per_file")
    try:
        expected = digest_of_all(total, item_samples, per_file)
    except MissingFact as reason:
        raise MissingFact(reason.what, where=record.file) from reason
    wrong, num_limited = [], 0
    for number, (epoch, ranks) in enumerate(_epochs(record), start=1):
        if epoch.integer("steps") != epoch.integer("steps_without_limit"):
            num_limited += 1
        elif (sum(map(_digest, ranks)) + _digest(epoch, "left_out")) % _MODULUS != expected:
            wrong.append(str(number))
    if num_limited:
        yield not_applicable(record.file, f"{num_limited} epochs ended early, by a limit of steps")
    yield pass_if(
        not wrong,
        value=f"{len(wrong)} epochs",
        limit="0 epochs",
        proof=(
            f"epochs {', '.join(wrong)} do not read each sample once"
            if wrong
            else "all epochs read each sample once"
        ),
        fix="Read with a division other than pad, and report this if there was none.",
        otherwise=Verdict.WARNING,
    )


@lru_cache(maxsize=16)
def digest_of_all(num_samples: int, item_samples: int, samples_per_file: int) -> int:
    """Compute the digest of all samples, as `run.json` defines it for the plan of a training run."""
    if min(num_samples, item_samples, samples_per_file) < 1:
        raise MissingFact("run.json has no samples")
    per_file = -(-samples_per_file // item_samples)
    last = samples_per_file - (per_file - 1) * item_samples
    num_items = num_samples // samples_per_file * per_file
    if num_items > MAX_ITEMS:
        raise MissingFact(f"{num_items:,} items are more than the {MAX_ITEMS:,} whose order is verified")
    total = 0
    for start in range(0, num_items, _CHUNK_ITEMS):
        items = np.arange(start, min(start + _CHUNK_ITEMS, num_items), dtype=np.uint64)
        sizes = np.where(items % per_file == per_file - 1, last, item_samples).astype(np.uint64)
        total += digest_samples(items, sizes)
    return total % _MODULUS


RULES: Final = (
    Rule(
        id="paths.set",
        title="The paths of the data and of the results are set, and differ",
        editions=LATER,
        benchmarks=EVERY,
        source="3.4.1, 4.4.1, 5.4.1, 6.4.1",
        formula=(
            "args.data_dir (checkpoint_folder, storage_root, cache_dir) and args.results_dir are set and "
            "differ; no storage_root was a warning in v3.0's round"
        ),
        passes="data_dir /mnt/data, results_dir /home/acme/results",
        fails="both /mnt/data",
        judge=_judge_paths,
    ),
    Rule(
        id="paths.filesystems",
        title="Results were not written to the file system under test",
        editions=LATER,
        benchmarks=EVERY,
        source="3.4.2, 4.4.2, 5.4.2, 6.4.1; the validator never asks a key-value cache for it",
        formula=(
            "fs_separation.json says same_filesystem: false, or df in the log shows two mount points; "
            "neither was a warning in v3.0's round; not applicable to objects"
        ),
        passes="same_filesystem: false",
        fails="same_filesystem: true",
        at=attrgetter("run.separation.file"),
        judge=_judge_file_systems,
    ),
    Rule(
        id="dataset.sized",
        title="A run has at least as many files as calculated for its data folder",
        editions=NEWEST,
        source="3.1.1, 3.3.1 (DATASIZE-MISSING, DATASIZE-UNDERRUN)",
        formula="num_files of the last datasize with the run's data_dir and accelerator <= the run's",
        passes="28,000 files sized, 28,000 read",
        fails="28,000 files sized, 27,999 read",
        judge=_judge_sized_files,
    ),
    Rule(
        id="dataset.generated",
        title="A run reads no more files than were generated, in the same folders",
        editions=LATER,
        source="3.3.1 (DATAGEN-OVERRUN)",
        formula="the run's num_files <= the data generation's; num_subfolders are the same",
        passes="28,000 files generated, 28,000 read",
        fails="27,999 files generated, 28,000 read",
        judge=_judge_generated_files,
    ),
    limit(
        id="dataset.bytes",
        title="At least as many bytes were generated as a run reads",
        editions=LATER,
        source="3.2.1",
        formula="files x samples per file x bytes per sample of the data generation >= the run's",
        passes="the same files, samples and bytes",
        fails="generated with a record length of 1",
        fact=lambda case: _num_files(require_datagen(case), case) * _file_bytes(require_datagen(case)),
        compare=">=",
        limit=lambda case: case.run.summary.integer("num_files_train") * _file_bytes(case.run),
        at=lambda case: require_datagen(case).config.file,
        show=("{fact:,} B", "{limit:,} B"),
        proof="{fact:,} B generated {sign} {limit:,} B read",
        fix="Generate the data set with the workload's own values.",
    ),
    Rule(
        id="sizing.steps",
        title="The data set is large enough for the required steps per epoch on every accelerator",
        each="run together",
        source=_SIZING_SOURCE,
        formula="files >= min_steps x batch x accelerators / samples per file, rounded as the edition says",
        passes="unet3d, batch 7, 2 accelerators: 7,000 files (500 x 7 x 2)",
        fails="the same with 6,999 files",
        judge=lambda case: (_judge_steps(case),),
    ),
    Rule(
        id="sizing.memory",
        title="The data set is several times larger than the memory of all hosts",
        each="run together",
        source=_SIZING_SOURCE,
        formula=(
            "files >= memory_multiple x sum of the hosts' memory / record length / samples per file, rounded "
            "as the edition says; enough for the memory that the system description leaves (a cgroup's "
            "memory.max), or for whole GiB within the edition's tolerance, is a warning"
        ),
        passes="unet3d on one host of 256 GiB: 9,376 files of 146,600,628 bytes",
        fails="the same with 9,374 files",
        judge=lambda case: (_judge_memory(case),),
    ),
    check(
        id="order.left_out",
        title="Every epoch reads all samples",
        **_ORDER,
        formula="samples == sum over all ranks in each epoch (else warning), with count, share and policy",
        passes="28,000 samples, batches of 7 on 8 accelerators: none is left out",
        fails="28,001 samples: one is left out of each epoch (a warning)",
        facts=_remainder,
        holds=lambda it: it.left == 0,
        show=("{left:,} samples", "0 samples"),
        proof="an epoch leaves out {left:,} of {total:,} samples ({share:.3%}); the policy is {policy}",
        fix="Choose a number of files that all accelerators' batches divide.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="order.shuffled",
        title="Samples come in the order that the workload requires, which changes in each epoch",
        **_ORDER,
        formula=(
            "plan.shuffle is seed where the workload shuffles; no two epochs have the same shares, unless "
            "seed_change_epoch is false or there is one rank (else warning)"
        ),
        passes="file_shuffle: seed, shuffle: seed, other shares in each epoch",
        fails="file_shuffle: seed, shuffle: off (a warning)",
        judge=_judge_shuffle,
    ),
    Rule(
        id="order.once",
        title="No epoch reads a sample twice",
        **_ORDER,
        formula="digests of all ranks and of the samples left out sum up to the digest of all (else warning)",
        passes="eight ranks with an eighth each",
        fails="one rank that has what another has (a warning)",
        judge=_judge_repeated_samples,
    ),
    nothing(
        id="reads.memory",
        title="All bytes read came from the storage, not from memory",
        editions=LATER,
        benchmarks=BOTH,
        source="ours",
        formula="devices and networks moved 90 % of what was read, as run.json compares them (else warning)",
        passes="84.7 MiB of a drive for 84.0 MiB of the application",
        fails="84.0 MiB read on tmpfs (a warning)",
        problems=_find_reads_from_memory,
        proof="no read is known to have come from memory",
        fix="Read past the page cache, and put the data on the storage under test.",
        otherwise=Verdict.WARNING,
    ),
)
