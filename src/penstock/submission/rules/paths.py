"""Rules on where a run read, wrote and logged: set, different, and on different file systems."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.submission.facts import Unknown
from penstock.submission.names import Benchmark
from penstock.submission.rules.base import BOTH, LATER, JobRule, judged, not_applicable

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.finding import Finding
    from penstock.submission.reading import Job, Result

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
