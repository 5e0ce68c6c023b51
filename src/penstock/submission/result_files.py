"""The files of one result as documents: read once, and what cannot be read says so when it is asked.

Place in the flow: `tree` finds a place, this reads it, rules judge it. Invariant: nothing here raises for
what a file holds; a rule that needs it gets `Unknown`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.submission import tree_layout
from penstock.submission.code_image import POINTER
from penstock.submission.find_results import REPORT, Place
from penstock.submission.parsed_file import (
    Document,
    Unknown,
    read_description,
    read_document,
    read_file,
    relative,
)
from penstock.submission.tree_layout import Benchmark

if TYPE_CHECKING:
    from penstock.submission.tree_context import Surroundings

_RANK_STATS: Final = re.compile(r"\d+_per_epoch_stats\.json")
_NOTHING: Final = Document(file="", problem="this edition has no such file")
_TRAILING_COMMA: Final = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
"""A text, which is kept, or a comma that JSON does not allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The output of one launcher in one run: usually all of it, else one client's share.

    `pointer` is the text of the leaf's pointer to its code image, `stats` what each rank says of its epochs
    (of checkpoints alone), `log` what the run printed; v1.0 has none of these, and no metadata.
    """

    name: str
    benchmark: Benchmark
    summary: Document
    config: Document
    overrides: Document
    files: frozenset[str]
    metadata: Document
    provenance: Document
    pointer: Document
    separation: Document
    generated: Document
    record: Document
    log: Document
    stats: tuple[Document, ...] = ()

    def settings(self) -> Mapping[str, str]:
        """What the command line set, by key without `++` and `workload.`; the workload by `workload`."""
        lines = self.overrides.value()
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise Unknown("this is no list of overrides", where=self.overrides.file)
        pairs = (line.lstrip("+~").partition("=") for line in lines)
        return {key.removeprefix("workload."): value for key, _, value in pairs}

    def workload(self) -> tuple[str, str]:
        """The family and the accelerator: `workload=unet3d_h100` is (`unet3d`, `h100`).

        Of checkpoints both are as the metadata have them, because their configuration names no accelerator.
        """
        if self.benchmark is Benchmark.CHECKPOINTING:
            return self.metadata.text("model").lower(), self.accelerator()
        settings = self.settings()
        if "workload" not in settings:
            raise Unknown("no override says workload=...", where=self.overrides.file)
        family, _, accelerator = settings["workload"].lower().rpartition("_")
        if not family:
            raise Unknown(f"workload={accelerator} names no accelerator", where=self.overrides.file)
        return family, accelerator

    def accelerator(self) -> str:
        """The accelerator that the metadata name; "" where they name none."""
        for path in (("accelerator",), ("args", "accelerator_type")):
            if self.metadata.has(*path):
                return self.metadata.text(*path).lower()
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the runs of a result; jobs add up. A warm-up is judged, and counts in no mean."""

    name: str
    jobs: tuple[Job, ...]
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that is known of one result. `name` tells results of one place apart."""

    name: str
    place: Place
    runs: tuple[Run, ...]
    report: Document
    systems: tuple[Document, ...]
    around: Surroundings
    datasize: tuple[Job, ...] = ()
    datagen: tuple[Job, ...] = ()

    @property
    def measured(self) -> tuple[Run, ...]:
        """The runs that count."""
        return tuple(run for run in self.runs if not run.is_warm_up)

    def jobs(self) -> tuple[Job, ...]:
        """Every job of every run."""
        return tuple(job for run in self.runs for job in run.jobs)

    def leaves(self) -> tuple[Job, ...]:
        """Every job of every phase."""
        return (*self.datasize, *self.datagen, *self.jobs())


def read_results(place: Place, around: Surroundings, root: Path, *, num_warm_ups: int) -> tuple[Result, ...]:
    """Read the files of `place`; names are relative to `root`.

    Where runs are named by time and are on several accelerators, each of these is a result of its own, and
    the first `num_warm_ups` of its runs are warm-ups.
    """
    base = root.resolve()
    if not place.model:
        return (_numbered(place, around, base),)
    if place.benchmark not in tree_layout.JUDGED:
        return (_result(place, around, base, runs=(), name=place.name),)
    runs = [_timed_run(folder, place, base) for folder in place.run_folders]
    groups = _by_accelerator(runs)
    return tuple(
        _result(
            place,
            around,
            base,
            runs=_marked(group, num_warm_ups if place.benchmark is Benchmark.TRAINING else 0),
            name=place.name if len(groups) == 1 else f"{place.name} ({accelerator or 'unknown'})",
        )
        for accelerator, group in groups.items()
    )


def _numbered(place: Place, around: Surroundings, base: Path) -> Result:
    report = next(
        (path for path in (place.folder / REPORT, place.folder / "runs" / REPORT) if path.exists()), None
    )
    return Result(
        name=place.name,
        place=place,
        runs=tuple(_run(folder, base) for folder in place.run_folders),
        report=read_document(report or place.folder / REPORT, base),
        systems=tuple(_description(path, base) for path in _systems(place)),
        around=around,
    )


def _result(place: Place, around: Surroundings, base: Path, *, runs: tuple[Run, ...], name: str) -> Result:
    is_training = place.benchmark is Benchmark.TRAINING
    above = next((run.parent for run in place.run_folders), place.folder) if is_training else place.folder
    described = place.submitter.folder / "systems" / f"{place.system}.yaml"
    return Result(
        name=name,
        place=place,
        runs=runs,
        report=read_document(above / tree_layout.RESULTS_FILE, base),
        systems=(read_description(described, base),) if described.exists() else (),
        around=around,
        datasize=tuple(
            _leaf(folder, place, tree_layout.Phase.DATASIZE, base) for folder in place.datasize_folders
        ),
        datagen=tuple(
            _leaf(folder, place, tree_layout.Phase.DATAGEN, base) for folder in place.datagen_folders
        ),
    )


def _by_accelerator(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs whose accelerator cannot be read join the others where these are all on one."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        try:
            accelerator = run.jobs[0].workload()[1]
        except Unknown:  # the rule on workloads names what is missing
            accelerator = ""
        groups.setdefault(accelerator, []).append(run)
    if len(groups) == 2 and "" in groups:
        known = next(name for name in groups if name)
        return {known: runs}
    return groups or {"": []}


def _marked(runs: list[Run], num_warm_ups: int) -> tuple[Run, ...]:
    first = num_warm_ups if len(runs) > num_warm_ups else 0
    return tuple(replace(run, is_warm_up=number < first) for number, run in enumerate(runs))


def _systems(place: Place) -> list[Path]:
    """The description that has the system's name; else all that the submitter gives."""
    described = sorted(place.submitter.folder.glob("[Ss]ystems/*.json"))
    return [path for path in described if path.stem == place.system] or described


def _description(path: Path, base: Path) -> Document:
    """People write these by hand: a comma too many is remarked on, not a reason to know nothing."""
    strict = read_document(path, base)
    if not strict.problem:
        return strict
    try:
        text = _TRAILING_COMMA.sub(lambda match: match[1] or "", path.read_text(encoding="utf-8-sig"))
        return Document(
            file=strict.file, tree=json.loads(text), remark="a comma stands before a closing bracket"
        )
    except (OSError, ValueError, RecursionError):
        return strict


def _run(folder: Path, base: Path) -> Run:
    clients = sorted(path.parent for path in folder.glob("*/summary.json"))
    folders = [folder] if (folder / "summary.json").exists() or not clients else clients
    return Run(name=folder.name, jobs=tuple(_job(each, base) for each in folders))


def _job(folder: Path, base: Path) -> Job:
    found = _names_in(folder, "configs")
    return _read_job(folder, base, benchmark=Benchmark.TRAINING, files=found, config="configs", log="")


def _names_in(folder: Path, inner: str) -> frozenset[str]:
    """What is in a folder and in one of its folders. Names alone, since a large round has many."""
    found = set(os.listdir(folder))  # noqa: PTH208 - thousands of files: a Path costs more
    if inner in found and (folder / inner).is_dir():
        found.update(f"{inner}/{name}" for name in os.listdir(folder / inner))  # noqa: PTH208 - likewise
    return frozenset(found)


def _timed_run(folder: Path, place: Place, base: Path) -> Run:
    return Run(name=folder.name, jobs=(_leaf(folder, place, tree_layout.Phase.RUN, base),))


def _leaf(folder: Path, place: Place, phase: tree_layout.Phase, base: Path) -> Job:
    """The files of one leaf, and those in its folder of configuration."""
    found = _names_in(folder, tree_layout.CONFIG_FOLDER)
    log, _ = tree_layout.log_names(place.benchmark, phase)
    return _read_job(
        folder, base, benchmark=place.benchmark, files=found, config=tree_layout.CONFIG_FOLDER, log=log
    )


def _read_job(
    folder: Path, base: Path, *, benchmark: Benchmark, files: frozenset[str], config: str, log: str
) -> Job:
    told, place = relative(folder, base), str(folder)

    def document(name: str) -> Document:
        if name and name not in files:
            return Document(file=f"{told}/{name}", problem="there is no such file")
        return read_file(f"{place}/{name}", f"{told}/{name}") if name else _NOTHING

    described = sorted(name for name in files if name.endswith(tree_layout.METADATA_SUFFIX))
    metadata = (
        document(described[0])
        if len(described) == 1
        else Document(
            file=relative(folder, base),
            problem=f"it has {len(described)} files *{tree_layout.METADATA_SUFFIX}, not one",
        )
    )
    is_checkpoint = benchmark is Benchmark.CHECKPOINTING
    return Job(
        name=told,
        benchmark=benchmark,
        summary=document(tree_layout.SUMMARY),
        config=document(f"{config}/config.yaml"),
        overrides=document(f"{config}/overrides.yaml"),
        files=files,
        metadata=metadata,
        provenance=document(tree_layout.PROVENANCE),
        pointer=document(POINTER),
        separation=document(tree_layout.SEPARATION),
        generated=document(tree_layout.DATAGEN_MANIFEST),
        record=document(tree_layout.RUN_RECORD),
        log=document(log),
        stats=tuple(map(document, sorted(filter(_RANK_STATS.fullmatch, files)))) if is_checkpoint else (),
    )
