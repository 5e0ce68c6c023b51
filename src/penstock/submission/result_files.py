"""The files of one result, parsed: its runs, their result directories, its description and its report.

`find_results` locates a result, this module reads it, rules judge it. Invariant: no content of a file makes
reading fail; a rule that needs a missing field gets `MissingFact`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypedDict

from penstock.errors import Unavailable
from penstock.submission import kv_cache_runs, tree_layout, vector_search_runs
from penstock.submission.bounded_parse import MAX_YAML_BYTES, parse_lenient_json
from penstock.submission.bounded_read import LEADS_OUT, leads_out, read_bytes, tree_of
from penstock.submission.code_image import POINTER
from penstock.submission.find_numbered_results import V1_REPORT_FILE, list_clients
from penstock.submission.find_results import ResultLocation
from penstock.submission.folder_listing import find_file, find_folder, is_leaving, list_folder
from penstock.submission.parsed_file import (
    NO_FILE,
    MissingFact,
    ParsedFile,
    read_description,
    read_file,
    read_named_file,
    relative,
)
from penstock.submission.tree_context import TreeContext
from penstock.submission.tree_layout import Benchmark, SubmissionPhase

_V1_STATS: Final = "per_epoch_stats.json"
_RANK_STATS: Final = re.compile(r"\d+_per_epoch_stats\.json")
_NOT_IN_EDITION: Final = ParsedFile(file="", problem="this edition has no such file")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDir:
    """One result directory: what one launcher wrote, which in v1.0 may be one client's share of a run.

    `pointer` is the text of its pointer to a code image, `record` our own `run.json`, `epochs` what the first
    rank reports of its epochs, `stats` what each reports of them (of checkpoints alone), `log` what the run
    printed. v1.0 has only `epochs` of these, and no metadata. `files` has names in lower case, `unlisted` the
    reason why there are none. `ranks` are what each rank of a key-value cache reports; `aggregate` and
    `ground_truth` belong to vector search.
    """

    name: str
    benchmark: Benchmark
    summary: ParsedFile
    config: ParsedFile
    overrides: ParsedFile
    files: frozenset[str]
    metadata: ParsedFile
    provenance: ParsedFile
    pointer: ParsedFile
    separation: ParsedFile
    record: ParsedFile
    log: ParsedFile
    epochs: ParsedFile
    stats: tuple[ParsedFile, ...] = ()
    unlisted: str = ""
    ranks: tuple[kv_cache_runs.RankResult, ...] = ()
    aggregate: ParsedFile = _NOT_IN_EDITION
    ground_truth: ParsedFile = _NOT_IN_EDITION

    def settings(self) -> Mapping[str, str]:
        """The command line's settings by key, without `++` and `workload.`; the workload is `workload`."""
        lines = self.overrides.value()
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise MissingFact("this is not a list of overrides", where=self.overrides.file)
        pairs = (line.lstrip("+~").partition("=") for line in lines)
        return {key.removeprefix("workload."): value for key, _, value in pairs}

    def workload(self) -> tuple[str, str]:
        """The family and the accelerator: `workload=unet3d_h100` is (`unet3d`, `h100`).

        But for training both come from the metadata, because no configuration names an accelerator.
        """
        if self.benchmark is not Benchmark.TRAINING:
            return self.metadata.text("model").lower(), self.accelerator()
        settings = self.settings()
        if "workload" not in settings:
            raise MissingFact("no override says workload=...", where=self.overrides.file)
        family, _, accelerator = settings["workload"].lower().rpartition("_")
        if not family:
            raise MissingFact(f"workload={accelerator} names no accelerator", where=self.overrides.file)
        return family, accelerator

    def accelerator(self) -> str:
        """The accelerator in the metadata; "" if there is none."""
        for path in (("accelerator",), ("args", "accelerator_type")):
            if self.metadata.has(*path):
                return self.metadata.text(*path).lower()
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRun:
    """One run of a result; figures add up over its directories. A warm-up counts in no mean."""

    name: str
    dirs: tuple[ResultDir, ...]
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedResult:
    """All files of one result. `name` is unique, even if one folder has several results."""

    name: str
    location: ResultLocation
    runs: tuple[ResultRun, ...]
    report: ParsedFile
    systems: tuple[ParsedFile, ...]
    context: TreeContext
    datasize: tuple[ResultDir, ...] = ()
    datagen: tuple[ResultDir, ...] = ()

    @property
    def counted_runs(self) -> tuple[ResultRun, ...]:
        """The runs that count in means."""
        return tuple(run for run in self.runs if not run.is_warm_up)

    def run_dirs(self) -> tuple[ResultDir, ...]:
        """The result directories of all runs."""
        return tuple(directory for run in self.runs for directory in run.dirs)

    def all_dirs(self) -> tuple[ResultDir, ...]:
        """The result directories of all phases."""
        return (*self.datasize, *self.datagen, *self.run_dirs())


def read_results(
    location: ResultLocation, context: TreeContext, root: Path, *, num_warm_ups: int
) -> tuple[SubmittedResult, ...]:
    """Read the results of one location; file names are relative to `root`.

    Runs named by time are grouped by accelerator: each group is a result of its own, whose first
    `num_warm_ups` runs are warm-ups.
    """
    base = root.resolve()
    if not location.model:
        return (_read_numbered(location, context, base),)
    runs = [
        ResultRun(name=folder.name, dirs=(_read_timed_dir(folder, location, SubmissionPhase.RUN, base),))
        for folder in location.run_folders
    ]
    if location.benchmark is Benchmark.KV_CACHE:
        runs = _published_run(runs)
    groups = _group_by_accelerator(runs)
    is_training = location.benchmark is Benchmark.TRAINING
    return tuple(
        _read_timed(
            location,
            context,
            base,
            runs=_mark_warm_ups(group, num_warm_ups if is_training else 0),
            name=location.name if len(groups) == 1 else f"{location.name} ({accelerator or 'unknown'})",
        )
        for accelerator, group in groups.items()
    )


def _published_run(runs: list[ResultRun]) -> list[ResultRun]:
    """Of several runs of a key-value cache the latest without errors, else the latest; a result has one."""
    error_free = [run for run in runs if kv_cache_runs.is_error_free(run.dirs[0].summary)]
    return (error_free or runs)[-1:]


def _read_numbered(location: ResultLocation, context: TreeContext, base: Path) -> SubmittedResult:
    """A result of v1.0, whose description may lie beside its runs instead of in systems/."""
    places = (location.folder, *(folder.parent for folder in location.run_folders[:1]))
    reports = [path for place in places if (path := find_file(place, V1_REPORT_FILE))]
    described = _list_descriptions(location)
    return SubmittedResult(
        name=location.name,
        location=location,
        runs=tuple(_read_numbered_run(folder, base) for folder in location.run_folders),
        report=read_file(reports[0] if reports else location.folder / V1_REPORT_FILE, base),
        systems=tuple(
            _read_lenient_json(path, base)
            for path in [path for path in described if path.stem == location.system] or described
        ),
        context=context,
    )


def _list_descriptions(location: ResultLocation) -> list[Path]:
    """The JSON files in the submitter's systems/, else in one that lies among the results."""
    submitter = location.submitter.folder
    above = [path for path in location.folder.parents if path.is_relative_to(submitter)]
    for place in (submitter, location.folder, *above):
        described = [
            path for path in list_folder(find_folder(place, "systems")) if path.suffix.lower() == ".json"
        ]
        if described:
            return described
    return []


def _read_numbered_run(folder: Path, base: Path) -> ResultRun:
    clients = [] if find_file(folder, tree_layout.SUMMARY) else list_clients(folder)
    dirs = tuple(
        _read_dir(path, base, benchmark=Benchmark.TRAINING, config_folder="configs", log="")
        for path in clients or [folder]
    )
    return ResultRun(name=folder.name, dirs=dirs)


def _read_lenient_json(path: Path, base: Path) -> ParsedFile:
    """Read handwritten JSON: a trailing comma is only remarked on."""
    strict = read_file(path, base)
    if not strict.problem:
        return strict
    try:
        content = parse_lenient_json(read_bytes(str(path), tree_of(path, base), MAX_YAML_BYTES)).content
    except (OSError, ValueError, RecursionError):
        return strict
    return ParsedFile(file=strict.file, content=content, remark="a comma stands before a closing bracket")


def _read_timed(
    location: ResultLocation, context: TreeContext, base: Path, *, runs: tuple[ResultRun, ...], name: str
) -> SubmittedResult:
    is_training = location.benchmark is Benchmark.TRAINING
    above = location.run_folders[0].parent if is_training and location.run_folders else location.folder
    description = find_file(find_folder(location.submitter.folder, "systems"), f"{location.system}.yaml")

    def read_phase(folders: tuple[Path, ...], phase: SubmissionPhase) -> tuple[ResultDir, ...]:
        return tuple(_read_timed_dir(folder, location, phase, base) for folder in folders)

    return SubmittedResult(
        name=name,
        location=location,
        runs=runs,
        report=read_file(above / tree_layout.RESULTS_FILE, base),
        systems=(read_description(description, base),) if description else (),
        context=context,
        datasize=read_phase(location.datasize_folders, SubmissionPhase.DATASIZE),
        datagen=read_phase(location.datagen_folders, SubmissionPhase.DATAGEN),
    )


def _group_by_accelerator(runs: list[ResultRun]) -> dict[str, list[ResultRun]]:
    """Group runs; those without a readable accelerator join the others if these have one in common."""
    groups: dict[str, list[ResultRun]] = {}
    for run in runs:
        try:
            _, accelerator = run.dirs[0].workload()
        except MissingFact:  # the rule on workloads names what is missing
            accelerator = ""
        groups.setdefault(accelerator, []).append(run)
    if len(groups) == 2 and "" in groups:
        known = next(name for name in groups if name)
        return {known: runs}
    return groups or {"": []}


def _mark_warm_ups(runs: list[ResultRun], num_warm_ups: int) -> tuple[ResultRun, ...]:
    # If no run would be left to count, all count, so that no figure escapes the rules.
    first_counted = num_warm_ups if len(runs) > num_warm_ups else 0
    return tuple(replace(run, is_warm_up=index < first_counted) for index, run in enumerate(runs))


def _read_timed_dir(folder: Path, location: ResultLocation, phase: SubmissionPhase, base: Path) -> ResultDir:
    log, _ = tree_layout.log_names(location.benchmark, phase)
    return _read_dir(
        folder, base, benchmark=location.benchmark, config_folder=tree_layout.CONFIG_FOLDER, log=log
    )


def _list_files(folder: Path, config_folder: str, base: Path) -> tuple[dict[str, str], str]:
    """The files of a folder and of its configuration folder by their names in lower case, and a problem.

    Contents are read only where rules need them.
    """
    if folder.is_symlink() and leads_out(folder, base):
        return {}, f"its folder cannot be listed: {LEADS_OUT}"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - thousands of folders, where a Path costs more
        files = {name.lower(): name for name in names if not is_leaving(name)}
        inner = files.get(config_folder)
        if inner is not None and (folder / inner).is_dir():
            below = os.listdir(folder / inner)  # noqa: PTH208 - likewise
            files |= {
                f"{config_folder}/{name.lower()}": f"{inner}/{name}" for name in below if not is_leaving(name)
            }
    except OSError as error:
        return {}, f"its folder cannot be listed: {error.strerror}"
    return files, ""


def _summary_name(benchmark: Benchmark, files: Mapping[str, str]) -> str:
    """Older tools wrote that of a key-value cache under another name."""
    if benchmark is not Benchmark.KV_CACHE or tree_layout.SUMMARY in files:
        return tree_layout.SUMMARY
    return next(filter(kv_cache_runs.OLD_SUMMARY.fullmatch, files), tree_layout.SUMMARY)


def _read_dir(folder: Path, base: Path, *, benchmark: Benchmark, config_folder: str, log: str) -> ResultDir:
    name, path, tree = relative(folder, base), str(folder), str(base)
    files, unlisted = _list_files(folder, config_folder, base)

    def read(file: str) -> ParsedFile:
        if file in files:
            return read_named_file(f"{path}/{files[file]}", f"{name}/{files[file]}", tree)
        return ParsedFile(file=f"{name}/{file}", problem=unlisted or NO_FILE)

    metadata_files = [file for file in files if file.endswith(tree_layout.METADATA_SUFFIX)]
    if len(metadata_files) == 1:
        metadata = read(metadata_files[0])
    else:
        problem = f"it has {len(metadata_files)} files *{tree_layout.METADATA_SUFFIX}, not one"
        metadata = ParsedFile(file=name, problem=problem)
    stats = sorted(filter(_RANK_STATS.fullmatch, files))
    return ResultDir(
        name=name,
        benchmark=benchmark,
        summary=read(_summary_name(benchmark, files)),
        config=read(f"{config_folder}/config.yaml"),
        overrides=read(f"{config_folder}/overrides.yaml"),
        files=frozenset(files),
        metadata=metadata,
        provenance=read(tree_layout.PROVENANCE),
        pointer=read(POINTER),
        separation=read(tree_layout.SEPARATION),
        record=read(tree_layout.RUN_RECORD),
        log=read(log) if log else _NOT_IN_EDITION,
        epochs=read(next((name for name in (_V1_STATS, *stats[:1]) if name in files), _V1_STATS)),
        stats=tuple(map(read, stats)) if benchmark is Benchmark.CHECKPOINTING else (),
        unlisted=unlisted,
        **_read_queries(folder, base, benchmark, read),
    )


class _QueryFiles(TypedDict, total=False):
    ranks: tuple[kv_cache_runs.RankResult, ...]
    aggregate: ParsedFile
    ground_truth: ParsedFile


def _read_queries(
    folder: Path, base: Path, benchmark: Benchmark, read: Callable[[str], ParsedFile]
) -> _QueryFiles:
    """The files that only key-value caches or only vector search have."""
    if benchmark is Benchmark.KV_CACHE:
        try:
            return {"ranks": kv_cache_runs.read_rank_results(folder, base)}
        except Unavailable:  # rules on figures say that files of ranks are missing
            return {}
    if benchmark is Benchmark.VECTOR_SEARCH:
        try:
            aggregate = vector_search_runs.read_aggregate(folder, base)
        except Unavailable as error:
            aggregate = ParsedFile(file=relative(folder, base), problem=str(error))
        return {"aggregate": aggregate, "ground_truth": read(vector_search_runs.VERDICT)}
    return {}
