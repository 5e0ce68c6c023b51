"""What the results of a submitter share: its folders, its manifest, and the pool of code images.

Read once per submitter, and once per pool; rules about the tree and about provenance use it.
Invariant: each image of a pool is hashed once, however many results point to it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.errors import DataDamaged
from penstock.submission import tree_layout
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK, parse_pointer, tree_digest
from penstock.submission.find_results import Submitter, find_result_dirs, find_submitters
from penstock.submission.folder_listing import find_folder, list_names, list_subfolders
from penstock.submission.parsed_file import NO_FILE, MissingFact, ParsedFile, read_file, relative

_IMAGE: Final = re.compile(r"code-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeImage:
    """One code image: what it states, and the digest of its files ("" if they cannot be read)."""

    name: str
    stated: ParsedFile
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeImagePool:
    """All code images of a tree, and the digests that any submitter's result directories point to."""

    name: str = ""
    images: tuple[CodeImage, ...] = ()
    pointed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeContext:
    """The shared part of one submitter's folder, by names: hidden entries are left out, folders end in "/".

    `is_merged` says that other organisations' folders are in the same tree. `systems` has the entries of
    systems/, `categories` each `system/category` of the results.
    """

    name: str
    entries: tuple[str, ...] = ()
    beside_divisions: tuple[str, ...] = ()
    is_merged: bool = False
    systems: tuple[str, ...] = ()
    result_systems: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    result_dirs: tuple[str, ...] = ()
    manifest: ParsedFile = field(default_factory=lambda: ParsedFile(file="", problem=NO_FILE))
    public_ids: ParsedFile = field(default_factory=lambda: ParsedFile(file="", problem=NO_FILE))
    pool: CodeImagePool = field(default_factory=CodeImagePool)


def read_tree_context(submitter: Submitter, pool: CodeImagePool, root: Path) -> TreeContext:
    """Read what the submitter's results share; `pool` is that of its tree."""
    base, folder = root.resolve(), submitter.folder
    result_systems = list_subfolders(find_folder(folder, "results"))
    return TreeContext(
        name=relative(folder, base),
        entries=list_names(folder),
        beside_divisions=_list_beside_divisions(submitter),
        is_merged=len({other.organisation.lower() for other in find_submitters(submitter.top)}) > 1,
        systems=list_names(find_folder(folder, "systems")),
        result_systems=tuple(entry.name for entry in result_systems),
        categories=tuple(
            f"{system.name}/{category.name}"
            for system in result_systems
            for category in list_subfolders(system)
        ),
        result_dirs=tuple(path.relative_to(folder).as_posix() for path in find_result_dirs(submitter)),
        manifest=read_file(folder / tree_layout.MANIFEST, base),
        public_ids=read_file(submitter.top / tree_layout.PUBLIC_IDS, base),
        pool=pool,
    )


def _list_beside_divisions(submitter: Submitter) -> tuple[str, ...]:
    """What lies beside the divisions and is no pool of code images; each organisation may have one."""
    if submitter.division is None:
        return ()
    pools = {f"{folder.name}/" for folder in list_subfolders(submitter.top) if _is_pool(folder)}
    return tuple(name for name in list_names(submitter.top) if name not in pools)


def find_pool(submitter: Submitter) -> Path | None:
    """The folder of the submitter's code images: tools keep one for a tree, or one for an organisation."""
    top = submitter.top
    own = find_folder(top, submitter.organisation)
    candidates = [own] if own and _is_pool(own) else []
    candidates += [top / POOL, submitter.folder / POOL]
    return next((folder for folder in candidates if folder.is_dir()), None)


def _is_pool(folder: Path) -> bool:
    """Whether an organisation keeps its code images here: by the tool's mark, or by their names alone."""
    inner = list_subfolders(folder)
    return (folder / POOL_MARK).exists() or (
        bool(inner) and all(_IMAGE.fullmatch(entry.name) for entry in inner)
    )


def read_pool(folder: Path, submitter: Submitter, root: Path) -> CodeImagePool:
    """Hash all images in `folder`, and collect what result directories of the whole tree point to."""
    base = root.resolve()
    return CodeImagePool(
        name=relative(folder, base),
        images=tuple(_image(entry, base) for entry in list_subfolders(folder)),
        pointed=frozenset(
            digest
            for other in find_submitters(submitter.top)
            for folder in find_result_dirs(other)
            if (digest := _pointed_digest(folder))
        ),
    )


def _image(folder: Path, base: Path) -> CodeImage:
    try:
        digest = tree_digest(folder)
    except OSError as error:  # the rule on images names the file
        unread = relative(Path(str(error.filename or folder)), base)
        stated = ParsedFile(file=unread, problem=f"cannot be read: {error.strerror}")
        return CodeImage(name=folder.name, stated=stated, digest="")
    return CodeImage(name=folder.name, stated=read_file(folder / DIGEST_FILE, base), digest=digest)


def _pointed_digest(folder: Path) -> str:
    try:
        return parse_pointer(str(read_file(folder / POINTER, folder).value()), where=str(folder))
    except (MissingFact, DataDamaged):  # the rule on pointers names it
        return ""
