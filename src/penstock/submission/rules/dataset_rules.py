"""Rules about the data set: its paths, its size, and that it was sized, generated and read in full.

Sizes are computed in exact fractions: one file decides a verdict.
"""

import math
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from types import MappingProxyType
from typing import Final

from penstock.submission.edition import Edition
from penstock.submission.finding import Finding, Verdict, not_applicable, not_checked, pass_if, violation
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.recomputed_metrics import num_accelerators, record_bytes
from penstock.submission.result_files import ResultDir, ResultRun
from penstock.submission.rules import rule
from penstock.submission.tree_layout import Benchmark
from penstock.workload.dataset_size import bytes_text, quotient_text

_STORAGE_KEYS: Final = MappingProxyType(
    {
        Benchmark.TRAINING: "data_dir",
        Benchmark.CHECKPOINTING: "checkpoint_folder",
        Benchmark.VECTOR_SEARCH: "storage_root",
        Benchmark.KV_CACHE: "cache_dir",
    }
)
_MOUNT: Final = re.compile(r"^(\S+)\s+\d+\s+\d+\s+\d+\s+\d+%\s+(/\S*)$", re.MULTILINE)
"""A line of `df`: the device, four figures, and where it is mounted."""


def _storage_key(case: rule.RunCase) -> str:
    """The argument that names the storage under test."""
    return _STORAGE_KEYS[case.run.benchmark]


def _path_argument(run: ResultDir, key: str) -> str:
    if run.benchmark is Benchmark.VECTOR_SEARCH and not run.metadata.has("args", key):
        run.metadata.value("args")
        return ""  # older tools wrote none, which the rule names
    path = run.metadata.value("args", key)
    return "" if path is None else str(path)


@rule.run_rule(
    id="paths.set",
    title="The paths of the data and of the results are set, and differ",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="3.4.1, 4.4.1, 5.4.1, 6.4.1",
    formula=(
        "args.data_dir (checkpoint_folder, storage_root, cache_dir) and args.results_dir are set, and not "
        "equal; a storage_root that is not set was let pass in v3.0 (a warning)"
    ),
    passes="data_dir /mnt/data, results_dir /home/acme/results",
    fails="both /mnt/data",
)
def _check_paths(case: rule.RunCase) -> Iterator[Finding]:
    key = _storage_key(case)
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


@rule.run_rule(
    id="paths.filesystems",
    title="Results were written to another file system than the one under test",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="3.4.2, 4.4.2, 5.4.2, 6.4.1; the validator never asks a key-value cache for it",
    formula=(
        "fs_separation.json says same_filesystem: false; without it, df in the log shows two devices by "
        "longest mount; neither of both was let pass in v3.0 (a warning); objects have no file system"
    ),
    passes="same_filesystem: false",
    fails="same_filesystem: true",
)
def _check_file_systems(case: rule.RunCase) -> Iterator[Finding]:
    run, under_test = case.run, _path_argument(case.run, _storage_key(case))
    if "://" in under_test and not under_test.startswith("file://"):
        yield not_applicable(run.metadata.file, "the storage under test holds objects")
    elif run.separation.is_missing:
        yield _judge_mounts(case)
    else:
        is_same = run.separation.boolean("same_filesystem")
        yield pass_if(
            not is_same,
            evidence=run.separation.file,
            value=f"same_filesystem {is_same}",
            limit="same_filesystem False",
            proof=f"results and storage under test are on {'one file system' if is_same else 'two'}",
            fix="Repeat the run with results on another file system.",
        )


def _judge_mounts(case: rule.RunCase) -> Finding:
    """By the output of `df` in the run's log, which tools wrote before they probed the file systems."""
    run = case.run
    has_log = not (case.is_query and run.log.is_missing)
    mounts = [mount for _, mount in _MOUNT.findall(str(run.log.value()))] if has_log else []
    if not mounts:
        return violation(
            evidence=run.separation.file,
            proof="there is no fs_separation.json, and the run's log has no df",
            fix="Let the reviewer ask where the results were written.",
            verdict=Verdict.WARNING if run.benchmark is Benchmark.KV_CACHE else case.verdict_of_round,
        )
    under_test = _mount_point(_path_argument(run, _storage_key(case)), mounts)
    results = _mount_point(_path_argument(run, "results_dir"), mounts)
    return pass_if(
        under_test != results,
        evidence=run.log.file,
        value=results,
        limit=f"not {under_test}",
        proof=f"df: the storage under test is mounted at {under_test}, the results' at {results}",
        fix="Repeat the run with results on another file system.",
    )


def _mount_point(path: str, mounts: list[str]) -> str:
    """The longest mount point above `path`."""
    absolute = posixpath.normpath(posixpath.join("/", path))
    above = [mount for mount in mounts if f"{absolute}/".startswith(f"{mount.rstrip('/')}/")]
    return max(above, key=len, default="/")


def _require_datagen(case: rule.ResultCase) -> ResultDir:
    """The result directory of the last data generation."""
    if not case.result.datagen:
        raise MissingFact("there is no result directory in datagen/", where=case.result.name)
    return case.result.datagen[-1]


def _num_files(directory: ResultDir, case: rule.RunCase) -> int:
    """The files of the data set: from the summary in the metadata, else from their whole configuration."""
    metadata = directory.metadata
    if metadata.has("dataset", "num_files_train"):
        return metadata.integer("dataset", "num_files_train")
    # Tools of different ages wrote the configuration under different names.
    known = case.timed.metadata_parameters
    section = next((name for name in known if metadata.has(name)), None)
    if section is None:
        metadata.value()
        raise MissingFact(f"there is no field {' or '.join(known)}", where=metadata.file)
    return metadata.integer(section, "dataset", "num_files_train")


@rule.run_rule(
    id="dataset.sized",
    title="A run has at least as many files as were sized for its data folder",
    editions=rule.NEWEST,
    source="3.1.1, 3.3.1 (DATASIZE-MISSING, DATASIZE-UNDERRUN)",
    formula="num_files of the last datasize with the run's data_dir and accelerator <= the run's num_files",
    passes="28,000 files sized, 28,000 read",
    fails="28,000 files sized, 27,999 read",
)
def _check_sized_files(case: rule.RunCase) -> Iterator[Finding]:
    run = case.run
    data_folder = run.metadata.value("args", "data_dir")
    sizings = [
        directory
        for directory in case.result.datasize
        if directory.metadata.value("args", "data_dir") == data_folder
        and directory.accelerator() == run.accelerator()
    ]
    if not sizings:
        yield violation(
            evidence=case.result.name,
            proof=f"nothing in datasize/ is for {data_folder} on {run.accelerator()}",
            fix="Size the data set (penstock training size), and hand in the result directory.",
            verdict=case.verdict_of_round,
        )
        return
    sized, read = _num_files(sizings[-1], case), run.summary.integer("num_files_train")
    yield pass_if(
        sized <= read,
        evidence=run.summary.file,
        value=f"{read:,} files",
        limit=f"{sized:,} files",
        proof=f"{sized:,} files sized {'<=' if sized <= read else '>'} {read:,} files read",
        fix=f"Generate at least {sized:,} files and repeat the runs.",
        otherwise=case.verdict_of_round,
    )


@rule.run_rule(
    id="dataset.generated",
    title="A run reads no more files than were generated, in the same folders",
    editions=rule.LATER,
    source="3.3.1 (DATAGEN-OVERRUN)",
    formula="the run's num_files <= that of the data generation; num_subfolders are the same",
    passes="28,000 files generated, 28,000 read",
    fails="27,999 files generated, 28,000 read",
)
def _check_generated_files(case: rule.RunCase) -> Iterator[Finding]:
    datagen = _require_datagen(case)
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


def _generated_bytes(case: rule.RunCase) -> int:
    datagen = _require_datagen(case)
    return _num_files(datagen, case) * _file_bytes(datagen)


rule.limit_rule(
    rule.RunCase,
    id="dataset.bytes",
    title="At least as many bytes were generated as a run reads",
    editions=rule.LATER,
    source="3.2.1",
    formula="files x samples a file x bytes a sample of the data generation >= those of the run",
    passes="the same files, samples and bytes",
    fails="generated with a record length of 1",
    value=_generated_bytes,
    compare=">=",
    limit=lambda case: case.run.summary.integer("num_files_train") * _file_bytes(case.run),
    evidence=lambda case: _require_datagen(case).config.file,
    show="{:,} B",
    proof="{value:,} B generated {sign} {limit:,} B read",
    fix="Generate the data set with the workload's own values.",
)


GIB: Final = 1 << 30
_SOURCE: Final = "v1.0 rules and sizing command; 3.1.2 of later editions"
_MEMORY_LIMIT: Final = re.compile(
    r"\b(\d+)\s*([MGT])i?B?\b[^&;|]{0,80}>\s{0,9}\S{0,200}memory\.(?:max|limit_in_bytes)", re.IGNORECASE
)
"""A shell command that limits a cgroup's memory, as descriptions quote it."""
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def min_files(samples: Fraction, samples_per_file: int, edition: Edition) -> int:
    """Whole files for `samples`, rounded as the edition says."""
    exact = samples / samples_per_file
    return math.ceil(exact) if edition.sizing.rounding == "up" else math.floor(exact)


def _judge_each_run(
    case: rule.ResultCase, judge: Callable[[ResultRun, rule.ResultCase], Finding]
) -> Iterator[Finding]:
    """One finding for each run: the clients of a run, which read one data set, are judged together."""
    rule.require_runs(case.result)
    for run in case.result.runs:
        try:
            yield judge(run, case)
        except MissingFact as reason:
            yield not_checked(reason)


@rule.result_rule(
    id="sizing.steps",
    title="The data set feeds every accelerator for enough steps an epoch",
    editions=rule.ALL,
    source=_SOURCE,
    formula="files >= min_steps x batch x accelerators / samples a file, rounded as the edition says",
    passes="unet3d, batch 7, 2 accelerators: 7,000 files (500 x 7 x 2)",
    fails="the same with 6,999 files",
)
def _check_steps(case: rule.ResultCase) -> Iterator[Finding]:
    yield from _judge_each_run(case, _judge_steps_of)


def _judge_steps_of(run: ResultRun, case: rule.ResultCase) -> Finding:
    first, steps = run.dirs[0], case.edition.sizing.min_steps
    batch = first.config.integer("workload", "reader", "batch_size")
    per_file, files = _read_files(first)
    accelerators = num_accelerators(run)
    samples = steps * batch * accelerators
    needed = min_files(Fraction(samples), per_file, case.edition)
    return pass_if(
        files >= needed,
        evidence=first.summary.file,
        value=f"{files:,} files",
        limit=f"{needed:,} files",
        proof=(
            f"{steps} steps x {batch:,} samples x {accelerators:,} accelerators / "
            f"{per_file:,} samples a file = {quotient_text(Fraction(samples, per_file))} -> "
            f"{needed:,} files {'<=' if files >= needed else '>'} {files:,}"
        ),
        fix=f"Generate at least {needed:,} files and repeat the runs.",
    )


@rule.result_rule(
    id="sizing.memory",
    title="The data set is several times larger than the memory of all hosts",
    editions=rule.ALL,
    source=_SOURCE,
    formula=(
        "files >= memory_multiple x sum of the hosts' memory / record length / samples a file, rounded as "
        "the edition says; memory that the system description limits (a cgroup's memory.max) counts as "
        "limited, and is then left to the reviewer as a warning; so is a data set for the memory in whole "
        "GiB, within the edition's tolerance"
    ),
    passes="unet3d on one host of 256 GiB: 9,376 files of 146,600,628 bytes",
    fails="the same with 9,374 files",
)
def _check_memory(case: rule.ResultCase) -> Iterator[Finding]:
    # All runs are of one system, whose description is searched once, and only if it matters.
    find_limit = cache(lambda: find_memory_limit(case.result.systems))
    yield from _judge_each_run(case, partial(_judge_memory_of, find_limit=find_limit))


def _judge_memory_of(
    run: ResultRun, case: rule.ResultCase, *, find_limit: Callable[[], tuple[int, str] | None]
) -> Finding:
    """First by the memory that the hosts have, then by what they may use of it."""
    first, systems = run.dirs[0], case.result.systems
    rule.require_all_hosts(first)
    hosts = tuple(memory for run_dir in run.dirs for memory in _read_memory(run_dir.summary, case.edition))
    physical = _compare_with_memory(first, hosts, case.edition)
    if physical.verdict is Verdict.PASS:
        return physical
    limit = find_limit()
    if typed := _compare_with_typed_memory(run, hosts, case.edition):
        return replace(typed, proof=f"{physical.proof}; {typed.proof}")
    if limit is None:
        for system in systems:  # one that cannot be read may state a limit
            system.value()
        return physical
    limit_bytes, evidence = limit
    limited = tuple(min(memory, Fraction(limit_bytes)) for memory in hosts)
    return (
        physical
        if limited == hosts
        else _compare_with_memory(first, limited, case.edition, f"limited to this by {evidence}")
    )


def _compare_with_memory(
    run: ResultDir, hosts: tuple[Fraction, ...], edition: Edition, counted: str = ""
) -> Finding:
    length = record_bytes(run)
    per_file, files = _read_files(run)
    multiple, memory = edition.sizing.memory_multiple, sum(hosts, Fraction(0))
    needed = min_files(multiple * memory / length, per_file, edition)
    holds = files >= needed
    note = f" ({counted})" if counted else ""
    fix = f"Generate at least {needed:,} files and repeat the runs."
    verdict = Verdict.PASS if holds else Verdict.FAIL
    if holds and counted:  # only a reviewer can find out whether it was so
        verdict, fix = Verdict.WARNING, "Let the reviewer confirm this amount of memory."
    return Finding(
        verdict=verdict,
        evidence=run.summary.file,
        value=f"{files:,} files",
        limit=f"{needed:,} files",
        proof=(
            f"{multiple} x {float(memory / GIB):.6g} GiB of memory{note} / {bytes_text(length)} B / "
            f"{per_file:,} samples a file -> {needed:,} files {'<=' if holds else '>'} {files:,}"
        ),
        fix="" if verdict is Verdict.PASS else fix,
    )


def _compare_with_typed_memory(
    run: ResultRun, hosts: tuple[Fraction, ...], edition: Edition
) -> Finding | None:
    """A warning if the data set is large enough for the memory in whole GiB, as sizing commands are told it.

    None if that is not enough either, or leaves out more than the edition's tolerance.
    """
    memory = sum(hosts, Fraction(0))
    # Where only the sum is known, it is that of equal hosts.
    num_each = 1 if edition.sizing.host_memory == "each" else rule.num_hosts(run.dirs[0])
    typed = tuple(Fraction(host // (num_each * GIB) * num_each * GIB) for host in hosts)
    if sum(typed) < memory * (1 - Fraction(edition.sizing.memory_tolerance)):
        return None
    finding = _compare_with_memory(
        run.dirs[0], typed, edition, f"whole GiB, which leaves out {float(1 - sum(typed) / memory):.2%}"
    )
    return finding if finding.verdict is Verdict.WARNING else None


def _read_files(run: ResultDir) -> tuple[int, int]:
    """Samples in a file, and files."""
    per_file = run.summary.integer("num_samples_per_file")
    if per_file < 1:
        raise MissingFact("num_samples_per_file is not positive", where=run.summary.file)
    return per_file, run.summary.integer("num_files_train")


def _read_memory(summary: ParsedFile, edition: Edition) -> tuple[Fraction, ...]:
    """Each host's memory in bytes, or that of all where only the sum is right."""
    stated = summary.numbers("host_memory_GB")
    num_hosts = summary.integer("num_hosts")
    if edition.sizing.host_memory == "sum":
        if min(stated) < 0 or sum(stated) <= 0:
            raise MissingFact(f"host_memory_GB is {stated!r:.60}, which is no memory", where=summary.file)
        return (sum(map(Fraction, stated), Fraction(0)) * GIB,)
    if len(stated) != num_hosts or min(stated) <= 0:
        raise MissingFact(
            f"host_memory_GB has {len(stated)} entries, {sum(entry <= 0 for entry in stated)} of them empty, "
            f"for {num_hosts} hosts: the benchmark of this edition fills the list wrongly",
            where=summary.file,
            fix="Let the reviewer compare the hosts' memory with the number of files.",
        )
    return tuple(Fraction(entry) * GIB for entry in stated)


def find_memory_limit(systems: tuple[ParsedFile, ...]) -> tuple[int, str] | None:
    """The limit of a host's memory in bytes that the system description states, and its file."""
    limits = {
        (int(match[1]) * _UNITS[match[2].upper()], system.file)
        for system in systems
        if not system.problem
        for text in _strings(system.content)
        for match in _MEMORY_LIMIT.finditer(text)
    }
    return limits.pop() if len(limits) == 1 else None


def _strings(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | dict):
        for entry in content.values() if isinstance(content, dict) else content:
            yield from _strings(entry)
