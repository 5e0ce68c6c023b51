"""An edition of the rules as data: the numbers, names and lists that rules compare with.

The YAML files in `editions/` are parsed here, strictly. `choose_edition` detects each submitter's edition by
files that only that edition has; a folder may hold submitters of several editions. Invariants: rules contain
none of an edition's numbers; each submitter is judged by its own edition, and a submitter without such files
by the latest edition found in the folder.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict

from penstock.errors import Unavailable, UsageError
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK
from penstock.submission.find_results import Submitter, find_submitters, list_benchmarks, walk_result_dirs
from penstock.submission.parsed_file import MAX_YAML_BYTES, read_bytes
from penstock.submission.tree_layout import (
    MANIFEST,
    PROVENANCE,
    SENTINEL,
    Benchmark,
    find_folder,
    list_folder,
)
from penstock.workload.mlperf_divisions import SubmissionDivision
from penstock.workload.strict_yaml import parse_yaml

EDITIONS: Final = ("v1.0", "v2.0", "v3.0", "v3.0-strict")
AUTO: Final = "auto"
_ONLY_V3: Final = b"usable_capacity_tib"
"""A key that v3.0 requires in every description, and that no other edition has."""
_ABSENT: Final[Any] = None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SizingLimits(_Strict):
    """The size that a data set must have. `rounding` tells how to round fractions of a file.

    `host_memory` says how far a summary's list of the hosts' memory can be trusted: `each` entry is right for
    its host, or only their `sum` is right. `memory_tolerance` is the share of memory that rounding down to
    whole GiB may leave out.
    """

    min_steps: int
    memory_multiple: int
    rounding: Literal["up", "down"]
    host_memory: Literal["each", "sum"] = "each"
    memory_tolerance: float = 0.0


class ParameterLists(_Strict):
    """The keys that a run is allowed to set."""

    tool: frozenset[str]
    closed: frozenset[str]
    open_adds: frozenset[str]
    compared: tuple[str, ...]

    def allowed(self, division: SubmissionDivision) -> frozenset[str]:
        """Return the keys that may be set in `division`, including those that the benchmark's script sets."""
        adds = self.open_adds if division is SubmissionDivision.OPEN else frozenset[str]()
        return self.tool | self.closed | adds


class TimedTree(_Strict):
    """A tree whose runs are named by time: the names, files and counts of its folders.

    Files are given as patterns. The unit of `max_pause_runs` is the duration of a run. Hosts are considered
    equal up to a ratio of `max_ratio_of_hosts`. `memory_tolerance` is how much described and measured memory
    may differ.
    """

    name_pattern: str
    beside_divisions: frozenset[str]
    beside_results: frozenset[str]
    categories: frozenset[str]
    phases: frozenset[str]
    required_phases: frozenset[str]
    num_datagen: int
    datagen_files: tuple[str, ...]
    config_files: tuple[str, ...]
    metadata_parameters: tuple[str, ...]
    max_pause_runs: float
    memory_tolerance: float
    max_ratio_of_hosts: float
    min_accelerators_alone: int
    odirect_workloads: frozenset[str]


class ModelLimits(_Strict):
    """The limits for a model's checkpoints. In OPEN, `open_unit` must divide the number of processes.

    `size_gib` is the size that the edition states, `architecture_gib` the size calculated from the model's
    architecture.
    """

    closed_processes: int
    open_unit: int
    size_gib: float
    architecture_gib: float


class CheckpointLimits(_Strict):
    """The requirements on checkpointing.

    In CLOSED, `subset_accelerators` ranks may represent all ranks of the models in `subset_models`.
    """

    models: dict[str, ModelLimits]
    num_checkpoints: int
    max_invocations: int
    files: tuple[str, ...]
    max_gap_s: float
    memory_multiple: float
    min_per_host: int
    accelerator_memory_gb: dict[str, float]
    unnamed_accelerator: str = ""
    subset_models: frozenset[str]
    subset_accelerators: int
    min_remap_share: float
    size_tolerance: float
    parameters: ParameterLists


class CacheOption(_Strict):
    """One of the fixed loads of a key-value cache. Numbers of users are per rank."""

    model: str
    num_users: int
    duration_s: int
    gpu_gib: int
    cpu_gib: int
    max_allocations: int
    generation: str


class KvCacheLimits(_Strict):
    """The requirements on key-value caches. `flags` are those allowed in a command in CLOSED."""

    options: dict[str, CacheOption]
    seed: int
    trials: int
    delay_s: float
    flags: frozenset[str]


class VectorLimits(_Strict):
    """The requirements on vector search."""

    num_runs: int
    engines: frozenset[str]
    closed_indexes: frozenset[str]
    open_indexes: frozenset[str]
    closed_keys: frozenset[str]


class Edition(_Strict):
    """One edition. The last fields are None if it lacks that tree or benchmark, and so has no rules for it.

    `rules` names the edition whose rules apply. `mean_tolerance` is the relative difference allowed between a
    stated mean and the recomputed one. `is_softened` means that the edition's round accepted, with a warning,
    some violations of these rules. A submitter must have the required folders, and should have the expected
    ones.
    """

    edition: str
    rules: str
    is_softened: bool = False
    num_runs: int
    num_warm_ups: int = 0
    lacks_warm_ups: bool = False
    required_folders: tuple[str, ...]
    expected_folders: tuple[str, ...]
    run_files: tuple[str, ...]
    sizing: SizingLimits
    mean_tolerance: float
    accelerators: tuple[str, ...]
    min_utilization_percent: dict[str, float]
    parameters: ParameterLists
    for_the_reviewer: tuple[str, ...]
    timed: TimedTree = _ABSENT
    checkpoints: CheckpointLimits = _ABSENT
    kv_cache: KvCacheLimits = _ABSENT
    vectors: VectorLimits = _ABSENT

    def is_without_warm_ups(self, num_runs: int) -> bool:
        """Check whether only the warm-ups are missing, and the edition allows that."""
        return self.lacks_warm_ups and num_runs == self.num_runs - self.num_warm_ups

    def of(self, _submitter: Path) -> Self:
        """Return the edition that applies to a submitter's folder, which is always this one."""
        return self


@cache
def load_edition(name: str) -> Edition:
    if name not in EDITIONS:
        raise UsageError(f"There is no edition {name!r}", fix=f"Known are: {', '.join(EDITIONS)}.")
    return Edition.model_validate(_read_edition(name))


def _read_edition(name: str) -> dict[str, Any]:
    """Read the values of an edition. An edition `based_on` another one states only the values that differ."""
    source = files("penstock.submission") / "editions" / f"{name}.yaml"
    values: dict[str, Any] = parse_yaml(source.read_text(encoding="utf-8"), source=f"{name}.yaml")
    base = values.pop("based_on", None)
    if base is None:
        return {"rules": name, **values}
    merged = _read_edition(base)
    for key, value in values.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
    return merged


@dataclass(frozen=True, slots=True)
class EditionChoice:
    """The editions of several submitters, by their folders.

    `edition` has their names, `for_the_reviewer` all points that the editions leave to the reviewer.
    """

    edition: str
    for_the_reviewer: tuple[str, ...]
    by_submitter: Mapping[Path, Edition]

    def of(self, submitter: Path) -> Edition:
        """Return the edition that applies to a submitter's folder."""
        return self.by_submitter[submitter]


def choose_edition(name: str, root: Path) -> Edition | EditionChoice:
    """Choose the edition `name` for all submitters; with `auto`, detect each submitter's from its tree."""
    if name != AUTO:
        return load_edition(name)
    detected: dict[Path, str] = {}
    for submitter in find_submitters(root):
        detected[submitter.folder] = ""
        with suppress(Unavailable):  # the search for results names the folder
            detected[submitter.folder] = detect_edition(submitter)
    known = {edition for edition in detected.values() if edition}
    usual = max(known, default="v1.0")
    if len(known) < 2:
        return load_edition(usual)
    points = (point for name in sorted(known) for point in load_edition(name).for_the_reviewer)
    return EditionChoice(
        edition=", ".join(sorted(known)),
        for_the_reviewer=tuple(dict.fromkeys(points)),
        by_submitter={folder: load_edition(name or usual) for folder, name in detected.items()},
    )


def detect_edition(submitter: Submitter) -> str:
    """Detect the edition of a submitter's tree; return "" if no file indicates one."""
    results, described = find_folder(submitter.folder, "results"), find_folder(submitter.folder, "systems")
    benchmarks = list_benchmarks(results) if results else frozenset[Benchmark]()
    descriptions = list_folder(described)
    if Benchmark.KV_CACHE in benchmarks or any(map(_is_only_v3, descriptions)):
        return "v3.0"
    if results and benchmarks:
        has_mark = _has_own_mark(submitter, results)
        # Marks at the top count for all submitters, unless some submitters have separate marks.
        if not has_mark and any((submitter.top / name).exists() for name in (POOL, SENTINEL)):
            others = find_submitters(submitter.top)
            has_mark = not any(_has_own_mark(each, find_folder(each.folder, "results")) for each in others)
        return "v3.0" if has_mark else "v2.0"
    is_json = any(path.suffix.lower() == ".json" for path in descriptions)
    return "v1.0" if results or is_json else ""


def _is_only_v3(description: Path) -> bool:
    is_yaml = description.suffix.lower() in (".yaml", ".yml")
    try:
        return is_yaml and _ONLY_V3 in read_bytes(str(description), "/", MAX_YAML_BYTES, is_whole=False)
    except OSError:  # the rule on descriptions reports the file as unreadable
        return False


def _has_own_mark(submitter: Submitter, results: Path | None) -> bool:
    marks = (
        submitter.folder / POOL,
        submitter.top / submitter.organisation / POOL_MARK,
        submitter.folder / MANIFEST,
        submitter.folder / "code" / DIGEST_FILE,
    )
    return any(mark.exists() for mark in marks) or any(
        (folder / name).exists()
        for folder in (walk_result_dirs(results) if results else ())
        for name in (POINTER, PROVENANCE)
    )
