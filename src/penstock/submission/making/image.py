"""Capture the program into the pool of code images, once for each state of it.

Place in the flow: before a leaf is made; the leaf points to the image. Invariant: an image is in the pool
under its name only as a whole, and one that is there is hashed again before anything points to it.
"""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.errors import DataDamaged
from penstock.results.durable import write_json, write_text
from penstock.storage.files.calls import explaining
from penstock.submission.code_image import (
    ALGORITHM,
    DIGEST_FILE,
    POOL,
    POOL_MARK,
    files_that_count,
    image_name,
    tree_digest,
)

UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The code to capture: a package's folder, and what it says of itself; `commit` may be unknown."""

    folder: Path
    version: str
    commit: str = UNKNOWN


def capture(program: Program, root: Path, *, now: datetime) -> str:
    """The digest of the program, whose image is in the pool of `root` when this returns."""
    pool = root / POOL
    digest = tree_digest(program.folder)
    image = pool / image_name(digest)
    if image.is_dir():
        _require_sound(image, digest)
        return digest
    write_text(pool, POOL_MARK, f"penstock_version={program.version}\ncreated={_date(now)}\n")
    _copy(program, image, digest=digest, now=now)
    return digest


def _copy(program: Program, image: Path, *, digest: str, now: datetime) -> None:
    """Beside its place first: a crash leaves a hidden folder, which no digest covers and no judge reads."""
    draft = image.with_name(f".{image.name}-{secrets.token_hex(4)}")
    with explaining("Copying the program's files", str(draft)):
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
                fix="Repeat this when nobody edits or installs them.",
            )
        write_json(
            draft,
            DIGEST_FILE,
            {
                "hash": digest,
                "algorithm": ALGORITHM,
                "captured_at": _date(now),
                "mlpstorage_version": f"penstock {program.version}",
                "git_sha": program.commit,
            },
        )
        try:
            draft.rename(image)
        except OSError:  # somebody else was faster: theirs is as good if it is sound
            shutil.rmtree(draft)
            _require_sound(image, digest)


def _require_sound(image: Path, digest: str) -> None:
    """Bytes are not fsynced one by one, so that after a power cut an image may be torn: this finds it."""
    try:
        stated = json.loads((image / DIGEST_FILE).read_text(encoding="utf-8"))["hash"]
    except (OSError, ValueError, LookupError, TypeError):
        stated = "nothing"
    found = tree_digest(image)
    if not stated == found == digest:
        raise DataDamaged(
            f"This code image is damaged: it says {stated}, its files come to {found}",
            where=str(image),
            fix=f"Remove the folder {image}; it is captured anew.",
        )


def _date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
