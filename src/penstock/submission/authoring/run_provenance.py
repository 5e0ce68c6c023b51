"""`provenance.json` of a result directory: the rules, the program and the core configuration it comes from.

Pure except for the versions of installed packages. Invariant: a value that cannot be determined is "unknown";
none is absent, and none is null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.results.provenance import package_versions
from penstock.results.spec import spec_values
from penstock.submission.code_image import UNKNOWN, Program, pointer_text
from penstock.submission.tree_layout import Benchmark
from penstock.workload.choices import StorageKind
from penstock.workload.layered_settings import dotted, flatten

if TYPE_CHECKING:
    from penstock.workload.spec import Workload

SCHEMA: Final = "mlps-run-provenance/1"
RULES_EDITION: Final = "3.0"
LAYOUT_VERSION: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParameterKeys:
    """The keys that define a workload; an entry that ends in `*` stands for all keys with this prefix."""

    name: str
    included: tuple[str, ...]
    excluded: tuple[str, ...]

    def of(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that define the workload, by dotted key."""
        flat = {dotted(path): value for path, value in flatten(parameters)}
        return {key: value for key, value in sorted(flat.items()) if self._has(key)}

    def _has(self, key: str) -> bool:
        if _is_one_of(key, self.excluded):
            return False
        return _is_one_of(key, self.included)


def _is_one_of(key: str, entries: tuple[str, ...]) -> bool:
    return any(key.startswith(entry[:-1]) if entry.endswith("*") else key == entry for entry in entries)


CORE_KEYS: Final[Mapping[Benchmark, CoreParameterKeys]] = MappingProxyType(
    {
        Benchmark.TRAINING: CoreParameterKeys(
            name="training@1",
            included=(
                "framework", "metric.au", "model.*", "workflow.*", "dataset.format",
                "dataset.num_samples_per_file", "dataset.record_length*", "reader.data_loader",
                "reader.batch_size", "reader.file_shuffle", "reader.sample_shuffle", "reader.shuffle_size",
                "train.epochs", "train.computation_time*", "train.total_training_steps", "checkpoint.*",
            ),
            excluded=("checkpoint.checkpoint_folder",),
        ),
        Benchmark.CHECKPOINTING: CoreParameterKeys(
            name="checkpointing@1",
            included=("framework", "model.*", "workflow.*", "checkpoint.*"),
            excluded=("checkpoint.checkpoint_folder", "checkpoint.num_checkpoints_*"),
        ),
    }
)  # fmt: skip


def core_config_digest(values: Mapping[str, Any]) -> str:
    """16 digits of the SHA-256 of the values as JSON; 7, 7.0 and "7" are the same."""
    plain = {key: _plain(value) for key, value in values.items()}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_provenance(
    workload: Workload, benchmark: Benchmark, *, program: Program, digest: str, now: datetime
) -> dict[str, Any]:
    """The content of the file."""
    keys = CORE_KEYS[benchmark]
    values = keys.of(spec_values(workload))
    library = _storage_library(workload)
    return {
        "schema": SCHEMA,
        "rules_edition": RULES_EDITION,
        "layout_version": LAYOUT_VERSION,
        "tool": {
            "name": "penstock",
            "version": program.version,
            "git_sha": program.commit,
            "code_image": pointer_text(digest).strip(),
        },
        "dlio": {"version": UNKNOWN, "source": UNKNOWN, "commit": UNKNOWN},
        "storage_library": library,
        "core_config": {
            "algorithm": "core-config-v1",
            "allowlist": keys.name,
            "hash": core_config_digest(values),
            "keys": list(values),
        },
        "stamped_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "stamped_by": f"penstock {program.version}",
        "provenance": {
            "rules_edition": "tool-constant",
            "layout_version": "tool-constant",
            "tool": "runtime",
            "dlio": "n/a",
            "storage_library": "n/a" if library["name"] == "none" else "package-metadata",
            "core_config": "runtime",
        },
        "notes": "made by Penstock, which takes DLIO's workloads without running DLIO",
    }


def _storage_library(workload: Workload) -> dict[str, str]:
    if workload.storage.storage_type is not StorageKind.S3:
        return {"name": "none"}
    name = workload.storage.storage_library.value if workload.storage.storage_library else "obstore"
    return {"name": name, "version": package_versions((name,)).get(name, UNKNOWN)}


def _plain(value: Any) -> Any:
    """One spelling for each number, whether it was written as text or not."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _plain_text(text: str) -> Any:
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        number = float(word)
    except ValueError:
        return word
    return int(number) if number.is_integer() else number
