"""Choose the edition whose rules judge a submitter, by files that only that edition has.

A folder may hold submitters of several editions. Invariant: each is judged by its own edition; one whose
files have no mark is judged like the others in the folder.
"""

from contextlib import suppress
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
    detected: dict[Path, str] = {}
    for submitter in find_submitters(root):
        detected[submitter.folder] = ""
        with suppress(Unavailable):  # the search for results names the folder
            detected[submitter.folder] = detect_edition(submitter)
    known = {edition for edition in detected.values() if edition}
    usual = max(known, default="v1.0")
    editions = {folder: load_edition(edition or usual) for folder, edition in detected.items()}
    if len({edition.edition for edition in editions.values()}) < 2:
        return load_edition(usual)
    return EditionChoice(MappingProxyType(editions))


def detect_edition(submitter: Submitter) -> str:
    """Detect the edition of a submitter's tree; "" where no file tells."""
    results, described = find_folder(submitter.folder, "results"), find_folder(submitter.folder, "systems")
    benchmarks = list_benchmarks(results) if results else frozenset[Benchmark]()
    descriptions = list_folder(described)
    if Benchmark.KV_CACHE in benchmarks or any(map(_is_only_v3, descriptions)):
        return "v3.0"
    if results and benchmarks:
        has_mark = _has_own_mark(submitter, results)
        # Marks at the top belong to all submitters, unless some have marks of their own.
        if not has_mark and any((submitter.top / name).exists() for name in (POOL, SENTINEL)):
            others = find_submitters(submitter.top)
            has_mark = not any(_has_own_mark(each, find_folder(each.folder, "results")) for each in others)
        return "v3.0" if has_mark else "v2.0"
    is_json = any(path.suffix.lower() == ".json" for path in descriptions)
    return "v1.0" if results or is_json else ""


def _is_only_v3(description: Path) -> bool:
    try:
        if description.suffix.lower() not in (".yaml", ".yml") or not description.is_file():
            return False
        with description.open("rb") as stream:
            return _ONLY_V3 in stream.read(_MAX_DESCRIPTION_BYTES)
    except OSError:  # the rule on descriptions reports that it cannot be read
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
