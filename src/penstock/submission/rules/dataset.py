"""Rules on the data set's way: sized, then generated, then read; each at least as large as the one before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.facts import Unknown
from penstock.submission.metrics import record_bytes
from penstock.submission.rules.base import LATER, NEWEST, JobRule, judged, parameters_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.finding import Finding
    from penstock.submission.reading import Job, Result


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
