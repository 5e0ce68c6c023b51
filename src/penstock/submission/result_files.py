"""The files of one result, parsed, and the files that the results of a submitter share.

`find_results` locates a result, this module reads its files, rules judge it. Invariants: no content of a file
makes reading fail; a rule that needs a missing field gets `MissingFact`; each code image of a pool is hashed
once, however many results point to it.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.errors import Unavailable
from penstock.submission import tree_layout
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK, parse_pointer, tree_digest
from penstock.submission.find_results import (
    V1_REPORT_FILE,
    ResultLocation,
    Submitter,
    find_result_dirs,
    find_submitters,
    list_clients,
)
from penstock.submission.parsed_file import (
    LEADS_OUT,
    MAX_YAML_BYTES,
    NO_FILE,
    MissingFact,
    ParsedFile,
    parse_json,
    read_bytes,
    read_description,
    read_file,
    read_named_file,
    relative,
    tree_of,
)
from penstock.submission.tree_layout import (
    Benchmark,
    SubmissionPhase,
    find_file,
    find_folder,
    is_leaving,
    list_folder,
    list_names,
    list_subfolders,
)

_V1_STATS: Final = "per_epoch_stats.json"
_RANK_STATS: Final = re.compile(r"\d+_per_epoch_stats\.json")
_NOT_IN_EDITION: Final = ParsedFile(file="", problem="this edition has no such file")
_NOTHING: Final = ParsedFile(file="", problem=NO_FILE)
_IMAGE: Final = re.compile(r"code-[0-9a-f]{8}")
_OLD_SUMMARY: Final = re.compile(r"kvcache_run_summary_\d{8}_\d{6}\.json")
"""The name of the summary in older tools for key-value caches."""
_RANK_FILE: Final = re.compile(r"kvcache_results_.*\.json", re.IGNORECASE)
_AGGREGATES: Final = ("vdb_multi_node_summary.json", "statistics.json")
"""The names of the files with vector search's figures over all ranks."""
RankResult = tuple[int, int, int, ParsedFile]
"""The option, the trial and the rank of a file, and its summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDir:
    """One result directory: the output of one launcher, which in v1.0 may be one client's share of a run.

    `pointer` is the pointer to a code image, `record` Penstock's own `run.json`, `epochs` the first rank's
    report of its epochs, `stats` each rank's report (for checkpoints only), `log` the output of the run. In
    v1.0, only `epochs` exists of these, and there are no metadata. `files` has names in lower case;
    `unlisted` is the reason if they cannot be listed. `ranks` are the reports of a key-value cache's ranks;
    `aggregate` and `ground_truth` belong to vector search.
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
    ranks: tuple[RankResult, ...] = ()
    aggregate: ParsedFile = _NOT_IN_EDITION
    ground_truth: ParsedFile = _NOT_IN_EDITION

    def settings(self) -> Mapping[str, str]:
        """Return the command line's settings by key, without `++` and `workload.`; one key is `workload`."""
        lines = self.overrides.value()
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise MissingFact("this is not a list of overrides", where=self.overrides.file)
        pairs = (line.lstrip("+~").partition("=") for line in lines)
        return {key.removeprefix("workload."): value for key, _, value in pairs}

    def workload(self) -> tuple[str, str]:
        """Return the family and the accelerator: `workload=unet3d_h100` is (`unet3d`, `h100`).

        For training, they come from the configuration. For everything else, they come from the metadata,
        because no other configuration names an accelerator.
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
        """Return the accelerator in the metadata, or "" if there is none."""
        for path in (("accelerator",), ("args", "accelerator_type")):
            if self.metadata.has(*path):
                return self.metadata.text(*path).lower()
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRun:
    """One run of a result; figures add up over its directories. No mean includes a warm-up."""

    name: str
    dirs: tuple[ResultDir, ...]
    is_warm_up: bool = False


CodeImagePool = tuple[str, Mapping[str, tuple[ParsedFile, str]], frozenset[str]]
"""The name of a tree's pool, its images, and the digests to which any submitter's result directories point.

Each image comes with the file that states its digest, and the computed digest ("" if they cannot be read).
"""
NO_POOL: Final[CodeImagePool] = ("", {}, frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeContext:
    """The names in those parts of a submitter's folder that all its results share.

    Hidden entries are left out, and the names of folders end in "/". `is_merged` is true if the tree also
    holds other organizations' folders. `systems` has the entries of systems/.
    """

    name: str
    entries: tuple[str, ...] = ()
    beside_divisions: tuple[str, ...] = ()
    is_merged: bool = False
    systems: tuple[str, ...] = ()
    result_systems: tuple[str, ...] = ()
    result_dirs: tuple[str, ...] = ()
    manifest: ParsedFile = _NOTHING
    public_ids: ParsedFile = _NOTHING
    pool: CodeImagePool = NO_POOL


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

    def run_dirs(self) -> tuple[ResultDir, ...]:
        return tuple(directory for run in self.runs for directory in run.dirs)

    def all_dirs(self) -> tuple[ResultDir, ...]:
        """Return the result directories of all phases."""
        return (*self.datasize, *self.datagen, *self.run_dirs())


def read_results(
    location: ResultLocation, context: TreeContext, root: Path, *, num_warm_ups: int
) -> tuple[SubmittedResult, ...]:
    """Read the results of one location; file names are relative to `root`.

    Runs named by time are grouped by accelerator. Each group is a separate result, whose first
    `num_warm_ups` runs are warm-ups.
    """
    base = root.resolve()
    if not location.model:
        return (_read_numbered(location, context, base),)
    is_training = location.benchmark is Benchmark.TRAINING
    runs = [
        ResultRun(name=folder.name, dirs=(_read_dir(folder, base, location.benchmark, SubmissionPhase.RUN),))
        for folder in location.run_folders
    ]
    if location.benchmark is Benchmark.KV_CACHE:  # of several runs, the latest without errors counts
        runs = ([run for run in runs if _is_error_free(run.dirs[0].summary)] or runs)[-1:]
    groups = _group_by_accelerator(runs)
    above = location.run_folders[0].parent if is_training and location.run_folders else location.folder
    description = find_file(find_folder(location.submitter.folder, "systems"), f"{location.system}.yaml")
    datasize, datagen = (
        tuple(_read_dir(folder, base, location.benchmark, phase) for folder in folders)
        for folders, phase in (
            (location.datasize_folders, SubmissionPhase.DATASIZE),
            (location.datagen_folders, SubmissionPhase.DATAGEN),
        )
    )
    results = []
    for accelerator, group in groups.items():
        # If there are only warm-ups, all runs count, so that no figure escapes the rules.
        num_before = num_warm_ups if is_training and len(group) > num_warm_ups else 0
        results.append(
            SubmittedResult(
                name=location.name if len(groups) == 1 else f"{location.name} ({accelerator or 'unknown'})",
                location=location,
                runs=tuple(replace(run, is_warm_up=index < num_before) for index, run in enumerate(group)),
                report=read_file(above / tree_layout.RESULTS_FILE, base),
                systems=(read_description(description, base),) if description else (),
                context=context,
                datasize=datasize,
                datagen=datagen,
            )
        )
    return tuple(results)


def _is_error_free(summary: ParsedFile) -> bool:
    if summary.problem or not summary.has("options") or summary.content.get("trial_failures"):
        return False
    return not summary.has("partial_failure") or summary.value("partial_failure") is False


def _group_by_accelerator(runs: list[ResultRun]) -> dict[str, list[ResultRun]]:
    """Group runs by accelerator. Runs whose accelerator is unreadable join the others if these share one."""
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


def _read_numbered(location: ResultLocation, context: TreeContext, base: Path) -> SubmittedResult:
    """Read a result of v1.0, whose description may lie near its runs instead of in systems/."""
    places = (location.folder, *(folder.parent for folder in location.run_folders[:1]))
    reports = [path for place in places if (path := find_file(place, V1_REPORT_FILE))]
    runs = []
    for folder in location.run_folders:
        clients = [] if find_file(folder, tree_layout.SUMMARY) else list_clients(folder)
        dirs = tuple(_read_dir(path, base, Benchmark.TRAINING, None) for path in clients or [folder])
        runs.append(ResultRun(name=folder.name, dirs=dirs))
    # The submitter's systems/, or otherwise a description among the results.
    submitter = location.submitter.folder
    above = [path for path in location.folder.parents if path.is_relative_to(submitter)]
    for place in (submitter, location.folder, *above):
        entries = list_folder(find_folder(place, "systems"))
        if described := [path for path in entries if path.suffix.lower() == ".json"]:
            break
    named = [path for path in described if path.stem == location.system]
    return SubmittedResult(
        name=location.name,
        location=location,
        runs=tuple(runs),
        report=read_file(reports[0] if reports else location.folder / V1_REPORT_FILE, base),
        systems=tuple(_read_lenient_json(path, base) for path in named or described),
        context=context,
    )


def _read_lenient_json(path: Path, base: Path) -> ParsedFile:
    """Read handwritten JSON, in which a trailing comma only causes a remark."""
    strict = read_file(path, base)
    if strict.problem:
        with suppress(OSError, ValueError, RecursionError):
            raw = read_bytes(str(path), tree_of(path, base), MAX_YAML_BYTES)
            content, _ = parse_json(raw, is_lenient=True)
            remark = "a comma stands before a closing bracket"
            return ParsedFile(file=strict.file, content=content, remark=remark)
    return strict


def _list_files(folder: Path, config_folder: str, base: Path) -> tuple[dict[str, str], str]:
    """Return the files of a folder and its configuration folder, by name in lower case, and any problem.

    Contents are read only if rules need them.
    """
    if folder.is_symlink() and not folder.resolve().is_relative_to(base.resolve()):
        return {}, f"its folder cannot be listed: {LEADS_OUT}"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - thousands of folders, where a Path costs more
        files = {name.lower(): name for name in names if not is_leaving(name)}
        inner = files.get(config_folder)
        if inner is not None and (folder / inner).is_dir():
            below = os.listdir(folder / inner)  # noqa: PTH208 - as above
            files |= {
                f"{config_folder}/{name.lower()}": f"{inner}/{name}" for name in below if not is_leaving(name)
            }
    except OSError as error:
        return {}, f"its folder cannot be listed: {error.strerror}"
    return files, ""


def _read_dir(folder: Path, base: Path, benchmark: Benchmark, phase: SubmissionPhase | None) -> ResultDir:
    """Read a result directory. Result directories of v1.0 have no phase."""
    name, path, tree = relative(folder, base), str(folder), str(base)
    config_folder = tree_layout.CONFIG_FOLDER if phase else "configs"
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
    summary = tree_layout.SUMMARY
    queries: dict[str, Any] = {}
    if benchmark is Benchmark.KV_CACHE:
        if summary not in files:  # older tools wrote it under a different name
            summary = next(filter(_OLD_SUMMARY.fullmatch, files), summary)
        with suppress(Unavailable):  # rules on figures report that files of ranks are missing
            queries["ranks"] = read_rank_results(folder, base)
    elif benchmark is Benchmark.VECTOR_SEARCH:
        queries["ground_truth"] = read("result_verdict.json")
        try:
            queries["aggregate"] = _read_aggregate(folder, base)
        except Unavailable as error:
            queries["aggregate"] = ParsedFile(file=name, problem=str(error))
    stats = sorted(filter(_RANK_STATS.fullmatch, files))
    return ResultDir(
        name=name,
        benchmark=benchmark,
        summary=read(summary),
        config=read(f"{config_folder}/config.yaml"),
        overrides=read(f"{config_folder}/overrides.yaml"),
        files=frozenset(files),
        metadata=metadata,
        provenance=read(tree_layout.PROVENANCE),
        pointer=read(POINTER),
        separation=read(tree_layout.SEPARATION),
        record=read(tree_layout.RUN_RECORD),
        log=read(tree_layout.log_names(benchmark, phase)[0]) if phase else _NOT_IN_EDITION,
        epochs=read(next((name for name in (_V1_STATS, *stats[:1]) if name in files), _V1_STATS)),
        stats=tuple(map(read, stats)) if benchmark is Benchmark.CHECKPOINTING else (),
        unlisted=unlisted,
        **queries,
    )


def read_rank_results(folder: Path, base: Path) -> tuple[RankResult, ...]:
    """Read the files of all ranks below a key-value cache's run, in order; keep only each file's summary.

    option_O/trial_T/rank_N/kvcache_results_*.json
    """
    places: list[tuple[tuple[int, ...], Path]] = [((), folder)]
    for kind in ("option", "trial", "rank"):
        places = [
            ((*numbers, int(entry.name[len(kind) + 1 :])), entry)
            for numbers, place in places
            for entry in list_subfolders(place)
            if re.fullmatch(rf"{kind}_\d+", entry.name)
        ]
    found: list[RankResult] = []
    for (option, trial, rank), place in sorted(places):
        for path in filter(lambda each: _RANK_FILE.fullmatch(each.name), list_folder(place)):
            parsed = read_file(path, base)
            content = parsed.content.get("summary") if isinstance(parsed.content, dict) else None
            summary = ParsedFile(file=parsed.file, content=content or {}, problem=parsed.problem)
            found.append((option, trial, rank, summary))
    return tuple(found)


def _read_aggregate(folder: Path, base: Path) -> ParsedFile:
    """Read vector search's figures over all ranks, at most three levels down, as in vectordb/simple/."""
    found: dict[str, Path] = {}
    level = [folder]
    for _ in range(4):
        found |= {path.name: path for place in level for path in list_folder(place)}
        level = [below for place in level for below in list_subfolders(place)]
    for name in _AGGREGATES:
        if name in found:
            return read_file(found[name], base)
    return ParsedFile(file=f"{relative(folder, base)}/{_AGGREGATES[0]}", problem=NO_FILE)


def read_tree_context(submitter: Submitter, pool: CodeImagePool, root: Path) -> TreeContext:
    """Read the files and names that a submitter's results share; `pool` belongs to the submitter's tree."""
    base, folder = root.resolve(), submitter.folder
    result_systems = list_subfolders(find_folder(folder, "results"))
    beside_divisions: tuple[str, ...] = ()
    if submitter.division is not None:  # each organization may have a pool of code images there
        pools = {f"{each.name}/" for each in list_subfolders(submitter.top) if _is_pool(each)}
        beside_divisions = tuple(name for name in list_names(submitter.top) if name not in pools)
    return TreeContext(
        name=relative(folder, base),
        entries=list_names(folder),
        beside_divisions=beside_divisions,
        is_merged=len({other.organisation.lower() for other in find_submitters(submitter.top)}) > 1,
        systems=list_names(find_folder(folder, "systems")),
        result_systems=tuple(entry.name for entry in result_systems),
        result_dirs=tuple(path.relative_to(folder).as_posix() for path in find_result_dirs(submitter)),
        manifest=read_file(folder / tree_layout.MANIFEST, base),
        public_ids=read_file(submitter.top / tree_layout.PUBLIC_IDS, base),
        pool=pool,
    )


def find_pool(submitter: Submitter) -> Path | None:
    """Find the folder of a submitter's code images: tools keep one per tree, or one per organization."""
    top = submitter.top
    own = find_folder(top, submitter.organisation)
    candidates = [own] if own and _is_pool(own) else []
    candidates += [top / POOL, submitter.folder / POOL]
    return next((folder for folder in candidates if folder.is_dir()), None)


def _is_pool(folder: Path) -> bool:
    """Check whether an organization keeps its code images here, by the tool's mark or the images' names."""
    inner = list_subfolders(folder)
    return (folder / POOL_MARK).exists() or (
        bool(inner) and all(_IMAGE.fullmatch(entry.name) for entry in inner)
    )


def read_pool(folder: Path, submitter: Submitter, root: Path) -> CodeImagePool:
    """Hash all images in `folder`, and collect the digests that any result directory points to."""
    base, images, pointed = root.resolve(), {}, set()
    for entry in list_subfolders(folder):
        try:
            digest, stated = tree_digest(entry), read_file(entry / DIGEST_FILE, base)
        except OSError as error:  # the rule on images names the file
            unread = relative(Path(str(error.filename or entry)), base)
            digest, stated = "", ParsedFile(file=unread, problem=f"cannot be read: {error.strerror}")
        images[entry.name] = stated, digest
    for result_dir in (each for other in find_submitters(submitter.top) for each in find_result_dirs(other)):
        try:
            pointed.add(parse_pointer(read_file(result_dir / POINTER, result_dir)))
        except MissingFact:  # the rule on pointers names it
            continue
    return relative(folder, base), images, frozenset(pointed)
