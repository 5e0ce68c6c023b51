"""The manifest of a generated data set: `penstock-dataset.json`, written before the first file.

It holds everything that determines the bytes of the files, so that a later run can resume, verify, or refuse
to mix two data sets. `complete` is true only if every file was written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from penstock import __version__
from penstock.dataset.content import CONTENT_VERSION, Reduction
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage import Storage
from penstock.storage.files.local_files import parse_json
from penstock.storage.protocol import read_object, write_object
from penstock.workload.spec import Dataset

KEY: Final = "penstock-dataset.json"
_FORMAT_VERSION: Final = 1
_BYTES_FOLLOW_FROM: Final = (
    "format",
    "num_files_train",
    "num_files_eval",
    "num_samples_per_file",
    "record_length_bytes",
    "record_length_bytes_stdev",
    "record_dims",
    "record_element_type",
    "num_subfolders_train",
    "num_subfolders_eval",
    "file_prefix",
    "compression",
    "compression_level",
    "enable_chunking",
    "chunk_size_bytes",
    "parquet",
    "hdf5",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecipe:
    """Everything that determines the bytes of a data set."""

    dataset: Dataset
    seed: int
    reduction: Reduction

    def document(self) -> dict[str, Any]:
        """Return the recipe as plain data. Two recipes are equal exactly when their files are."""
        described = asdict(self.dataset)
        document = {
            "content_version": CONTENT_VERSION,
            "seed": self.seed,
            "reduction": asdict(self.reduction),
            "dataset": {name: described[name] for name in _BYTES_FOLLOW_FROM},
        }
        # In the form in which a stored recipe is read: fractions as exact text, enums as their words, tuples
        # as lists.
        return dict(json.loads(json.dumps(document, default=str)))


def is_claimed(storage: Storage, recipe: DatasetRecipe) -> bool:
    """Return True if the folder was claimed for this data set; raise `UsageError` if it was for another."""
    manifest = read_manifest(storage)
    differing = [] if manifest is None else _differences(recipe.document(), manifest["recipe"])
    if differing:
        raise UsageError(
            f"There is another data set here: it differs in {', '.join(differing)}",
            where=f"{storage.uri}/{KEY}",
            fix="Give the same workload, settings and seed, or an empty location as --data for a new one.",
        )
    return manifest is not None


def require_same(storage: Storage, recipe: DatasetRecipe) -> None:
    """Raise `UsageError` unless a data set of this recipe exists in `storage`, complete or not."""
    if not is_claimed(storage, recipe):
        raise UsageError(
            "There is no generated data set here",
            where=f"{storage.uri}/{KEY}",
            fix="Check --data, or make one with `penstock training generate`.",
        )


def _differences(requested: Mapping[str, Any], stored: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name in requested.keys() | stored.keys():
        wanted, found = requested.get(name), stored.get(name)
        if isinstance(wanted, Mapping) and isinstance(found, Mapping):
            names += _differences(wanted, found, f"{prefix}{name}.")
        elif wanted != found:
            names.append(f"{prefix}{name} ({found} there, {wanted} requested)")
    return sorted(names)


def write_manifest(storage: Storage, recipe: DatasetRecipe, *, complete: bool) -> None:
    """Write the manifest, atomically replacing an older one."""
    document = {
        "manifest_version": _FORMAT_VERSION,
        "penstock": __version__,
        "complete": complete,
        "recipe": recipe.document(),
    }
    write_object(storage, KEY, [json.dumps(document, indent=2).encode()])


def read_manifest(storage: Storage) -> dict[str, Any] | None:
    """Return the manifest at `storage`, or None if there is none.

    A manifest that cannot be parsed raises an error; it is never ignored.
    """
    try:
        text = read_object(storage, KEY)
    except ObjectNotFound:
        return None
    try:
        document: dict[str, Any] = parse_json(bytes(text))
        version = document["manifest_version"]
        # Looked up only for the KeyError: callers rely on this key.
        document["recipe"]["dataset"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"The data set's manifest cannot be understood: {error}",
            uri=f"{storage.uri}/{KEY}",
            fix="Remove the manifest and generate again: files that are whole are kept.",
        ) from error
    if version != _FORMAT_VERSION:
        raise StorageError(
            f"The data set's manifest has version {version}; this penstock supports {_FORMAT_VERSION}",
            uri=f"{storage.uri}/{KEY}",
            fix="Use the penstock that made it, or a newer one.",
        )
    return document
