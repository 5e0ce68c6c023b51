"""Write a leaf's own files into its draft, and publish it.

Place in the flow: a run has left its figures in the draft; this adds what a judge wants beside them.
Invariant: the metadata is written last, and the leaf has its name only after that.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import StorageError
from penstock.results.dlio.folder import HydraFacts, write_configuration
from penstock.results.durable import write_json, write_text
from penstock.results.provenance import redacted
from penstock.storage.uri import FILE_SCHEMES, parse_uri
from penstock.submission.code_image import POINTER, pointer_text
from penstock.submission.making.leaf import publish
from penstock.submission.making.manifest import write_manifest
from penstock.submission.making.metadata import metadata
from penstock.submission.making.stamp import stamp
from penstock.submission.names import CONFIG_FOLDER, PROVENANCE, SEPARATION

if TYPE_CHECKING:
    from penstock.submission.making.image import Program
    from penstock.submission.making.metadata import LeafFacts

_CROSS_DEVICE: Final = errno.EXDEV


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The program, and the digest of its image in the pool."""

    program: Program
    digest: str


def write_leaf(
    facts: LeafFacts,
    *,
    image: Image,
    stdout: str,
    stderr: str,
    separation: dict[str, Any] | None,
    now: datetime,
) -> Path:
    """Add to the draft what the run itself does not write, and give the leaf its name."""
    address = facts.address
    draft = address.draft
    write_configuration(draft, facts.workload, hydra_facts(facts))
    for name, text in zip(address.log_files, (stdout, stderr), strict=True):
        write_text(draft, name, text)
    if separation is not None:
        write_json(draft, SEPARATION, separation)
    write_text(draft, POINTER, pointer_text(image.digest))
    benchmark = address.series.benchmark
    found = stamp(facts.workload, benchmark, program=image.program, digest=image.digest, now=now)
    write_json(draft, PROVENANCE, found)
    write_json(draft, address.metadata_file, metadata(facts))
    return _published(facts, image, now)


def write_metadata_leaf(facts: LeafFacts, *, image: Image, now: datetime) -> Path:
    """A leaf of arithmetic alone, such as that of a data set's size."""
    draft = facts.address.draft
    write_text(draft, POINTER, pointer_text(image.digest))
    benchmark = facts.address.series.benchmark
    found = stamp(facts.workload, benchmark, program=image.program, digest=image.digest, now=now)
    write_json(draft, PROVENANCE, found)
    write_json(draft, facts.address.metadata_file, metadata(facts))
    return _published(facts, image, now)


def _published(facts: LeafFacts, image: Image, now: datetime) -> Path:
    """The leaf under its name, and in the submitter's manifest."""
    folder = publish(facts.address)
    write_manifest(facts.address.series, by=f"penstock {image.program.version}", now=now)
    return folder


def hydra_facts(facts: LeafFacts) -> HydraFacts:
    """What the leaf's configuration tells of how it was asked for."""
    return HydraFacts(
        subfolder=CONFIG_FOLDER,
        workload_name=facts.workload.full_name,
        overrides=redacted(overrides_of(facts)),
        working_folder=str(Path.cwd()),
        run_folder=str(facts.address.folder),
    )


def overrides_of(facts: LeafFacts) -> Sequence[str]:
    """The stages and the changes in DLIO's words."""
    stages = facts.workload.workflow
    own = {
        "workflow.generate_data": stages.generate_data,
        "workflow.train": stages.train,
        "workflow.checkpoint": stages.checkpoint,
    }
    return tuple(f"++workload.{key}={value}" for key, value in {**own, **facts.changed}.items())


def separation_of(place: str, results: Path, *, host: str, now: datetime) -> dict[str, Any] | None:
    """Whether data and results lie on different file systems, as a link between them shows; None for objects.

    A link within one file system succeeds, and one across two is refused: mounts and names cannot deceive it.
    """
    location = parse_uri(place)
    if location.scheme not in FILE_SCHEMES:
        return None
    name = f".penstock-separation-{secrets.token_hex(4)}"
    source, target = results / name, Path(location.root) / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)  # checkpoints make their folder with the first write
        source.touch(exist_ok=False)
        try:
            is_separate = _is_refused(source, target)
        finally:
            source.unlink()
            target.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"Whether data and results share a file system cannot be seen: {error.strerror}",
            uri=location.root,
            fix="Both folders must be writable.",
        ) from error
    return {
        "version": 1,
        "method": "link_exdev",
        "data_or_chkpt_path": location.root,
        "results_path": str(results),
        "data_or_chkpt_realpath": str(Path(location.root).resolve()),
        "results_realpath": str(results.resolve()),
        "same_filesystem": not is_separate,
        "probed_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "probed_by_rank": 0,
        "probed_by_host": host,
    }


def _is_refused(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno == _CROSS_DEVICE:
            return True
        raise
    return False
