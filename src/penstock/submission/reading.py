"""The files of one result as documents: read once, and what cannot be read says so when it is asked.

Place in the flow: `tree` finds a place, this reads it, rules judge it. Invariant: nothing here raises for
what a file holds; a rule that needs it gets `Unknown`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.submission.facts import Document, Unknown
from penstock.submission.tree import REPORT, Place

_TRAILING_COMMA: Final = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
"""A text, which is kept, or a comma that JSON does not allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The output of one launcher in one run: usually all of it, else one client's share."""

    name: str
    summary: Document
    config: Document
    overrides: Document
    files: frozenset[str]

    def settings(self) -> Mapping[str, str]:
        """What the command line set, by key without `++` and `workload.`; the workload by `workload`."""
        lines = self.overrides.value()
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise Unknown("this is no list of overrides", where=self.overrides.file)
        pairs = (line.lstrip("+~").partition("=") for line in lines)
        return {key.removeprefix("workload."): value for key, _, value in pairs}

    def workload(self) -> tuple[str, str]:
        """The family and the accelerator: `workload=unet3d_h100` is (`unet3d`, `h100`)."""
        settings = self.settings()
        if "workload" not in settings:
            raise Unknown("no override says workload=...", where=self.overrides.file)
        family, _, accelerator = settings["workload"].lower().rpartition("_")
        if not family:
            raise Unknown(f"workload={accelerator} names no accelerator", where=self.overrides.file)
        return family, accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the runs of a result; jobs add up."""

    name: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that is known of one result."""

    place: Place
    runs: tuple[Run, ...]
    report: Document
    systems: tuple[Document, ...]

    def jobs(self) -> tuple[Job, ...]:
        """Every job of every run."""
        return tuple(job for run in self.runs for job in run.jobs)


def read_result(place: Place, root: Path) -> Result:
    """Read the files of `place`; names are relative to `root`."""
    base = root.resolve()
    report = next(
        (path for path in (place.folder / REPORT, place.folder / "runs" / REPORT) if path.exists()), None
    )
    return Result(
        place=place,
        runs=tuple(_run(folder, base) for folder in place.run_folders),
        report=_document(report or place.folder / REPORT, base),
        systems=tuple(_description(path, base) for path in _systems(place)),
    )


def _systems(place: Place) -> list[Path]:
    """The description that has the system's name; else all that the submitter gives."""
    described = sorted(place.submitter.folder.glob("[Ss]ystems/*.json"))
    return [path for path in described if path.stem == place.system] or described


def _description(path: Path, base: Path) -> Document:
    """People write these by hand: a comma too many is remarked on, not a reason to know nothing."""
    strict = _document(path, base)
    if not strict.problem:
        return strict
    try:
        text = _TRAILING_COMMA.sub(lambda match: match[1] or "", path.read_text(encoding="utf-8-sig"))
        return Document(
            file=strict.file, tree=json.loads(text), remark="a comma stands before a closing bracket"
        )
    except (OSError, ValueError, RecursionError):
        return strict


def _run(folder: Path, base: Path) -> Run:
    clients = sorted(path.parent for path in folder.glob("*/summary.json"))
    folders = [folder] if (folder / "summary.json").exists() or not clients else clients
    return Run(name=folder.name, jobs=tuple(_job(each, base) for each in folders))


def _job(folder: Path, base: Path) -> Job:
    return Job(
        name=folder.relative_to(base).as_posix(),
        summary=_document(folder / "summary.json", base),
        config=_document(folder / "configs" / "config.yaml", base),
        overrides=_document(folder / "configs" / "overrides.yaml", base),
        files=frozenset(
            path.relative_to(folder).as_posix()
            for pattern in ("*", "configs/*")
            for path in folder.glob(pattern)
        ),
    )


def _document(path: Path, base: Path) -> Document:
    file = path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)
    try:
        return Document(file=file, tree=_parse(path))
    except FileNotFoundError:
        return Document(file=file, problem="there is no such file")
    except OSError as error:
        return Document(file=file, problem=f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Document(file=file, problem=f"cannot be understood: {first}")


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        return json.loads(text)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(text, Loader=loader)  # noqa: S506 - both are safe loaders
