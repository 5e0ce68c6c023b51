"""Synthetic traces on disk: one folder a run, one file a rank, and the comparison's description beside them.

Place in the flow: the acting end of synthesis. One invariant: the same description leaves the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from penstock.errors import StorageError, UsageError
from penstock.progress import Progress, Silent
from penstock.trace.synthesize.damage import damage_lines, pack
from penstock.trace.synthesize.lines import Process, is_event, write_lines
from penstock.trace.synthesize.plan import plan_rank

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.trace.synthesize.description import Description, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesized:
    """What was written, by run, and where the comparison's description stands, if there is one."""

    folder: Path
    num_events: dict[str, int]
    num_files: dict[str, int]
    runs_yaml: Path | None


def synthesize(description: Description, folder: Path, *, progress: Progress | None = None) -> Synthesized:
    """Write the traces of all runs below `folder`, which must be new or empty."""
    progress = progress or Silent()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", fix="Name a new folder; nothing is overwritten.")
        return _write_all(description, folder, progress)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"Cannot write traces: {error}", uri=str(folder), errno=error.errno) from error


def _write_all(description: Description, folder: Path, progress: Progress) -> Synthesized:
    num_events, num_files = {}, {}
    progress.begin("synthesizing ranks", sum(run.ranks for run in description.runs.values()))
    for name, run in description.runs.items():
        place = folder / name
        place.mkdir()
        num_events[name] = 0
        for rank in range(run.ranks):
            content, events = rank_file(description, run, rank)
            suffix = (
                ".pfw" if any(d.kind == "plain_text" and d.rank == rank for d in run.damage) else ".pfw.gz"
            )
            (place / f"trace-{rank}-of-{run.world or run.ranks}{suffix}").write_bytes(content)
            num_events[name] += events
            progress.advance(1)
        num_files[name] = run.ranks
    runs_yaml = None
    if description.compare:
        runs_yaml = folder / "runs.yaml"
        runs_yaml.write_text(_comparison(description), encoding="utf-8")
    return Synthesized(folder=folder, num_events=num_events, num_files=num_files, runs_yaml=runs_yaml)


def rank_file(description: Description, run: Run, rank: int) -> tuple[bytes, int]:
    """The bytes of one rank's trace file, and how many events were put in before any damage."""
    damages = [damage for damage in run.damage if damage.rank == rank]
    process = Process(rank=rank, host=run.host_of(rank), generation=description.generation)
    lines = list(write_lines(plan_rank(description, run, rank), process))
    where = [number for number, line in enumerate(lines) if is_event(line)]
    raw = [line.encode("utf-8") for line in lines]
    for number, line in zip(where, damage_lines([raw[each] for each in where], damages), strict=True):
        raw[number] = line
    return pack(raw, damages), len(where)


def _comparison(description: Description) -> str:
    tree = {
        "runs": {name: f"{name}/*.pfw*" for name in description.runs},
        **description.compare,
    }
    return yaml.safe_dump(tree, sort_keys=False)
