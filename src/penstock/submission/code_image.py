"""A code image: the program that made a result, kept beside it under the digest of its own files.

Place in the flow: makers of submissions capture images, rules verify them, both by `tree_digest`. Invariant:
the digest is a function of names and bytes alone: not of dates, modes, or the order a folder is listed in.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.errors import DataDamaged

POOL: Final = "code-images"
POOL_MARK: Final = ".mlps-image-pool"
POINTER: Final = ".mlps-code-image"
DIGEST_FILE: Final = ".code-hash.json"
ALGORITHM: Final = "md5-tree-v2"

_LEFT_OUT: Final = frozenset({"test", "tests", "__pycache__", "build", "dist", "node_modules"})
_POINTER_TEXT: Final = re.compile(rf"{ALGORITHM}:([0-9a-f]{{32}})\n?")


def tree_digest(folder: Path) -> str:
    """The digest of all files below `folder` that count: names and bytes, in the order of their names.

    Hidden entries, tests, what was built, and links are left out, as rule 2.1.6 says.
    """
    digest = hashlib.md5(usedforsecurity=False)
    for name in sorted(files_that_count(folder), key=os.fsencode):
        digest.update(os.fsencode(name))
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def files_that_count(folder: Path) -> Iterator[str]:
    """The names, relative to `folder`, of the files that an image consists of."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _counts(name) and not name.endswith(".egg-info")]
        here = Path(path)
        for name in names:
            if _counts(name) and not name.endswith(".pyc") and not (here / name).is_symlink():
                yield (here / name).relative_to(folder).as_posix()


def _counts(name: str) -> bool:
    return not name.startswith(".") and name not in _LEFT_OUT


def image_name(digest: str) -> str:
    """The folder of an image in its pool."""
    return f"code-{digest[:8]}"


def pointer_text(digest: str) -> str:
    """What a leaf's pointer holds."""
    return f"{ALGORITHM}:{digest}\n"


def parse_pointer(text: str, *, where: str) -> str:
    """The digest that a leaf's pointer names."""
    match = _POINTER_TEXT.fullmatch(text)
    if match is None:
        raise DataDamaged(f"This points to no code image: {text.strip()[:60]!r}", where=where)
    return match[1]
