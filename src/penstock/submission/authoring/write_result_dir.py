"""Finish a result directory: add the files that checkers require besides the figures, and publish it.

A run has left its figures in the draft; this adds configuration, logs, provenance and metadata, gives the
directory its name, and lists it in `submission.yaml`. Invariants: the metadata are written last; the manifest
lists exactly the directories that are there, and says "unknown" for what they do not state.
"""

import errno
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import StorageError
from penstock.results.dlio_files import HydraFacts, write_configuration
from penstock.results.provenance import redact
from penstock.results.published_files import write_json, write_text
from penstock.storage.uri import find_local_paths_at
from penstock.submission.authoring import run_metadata
from penstock.submission.authoring.result_dir import Series, publish
from penstock.submission.code_image import POINTER, UNKNOWN, Program, pointer_text
from penstock.submission.edition import Edition
from penstock.submission.find_results import Submitter, find_result_dirs
from penstock.submission.reports.result_report import plan_tree, report_all, write_files
from penstock.submission.tree_layout import CONFIG_FOLDER, MANIFEST, METADATA_SUFFIX, PROVENANCE, SEPARATION

SCHEMA: Final = "mlps-submission-manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLogs:
    """What a command prints about one run: the logs in its result directory."""

    stdout: str
    stderr: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramImage:
    """The program, and the digest of its image in the pool."""

    program: Program
    digest: str


def write_result_dir(
    facts: run_metadata.RunFacts,
    *,
    image: ProgramImage,
    now: datetime,
    logs: RunLogs | None = None,
    separation: dict[str, Any] | None = None,
) -> Path:
    """Add to the draft of a run what the run itself does not write, and publish it.

    Without `logs` nothing ran, as for a data set's size: pointer, provenance and metadata are all there is.
    """
    address, program, draft = facts.address, image.program, facts.address.draft
    if logs is not None:
        _write_configuration(facts)
        for name, text in zip(address.log_files, (logs.stdout, logs.stderr), strict=True):
            write_text(draft, name, text)
    if separation is not None:
        write_json(draft, SEPARATION, separation)
    write_text(draft, POINTER, pointer_text(image.digest))
    benchmark = address.series.benchmark
    provenance = run_metadata.build_provenance(
        facts.workload, benchmark, program=program, digest=image.digest, now=now
    )
    write_json(draft, PROVENANCE, provenance)
    # Last: a draft with metadata is one whose run came to its end.
    write_json(draft, address.metadata_file, run_metadata.build_metadata(facts))
    folder = publish(address)
    write_manifest(address.series, by=f"penstock {program.version}", now=now)
    return folder


def _write_configuration(facts: run_metadata.RunFacts) -> None:
    address = facts.address
    hydra = HydraFacts(
        subfolder=CONFIG_FOLDER,
        workload_name=facts.workload.full_name,
        overrides=redact(_list_overrides(facts)),
        working_folder=str(Path.cwd()),
        run_folder=str(address.folder),
    )
    write_configuration(address.draft, facts.workload, hydra)


def _list_overrides(facts: run_metadata.RunFacts) -> Sequence[str]:
    """The stages and the changes, as DLIO spells overrides."""
    stages = facts.workload.workflow
    own = {
        "workflow.generate_data": stages.generate_data,
        "workflow.train": stages.train,
        "workflow.checkpoint": stages.checkpoint,
    }
    return tuple(f"++workload.{key}={value}" for key, value in {**own, **facts.changed}.items())


def write_report(series: Series, edition: Edition) -> None:
    """Write `results.json` and `results.csv` of the series' result, with figures recomputed from its runs."""
    folder = (series.tree.root / series.folder).resolve()
    # The report states the verdict, and a rule requires the report: only the second pass sees its own file.
    for _ in range(2):
        reports = [
            report for report in report_all(series.tree.root, edition) if folder in report.path.parents
        ]
        files, _unchanged = plan_tree(reports)
        write_files(files)


def write_manifest(series: Series, *, by: str, now: datetime) -> None:
    """Write `submission.yaml` of the submitter's folder that a series is in."""
    tree = series.tree
    folder = tree.root / series.submitter
    submitter = Submitter(organisation=tree.organisation, division=series.division, folder=folder)
    runs = [_describe_run(result_dir, folder) for result_dir in find_result_dirs(submitter)]
    document = {
        "schema": SCHEMA,
        "org": tree.organisation,
        "division": series.division.value,
        "rules_edition": run_metadata.RULES_EDITION,
        "layout_version": run_metadata.LAYOUT_VERSION,
        "generated_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "generated_by": by,
        "tool_versions": _list_known(run["tool_version"] for run in runs),
        "dlio_commits": [],
        "systems": _systems(folder),
        "runs": [{key: value for key, value in run.items() if key != "tool_version"} for run in runs],
        "code_images": _list_known(run["code_image"] for run in runs),
        "provenance": {"rules_edition": "tool-constant", "runs": "walked"},
    }
    write_text(folder, MANIFEST, yaml.safe_dump(document, sort_keys=False))


def _describe_run(result_dir: Path, folder: Path) -> dict[str, Any]:
    metadata_files = sorted(result_dir.glob(f"*{METADATA_SUFFIX}"))
    metadata = _read_mapping(metadata_files[0]) if metadata_files else {}
    provenance = _read_mapping(result_dir / PROVENANCE)
    tool, core = provenance.get("tool", {}), provenance.get("core_config", {})
    relative = result_dir.relative_to(folder).as_posix()
    return {
        "leaf": relative,
        "benchmark": metadata.get("benchmark_type", UNKNOWN),
        "model": metadata.get("model", UNKNOWN),
        "command": metadata.get("command", UNKNOWN),
        "accelerator": metadata.get("accelerator") or UNKNOWN,
        "system": result_dir.relative_to(folder).parts[1],
        "rules_edition": provenance.get("rules_edition", UNKNOWN),
        "core_config": core.get("hash", UNKNOWN),
        "code_image": tool.get("code_image", UNKNOWN),
        "provenance": f"{relative}/{PROVENANCE}" if provenance else UNKNOWN,
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


def _list_known(values: Any) -> list[str]:
    return sorted({value for value in values if value != UNKNOWN})


def _read_mapping(path: Path) -> Mapping[str, Any]:
    """Values of a JSON file; empty if it is missing or damaged, which the rules will report."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def probe_fs_separation(data_path: str, results: Path, *, host: str, now: datetime) -> dict[str, Any] | None:
    """Probe whether data and results are on different file systems, with a hard link; None for objects.

    A link within one file system succeeds and one across two is refused, whatever mounts and names say.
    """
    paths = find_local_paths_at(data_path)
    if paths is None:
        return None
    root = Path(paths.local_root)
    name = f".penstock-separation-{secrets.token_hex(4)}"
    source, target = results / name, root / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)  # a checkpoint folder appears with its first write
        source.touch(exist_ok=False)
        try:
            is_separate = _is_link_refused(source, target)
        finally:
            source.unlink()
            target.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"Cannot determine whether data and results share a file system: {error.strerror}",
            uri=str(root),
            fix="Make both folders writable.",
        ) from error
    return {
        "version": 1,
        "method": "link_exdev",
        "data_or_chkpt_path": str(root),
        "results_path": str(results),
        "data_or_chkpt_realpath": str(root.resolve()),
        "results_realpath": str(results.resolve()),
        "same_filesystem": not is_separate,
        "probed_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "probed_by_rank": 0,
        "probed_by_host": host,
    }


def _is_link_refused(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return True
        raise
    return False
