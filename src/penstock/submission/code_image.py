"""A code image: a copy of the program that made a result, kept under the digest of its files.

Runs capture an image before they write, and rules verify it; both use `tree_digest`. Invariants: the digest
depends on names and bytes alone, not on dates, modes or the order of entries; an image gets its name in the
pool only when it is complete, and is hashed again before anything points to it.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.errors import DataDamaged
from penstock.results.published_files import write_json, write_text
from penstock.storage.files.system_calls import translate_os_errors
from penstock.submission.parsed_file import MissingFact, ParsedFile, read_bytes, read_file

POOL: Final = "code-images"
POOL_MARK: Final = ".mlps-image-pool"
POINTER: Final = ".mlps-code-image"
DIGEST_FILE: Final = ".code-hash.json"
ALGORITHM: Final = "md5-tree-v2"
MAX_IMAGE_BYTES: Final = 128 << 20
"""The maximum size of all files of an image together; published images have a few MB."""

EMPTY_TREE: Final = hashlib.md5(usedforsecurity=False).hexdigest()
"""The digest of no files."""

_LEFT_OUT: Final = frozenset({"test", "tests", "__pycache__", "build", "dist", "node_modules"})
_POINTER_TEXT: Final = re.compile(rf"{ALGORITHM}:([0-9a-f]{{32}})\n?")


def tree_digest(folder: Path) -> str:
    """Return the digest of all files below `folder` that count: names and bytes, in the order of names.

    Hidden entries, tests, build outputs and links do not count, by rule 2.1.6. Raises `OSError` if an entry
    is neither a file nor a folder, or if all files together are larger than `MAX_IMAGE_BYTES`.
    """
    digest, tree, left_bytes = hashlib.md5(usedforsecurity=False), os.path.realpath(folder), MAX_IMAGE_BYTES
    for name in sorted(files_that_count(folder), key=os.fsencode):
        content = read_bytes(str(folder / name), tree, MAX_IMAGE_BYTES)
        left_bytes -= len(content)
        if left_bytes < 0:
            raise OSError(errno.EFBIG, f"it has more than {MAX_IMAGE_BYTES:,} bytes", str(folder))
        digest.update(os.fsencode(name))
        digest.update(content)
    return digest.hexdigest()


def files_that_count(folder: Path) -> Iterator[str]:
    """Yield the names, relative to `folder`, of the files that an image consists of."""
    for path, folders, names in os.walk(folder):
        folders[:], files = (
            [
                name
                for name in entries
                if not (name.startswith(".") or name in _LEFT_OUT or name.endswith(end))
            ]
            for entries, end in ((folders, ".egg-info"), (names, ".pyc"))
        )
        for file in (Path(path, name) for name in files):
            if not file.is_symlink():
                yield file.relative_to(folder).as_posix()


def image_name(digest: str) -> str:
    return f"code-{digest[:8]}"


def pointer_text(digest: str) -> str:
    """Return the text by which pointers and other files name an image."""
    return f"{ALGORITHM}:{digest}"


def parse_pointer(pointer: ParsedFile) -> str:
    """Return the digest that a pointer names."""
    text = str(pointer.value())
    match = _POINTER_TEXT.fullmatch(text)
    if match is None:
        what = f"This does not point to a code image: {text.strip()[:60]!r}"
        raise MissingFact(what, where=pointer.file)
    return match[1]


UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program: its package's folder, its version and commit if known, and its captured image's digest."""

    folder: Path
    version: str
    commit: str = UNKNOWN
    digest: str = ""


def capture(program: Program, root: Path, *, now: datetime) -> str:
    """Put the program's image into the pool of `root` unless it is there already; return its digest."""
    pool, digest, date = root / POOL, tree_digest(program.folder), f"{now:%Y-%m-%dT%H:%M:%SZ}"
    image = pool / image_name(digest)
    if image.is_dir():
        _require_sound(image, digest)
        return digest
    write_text(pool, POOL_MARK, f"penstock_version={program.version}\ncreated={date}\n")
    # The image is copied to a hidden folder first: after a crash, no digest covers that folder, and no
    # checker reads it.
    draft = image.with_name(f".{image.name}-{secrets.token_hex(4)}")
    with translate_os_errors("Copying the program's files", str(draft)):
        for name in files_that_count(program.folder):
            target = draft / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(program.folder / name, target)
        copied = tree_digest(draft)
        if copied != digest:
            shutil.rmtree(draft)
            raise DataDamaged(
                "The program's files changed while they were copied",
                where=str(program.folder),
                fix="Repeat this while its files are neither edited nor installed.",
            )
        write_json(
            draft,
            DIGEST_FILE,
            {
                "hash": digest,
                "algorithm": ALGORITHM,
                "captured_at": date,
                "mlpstorage_version": f"penstock {program.version}",
                "git_sha": program.commit,
            },
        )
        try:
            draft.rename(image)
        except OSError:  # another process was faster; its image is used if it is intact
            shutil.rmtree(draft)
            _require_sound(image, digest)
    return digest


def _require_sound(image: Path, digest: str) -> None:
    """Verify an image, whose files are not fsynced: a power cut may leave some of them torn."""
    stated = "nothing"
    with suppress(MissingFact):
        stated = read_file(image / DIGEST_FILE, image).value("hash")
    actual = tree_digest(image)
    if not stated == actual == digest:
        raise DataDamaged(
            f"This code image is damaged: it says {stated}, its files hash to {actual}",
            where=str(image),
            fix=f"Remove the folder {image}; the next run captures it again.",
        )
