"""Rules on where a run read, wrote and logged: set, different, and on different file systems."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.submission.parsed_file import Unknown
from penstock.submission.recomputed_metrics import record_bytes
from penstock.submission.rules.rule import BOTH, LATER, NEWEST, JobRule, judged, not_applicable, parameters_of
from penstock.submission.tree_layout import Benchmark

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.finding import Finding
    from penstock.submission.result_files import Job, Result


_MOUNT: Final = re.compile(r"^(\S+)\s+\d+\s+\d+\s+\d+\s+\d+%\s+(/\S*)$", re.MULTILINE)
"""A line of `df`: the device, four figures, and where it is mounted."""


def _key(job: Job) -> str:
    return "checkpoint_folder" if job.benchmark is Benchmark.CHECKPOINTING else "data_dir"


def _path(job: Job, key: str) -> str:
    found = job.metadata.value("args", key)
    return "" if found is None else str(found)


def _is_object(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


class PathsSet(JobRule):
    """Two places."""

    editions = LATER
    benchmarks = BOTH
    id = "paths.set"
    title = "The place of the data and the place of the results are set, and differ"
    source = "3.4.1, 4.4.1"
    formula = (
        "args.data_dir (of checkpoints args.checkpoint_folder) and args.results_dir are set, and not equal"
    )
    passes = "data_dir /mnt/data, results_dir /home/acme/results"
    fails = "both /mnt/data"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a run."""
        key = _key(job)
        under_test, results = _path(job, key), _path(job, "results_dir")
        unset = [name for name, path in ((key, under_test), ("results_dir", results)) if not path]
        kept = not unset and posixpath.normpath(under_test) != posixpath.normpath(results)
        yield judged(
            kept,
            evidence=job.metadata.file,
            value=under_test,
            limit=f"not {results}",
            proof=(
                f"{' and '.join(unset)} is not set"
                if unset
                else f"{key} is {under_test}, results_dir {results}"
            ),
            fix="Repeat the run with results elsewhere than on the storage under test.",
        )


class FileSystems(JobRule):
    """Two file systems."""

    editions = LATER
    benchmarks = BOTH
    id = "paths.filesystems"
    title = "Results were written to another file system than the one under test"
    source = "3.4.2, 4.4.2"
    formula = (
        "fs_separation.json says same_filesystem: false; without it, df in the log shows two devices by "
        "longest mount; objects have no file system"
    )
    passes = "same_filesystem: false"
    fails = "same_filesystem: true"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a run."""
        if _is_object(_path(job, _key(job))):
            yield not_applicable(job.metadata.file, "the storage under test holds objects")
            return
        if job.separation.problem == "there is no such file":
            yield self._by_log(job)
            return
        same = job.separation.flag("same_filesystem")
        yield judged(
            not same,
            evidence=job.separation.file,
            value=f"same_filesystem {same}",
            limit="same_filesystem False",
            proof=f"results and storage under test are on {'one file system' if same else 'two'}",
            fix="Repeat the run with results on another file system.",
        )

    def _by_log(self, job: Job) -> Finding:
        mounts = {mount: device for device, mount in _MOUNT.findall(str(job.log.value()))}
        if not mounts:
            raise Unknown(
                "there is no fs_separation.json, and the run's log has no df",
                where=job.separation.file,
                fix="Let the reviewer ask where the results were written.",
            )
        places = [_mount_of(_path(job, name), mounts) for name in (_key(job), "results_dir")]
        kept = places[0] != places[1]
        return judged(
            kept,
            evidence=job.log.file,
            value=places[1],
            limit=f"not {places[0]}",
            proof=f"df: the storage under test is mounted at {places[0]}, the results' at {places[1]}",
            fix="Repeat the run with results on another file system.",
        )


def _mount_of(path: str, mounts: dict[str, str]) -> str:
    """The longest mount point that `path` is below."""
    place = posixpath.normpath(posixpath.join("/", path))
    below = [mount for mount in mounts if f"{place}/".startswith(f"{mount.rstrip('/')}/")]
    return max(below, key=len, default="/")


def _num_files(job: Job, edition: Edition) -> int:
    """As the leaf sums it up; else as its whole configuration has it."""
    if job.metadata.has("dataset", "num_files_train"):
        return job.metadata.whole("dataset", "num_files_train")
    return job.metadata.whole(parameters_of(job, edition), "dataset", "num_files_train")


def _generated(result: Result) -> Job:
    if not result.datagen:
        raise Unknown("there is no leaf in datagen/", where=result.name)
    return result.datagen[-1]


class Sized(JobRule):
    """The data set was sized."""

    editions = NEWEST
    id = "dataset.sized"
    title = "A run has at least as many files as were sized for its folder of data"
    source = "3.1.1, 3.3.1 (DATASIZE-MISSING, DATASIZE-UNDERRUN)"
    formula = (
        "num_files of the last datasize leaf with the run's data_dir and accelerator <= the run's num_files"
    )
    passes = "28,000 files sized, 28,000 read"
    fails = "28,000 files sized, 27,999 read"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a run."""
        data_folder = job.metadata.value("args", "data_dir")
        sized = [
            leaf
            for leaf in result.datasize
            if leaf.metadata.value("args", "data_dir") == data_folder
            and leaf.accelerator() == job.accelerator()
        ]
        if not sized:
            yield judged(
                kept=False,
                evidence=result.name,
                proof=f"no datasize leaf is of {data_folder} on {job.accelerator()}",
                fix="Size the data set (penstock training size), and hand in the leaf.",
            )
            return
        asked, read = _num_files(sized[-1], edition), job.summary.whole("num_files_train")
        yield judged(
            asked <= read,
            evidence=job.summary.file,
            value=f"{read:,} files",
            limit=f"{asked:,} files",
            proof=f"{asked:,} files sized {'<=' if asked <= read else '>'} {read:,} files read",
            fix=f"Generate at least {asked:,} files and repeat the runs.",
        )


class Generated(JobRule):
    """The data set was generated."""

    editions = LATER
    id = "dataset.generated"
    title = "A run reads no more files than were generated, in the same folders"
    source = "3.3.1 (DATAGEN-OVERRUN)"
    formula = "the run's num_files <= that of the datagen leaf; num_subfolders are the same"
    passes = "28,000 files generated, 28,000 read"
    fails = "27,999 files generated, 28,000 read"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for files, one for folders."""
        made = _generated(result)
        there, read = _num_files(made, edition), job.summary.whole("num_files_train")
        yield judged(
            read <= there,
            evidence=made.metadata.file,
            value=f"{read:,} files",
            limit=f"{there:,} files",
            proof=f"{read:,} files read {'<=' if read <= there else '>'} {there:,} files generated",
            fix="Generate all files that the runs read.",
        )
        folders = [_num_folders(leaf) for leaf in (made, job)]
        yield judged(
            folders[0] == folders[1],
            evidence=job.config.file,
            value=f"{folders[1]:,} folders",
            limit=f"{folders[0]:,} folders",
            proof=f"{folders[0]:,} folders generated, {folders[1]:,} read",
            fix="Read the folders that were generated.",
        )


def _num_folders(job: Job) -> int:
    return job.config.whole("workload", "dataset", "num_subfolders_train")


class GeneratedBytes(JobRule):
    """The data set has its bytes."""

    editions = LATER
    id = "dataset.bytes"
    title = "At least as many bytes were generated as a run reads"
    source = "3.2.1"
    formula = "files x samples a file x bytes a sample of the datagen leaf >= those of the run"
    passes = "the same files, samples and bytes"
    fails = "generated with a record length of 1"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a run."""
        made = _generated(result)
        there = _num_files(made, edition) * _file_bytes(made)
        read = job.summary.whole("num_files_train") * _file_bytes(job)
        yield judged(
            there >= read,
            evidence=made.config.file,
            value=f"{there:,} B",
            limit=f"{read:,} B",
            proof=f"{there:,} B generated {'>=' if there >= read else '<'} {read:,} B read",
            fix="Generate the data set with the workload's own values.",
        )


def _file_bytes(job: Job) -> int:
    return round(job.config.whole("workload", "dataset", "num_samples_per_file") * record_bytes(job))
