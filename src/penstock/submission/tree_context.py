"""What lies around a result and is shared by others: the submitter's folders, its manifest, the code images.

Place in the flow: read once a submitter, and once a tree for its pool; rules on the tree's structure and on
provenance ask it. Invariant: of a pool, each image is hashed once, however many results point to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import DataDamaged
from penstock.submission import tree_layout
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK, parse_pointer, tree_digest
from penstock.submission.find_results import Submitter, find_submitters, leaves_of
from penstock.submission.parsed_file import Document, read_document, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One code image: what it says of itself, and what its files come to ("" where they cannot be read)."""

    name: str
    stated: Document
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All code images of a tree, and the digests that leaves of any submitter point to."""

    name: str = ""
    images: tuple[Image, ...] = ()
    pointed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """One submitter's folder as far as it is shared: names of what is not hidden, of folders with "/".

    `systems` are what is in systems/, `categories` every `system/category/` of the results.
    """

    name: str
    entries: tuple[str, ...] = ()
    beside_divisions: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    result_systems: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    manifest: Document = field(default_factory=lambda: Document(file="", problem="there is no such file"))
    pool: Pool = field(default_factory=Pool)


def read_surroundings(submitter: Submitter, pool: Pool, root: Path) -> Surroundings:
    """Read what the submitter's results share; `pool` is that of its tree."""
    base, folder = root.resolve(), submitter.folder
    results = next((entry for entry in _entries(folder) if entry.name.lower() == "results"), None)
    systems = next((entry for entry in _entries(folder) if entry.name.lower() == "systems"), None)
    of_results = [entry for entry in _entries(results) if entry.is_dir()]
    return Surroundings(
        name=relative(folder, base),
        entries=tuple(map(_name, _entries(folder))),
        beside_divisions=() if submitter.division is None else tuple(map(_name, _entries(submitter.top))),
        systems=tuple(map(_name, _entries(systems))),
        result_systems=tuple(entry.name for entry in of_results),
        categories=tuple(
            f"{entry.name}/{each.name}" for entry in of_results for each in _entries(entry) if each.is_dir()
        ),
        leaves=tuple(leaf.relative_to(folder).as_posix() for leaf in leaves_of(submitter)),
        manifest=read_document(folder / tree_layout.MANIFEST, base),
        pool=pool,
    )


def pool_folder(submitter: Submitter) -> Path | None:
    """Where the submitter's code images are: one pool a tree, or one an organisation."""
    top = submitter.top
    own = top / submitter.organisation
    ways = [top / POOL, submitter.folder / POOL, *([own] if (own / POOL_MARK).exists() else [])]
    return next((way for way in ways if way.is_dir()), None)


def read_pool(folder: Path, submitter: Submitter, root: Path) -> Pool:
    """Hash all images in `folder`, and gather what leaves of the whole tree point to."""
    base = root.resolve()
    return Pool(
        name=relative(folder, base),
        images=tuple(_image(entry, base) for entry in _entries(folder) if entry.is_dir()),
        pointed=frozenset(
            digest
            for each in find_submitters(submitter.top)
            for leaf in leaves_of(each)
            if (digest := _pointed(leaf))
        ),
    )


def _image(folder: Path, base: Path) -> Image:
    try:
        digest = tree_digest(folder)
    except OSError:  # the rule on images says that its files cannot be read
        digest = ""
    return Image(name=folder.name, stated=read_document(folder / DIGEST_FILE, base), digest=digest)


def _pointed(leaf: Path) -> str:
    try:
        return parse_pointer((leaf / POINTER).read_text(encoding="utf-8"), where=str(leaf))
    except (OSError, ValueError, DataDamaged):  # the rule on pointers names it
        return ""


def _name(entry: Path) -> str:
    return f"{entry.name}/" if entry.is_dir() else entry.name


def _entries(folder: Path | None) -> list[Path]:
    if folder is None or not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
