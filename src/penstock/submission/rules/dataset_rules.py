"""Rules about the data: where it was read and logged, and that it was sized, generated and read in full."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding, not_applicable, pass_if, violation
from penstock.submission.parsed_file import MissingFact
from penstock.submission.recomputed_metrics import record_bytes
from penstock.submission.rules.rule import BOTH, LATER, NEWEST, ResultCase, RunCase, limit_rule, run_rule

if TYPE_CHECKING:
    from penstock.submission.result_files import ResultDir

_MOUNT: Final = re.compile(r"^(\S+)\s+\d+\s+\d+\s+\d+\s+\d+%\s+(/\S*)$", re.MULTILINE)
"""A line of `df`: the device, four figures, and where it is mounted."""


def _storage_key(case: RunCase) -> str:
    """The argument that names the storage under test."""
    return "checkpoint_folder" if case.is_checkpointing else "data_dir"


def _path_argument(run: ResultDir, key: str) -> str:
    path = run.metadata.value("args", key)
    return "" if path is None else str(path)


@run_rule(
    id="paths.set",
    title="The paths of the data and of the results are set, and differ",
    editions=LATER,
    benchmarks=BOTH,
    source="3.4.1, 4.4.1",
    formula=(
        "args.data_dir (of checkpoints args.checkpoint_folder) and args.results_dir are set, and not equal"
    ),
    passes="data_dir /mnt/data, results_dir /home/acme/results",
    fails="both /mnt/data",
)
def _check_paths(case: RunCase) -> Iterator[Finding]:
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
    )


@run_rule(
    id="paths.filesystems",
    title="Results were written to another file system than the one under test",
    editions=LATER,
    benchmarks=BOTH,
    source="3.4.2, 4.4.2",
    formula=(
        "fs_separation.json says same_filesystem: false; without it, df in the log shows two devices by "
        "longest mount; objects have no file system"
    ),
    passes="same_filesystem: false",
    fails="same_filesystem: true",
)
def _check_file_systems(case: RunCase) -> Iterator[Finding]:
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


def _judge_mounts(case: RunCase) -> Finding:
    """By the output of `df` in the run's log, which tools wrote before they probed the file systems."""
    run = case.run
    mounts = [mount for _, mount in _MOUNT.findall(str(run.log.value()))]
    if not mounts:
        raise MissingFact(
            "there is no fs_separation.json, and the run's log has no df",
            where=run.separation.file,
            fix="Let the reviewer ask where the results were written.",
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


def _require_datagen(case: ResultCase) -> ResultDir:
    """The result directory of the last data generation."""
    if not case.result.datagen:
        raise MissingFact("there is no result directory in datagen/", where=case.result.name)
    return case.result.datagen[-1]


def _num_files(directory: ResultDir, case: RunCase) -> int:
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


@run_rule(
    id="dataset.sized",
    title="A run has at least as many files as were sized for its data folder",
    editions=NEWEST,
    source="3.1.1, 3.3.1 (DATASIZE-MISSING, DATASIZE-UNDERRUN)",
    formula="num_files of the last datasize with the run's data_dir and accelerator <= the run's num_files",
    passes="28,000 files sized, 28,000 read",
    fails="28,000 files sized, 27,999 read",
)
def _check_sized_files(case: RunCase) -> Iterator[Finding]:
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
    )


@run_rule(
    id="dataset.generated",
    title="A run reads no more files than were generated, in the same folders",
    editions=LATER,
    source="3.3.1 (DATAGEN-OVERRUN)",
    formula="the run's num_files <= that of the data generation; num_subfolders are the same",
    passes="28,000 files generated, 28,000 read",
    fails="27,999 files generated, 28,000 read",
)
def _check_generated_files(case: RunCase) -> Iterator[Finding]:
    datagen = _require_datagen(case)
    generated, read = _num_files(datagen, case), case.run.summary.integer("num_files_train")
    yield pass_if(
        read <= generated,
        evidence=datagen.metadata.file,
        value=f"{read:,} files",
        limit=f"{generated:,} files",
        proof=f"{read:,} files read {'<=' if read <= generated else '>'} {generated:,} files generated",
        fix="Generate all files that the runs read.",
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


def _generated_bytes(case: RunCase) -> int:
    datagen = _require_datagen(case)
    return _num_files(datagen, case) * _file_bytes(datagen)


limit_rule(
    RunCase,
    id="dataset.bytes",
    title="At least as many bytes were generated as a run reads",
    editions=LATER,
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
