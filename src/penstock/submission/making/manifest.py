"""`submission.yaml`: what a submitter's folder holds, without any figure.

Place in the flow: written anew from the tree after each leaf. Invariant: it lists exactly the leaves that lie
there; what a leaf does not say of itself is "unknown".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from penstock.results.durable import write_text
from penstock.submission.making.image import UNKNOWN
from penstock.submission.making.stamp import EDITION, LAYOUT_VERSION
from penstock.submission.names import MANIFEST, METADATA_SUFFIX, PROVENANCE
from penstock.submission.tree import Submitter, leaves_of

if TYPE_CHECKING:
    from penstock.submission.making.leaf import Series

SCHEMA: Final = "mlps-submission-manifest/1"


def write_manifest(series: Series, *, by: str, now: datetime) -> None:
    """Write the manifest of the submitter's folder that a series lies in."""
    claim = series.claim
    folder = claim.root / series.submitter
    submitter = Submitter(organisation=claim.organisation, division=series.division, folder=folder)
    runs = [_run(leaf, folder) for leaf in leaves_of(submitter)]
    document = {
        "schema": SCHEMA,
        "org": claim.organisation,
        "division": series.division.value,
        "rules_edition": EDITION,
        "layout_version": LAYOUT_VERSION,
        "generated_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "generated_by": by,
        "tool_versions": _known(run["tool_version"] for run in runs),
        "dlio_commits": [],
        "systems": _systems(folder),
        "runs": [{key: value for key, value in run.items() if key != "tool_version"} for run in runs],
        "code_images": _known(run["code_image"] for run in runs),
        "provenance": {"rules_edition": "tool-constant", "runs": "walked"},
    }
    write_text(folder, MANIFEST, yaml.safe_dump(document, sort_keys=False))


def _run(leaf: Path, folder: Path) -> dict[str, Any]:
    metadata = _json(next(iter(sorted(leaf.glob(f"*{METADATA_SUFFIX}"))), leaf / METADATA_SUFFIX))
    stamp = _json(leaf / PROVENANCE)
    tool, core = stamp.get("tool", {}), stamp.get("core_config", {})
    relative = leaf.relative_to(folder).as_posix()
    return {
        "leaf": relative,
        "benchmark": metadata.get("benchmark_type", UNKNOWN),
        "model": metadata.get("model", UNKNOWN),
        "command": metadata.get("command", UNKNOWN),
        "accelerator": metadata.get("accelerator") or UNKNOWN,
        "system": leaf.relative_to(folder).parts[1],
        "rules_edition": stamp.get("rules_edition", UNKNOWN),
        "core_config": core.get("hash", UNKNOWN),
        "code_image": tool.get("code_image", UNKNOWN),
        "provenance": f"{relative}/{PROVENANCE}" if stamp else UNKNOWN,
        "tool_version": tool.get("version", UNKNOWN),
    }


def _systems(folder: Path) -> list[dict[str, str]]:
    return [
        {
            "name": path.stem,
            "description": f"systems/{path.name}",
            "pdf": f"systems/{path.stem}.pdf" if path.with_suffix(".pdf").is_file() else "missing",
        }
        for path in sorted((folder / "systems").glob("*.yaml"))
    ]


def _known(values: Any) -> list[str]:
    return sorted({value for value in values if value != UNKNOWN})


def _json(path: Path) -> Mapping[str, Any]:
    """A file's values; none of a file that is missing or damaged, which judges will name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
