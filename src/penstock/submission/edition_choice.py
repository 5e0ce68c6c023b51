"""Choose the edition whose rules judge a submitter, by files that only that edition has.

A folder may hold submitters of several editions. Invariant: each is judged by its own edition; one whose
files have no mark is judged like the others in the folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from penstock.errors import Unavailable
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK
from penstock.submission.edition import Edition, load_edition
from penstock.submission.find_results import Submitter, find_submitters, list_benchmarks, walk_result_dirs
from penstock.submission.folder_listing import find_folder, list_folder
from penstock.submission.tree_layout import MANIFEST, PROVENANCE, SENTINEL, Benchmark

AUTO: Final = "auto"
_ONLY_V3: Final = b"usable_capacity_tib"
"""A key that v3.0 requires in every description, and no other edition knows."""
_MAX_DESCRIPTION_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EditionChoice:
    """The editions of several submitters, by their folders."""

    by_submitter: MappingProxyType[Path, Edition]

    @property
    def edition(self) -> str:
        """The names of all editions."""
        return ", ".join(edition.edition for edition in self._distinct())

    @property
    def for_the_reviewer(self) -> tuple[str, ...]:
        """The points that files cannot show, over all editions."""
        return tuple(
            dict.fromkeys(point for edition in self._distinct() for point in edition.for_the_reviewer)
        )

    def of(self, submitter: Path) -> Edition:
        """The edition of a submitter's folder."""
        return self.by_submitter[submitter]

    def _distinct(self) -> list[Edition]:
        by_name = {edition.edition: edition for edition in self.by_submitter.values()}
        return [by_name[name] for name in sorted(by_name)]


def choose_edition(name: str, root: Path) -> Edition | EditionChoice:
    """The edition `name` for all; with `auto`, for each submitter the one detected from its tree."""
    if name != AUTO:
        return load_edition(name)
    detected = {submitter.folder: _detect_or_nothing(submitter) for submitter in find_submitters(root)}
    known = {edition for edition in detected.values() if edition}
    usual = max(known, default="v1.0")
    editions = {folder: load_edition(edition or usual) for folder, edition in detected.items()}
    if len({edition.edition for edition in editions.values()}) < 2:
        return load_edition(usual)
    return EditionChoice(MappingProxyType(editions))


def _detect_or_nothing(submitter: Submitter) -> str:
    try:
        return detect_edition(submitter)
    except Unavailable:  # the search for results names the folder
        return ""


def detect_edition(submitter: Submitter) -> str:
    """Detect the edition of a submitter's tree; "" where no file tells."""
    results = find_folder(submitter.folder, "results")
    benchmarks = list_benchmarks(results) if results else frozenset[Benchmark]()
    if Benchmark.KV_CACHE in benchmarks or any(_has_only_v3(path) for path in _descriptions(submitter)):
        return "v3.0"
    if results and benchmarks:
        return "v3.0" if _has_mark_of_v3(submitter, results) else "v2.0"
    described = {path.suffix.lower() for path in list_folder(find_folder(submitter.folder, "systems"))}
    return "v1.0" if results or ".json" in described else ""


def _descriptions(submitter: Submitter) -> Iterator[Path]:
    for path in list_folder(find_folder(submitter.folder, "systems")):
        if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
            yield path


def _has_only_v3(description: Path) -> bool:
    try:
        with description.open("rb") as stream:
            return _ONLY_V3 in stream.read(_MAX_DESCRIPTION_BYTES)
    except OSError:  # the rule on descriptions says that it cannot be read
        return False


def _has_mark_of_v3(submitter: Submitter, results: Path) -> bool:
    top = submitter.top
    if _has_own_mark(submitter, results):
        return True
    # What lies at the top belongs to all submitters, unless some have marks of their own.
    return any((top / name).exists() for name in (POOL, SENTINEL)) and not any(
        _has_own_mark(other, find_folder(other.folder, "results")) for other in find_submitters(top)
    )


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
