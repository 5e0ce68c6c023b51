"""Runs side by side, ours and DLIO's: found below a folder, brought to one form, compared key by key.

Place in the flow: what `penstock results` shows. Invariant: a folder that cannot be read is named, and the
rest goes on; figures of runs that are not alike are not set against each other without saying so first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.results.checkpoint_figures import read_checkpoint_figures
from penstock.results.dlio.dlio_result import read_dlio_result
from penstock.results.run_folder import RUN_FILE, run_folders
from penstock.results.run_record import read_record
from penstock.workload.layered_settings import dotted, flatten

if TYPE_CHECKING:
    from penstock.results.checkpoint_figures import CheckpointFigures
    from penstock.results.phase_figures import PhaseFigures
    from penstock.results.run_record import RunRecord

VARIABLE_SETTINGS: Final = (
    "reader.read_threads", "reader.write_threads", "reader.computation_threads", "reader.prefetch_size",
    "reader.transfer_size", "reader.odirect", "reader.pin_memory", "reader.multiprocessing_context",
    "reader.data_loader", "dataset.data_folder", "dataset.skip_listing",
    "dataset.listing_validation_interval", "dataset.listing_threads", "dataset.keep_files",
    "checkpoint.checkpoint_folder", "workflow.generate_data", "workflow.profiling", "train.seed", "metric.au",
)  # fmt: skip
"""Keys that one varies to see what they do. Any other difference asks storage for something else."""
_FREE_SECTIONS: Final = ("storage", "output", "profiling")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run as far as it is known; None where a figure is not. `settings` are its values by dotted key."""

    id: str
    folder: str
    kind: str
    workload: str
    started: str | None
    ranks: int | None
    outcome: str
    why: str
    au_compat_percent: float | None
    au_strict_percent: float | None
    samples_per_s_compat: float | None
    samples_per_s_strict: float | None
    io_compat_mib_per_s: float | None
    read_bytes: int | None
    read_bytes_per_s: float | None
    bottleneck: str | None
    write_gib_per_s: float | None = None
    read_gib_per_s: float | None = None
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A key in which runs differ, and each one's value; None where a run does not tell."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """A figure of each run, and by what part each differs from the first; None where that makes no sense."""

    figure: str
    values: tuple[float | None, ...]
    changes: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs side by side. They are comparable unless they asked for something different or did not finish."""

    runs: tuple[RunSummary, ...]
    obstacles: tuple[SettingDifference, ...]
    varied: tuple[SettingDifference, ...]
    deltas: tuple[FigureChange, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether the deltas say something about storage and settings alone."""
        return not self.obstacles


_FIGURES: Final = (
    "au_compat_percent", "au_strict_percent", "samples_per_s_compat", "samples_per_s_strict",
    "io_compat_mib_per_s", "read_bytes", "read_bytes_per_s", "write_gib_per_s", "read_gib_per_s",
)  # fmt: skip


def find_runs(parent: Path) -> tuple[list[RunSummary], list[str]]:
    """All runs below `parent`, newest first, and a sentence for each folder that cannot be read."""
    views: list[RunSummary] = []
    complaints: list[str] = []
    for folder in run_folders(parent):
        try:
            views.append(summarize_run(folder))
        except PenstockError as error:
            complaints.append(str(error))
    return sorted(views, key=lambda view: (view.started or "", view.id), reverse=True), complaints


def summarize_run(folder: Path) -> RunSummary:
    """The run in `folder`: by our record where there is one, else by DLIO's files."""
    if (folder / RUN_FILE).is_file():
        return _own_view(folder, read_record(folder))
    return _dlio_view(folder)


def compare_runs(runs: Sequence[RunSummary]) -> RunComparison:
    """Two or more runs against the first."""
    differences = list(_differences(runs))
    return RunComparison(
        runs=tuple(runs),
        obstacles=tuple(each for each in differences if not may_vary(each.key)),
        varied=tuple(each for each in differences if may_vary(each.key)),
        deltas=tuple(_delta(figure, [getattr(run, figure) for run in runs]) for figure in _FIGURES),
    )


def may_vary(key: str) -> bool:
    """Whether runs that differ in this key still answer the same question."""
    return key in VARIABLE_SETTINGS or key.partition(".")[0] in _FREE_SECTIONS


def _differences(runs: Sequence[RunSummary]) -> Iterator[SettingDifference]:
    for key in ("workload", "ranks", "outcome"):
        values = tuple(getattr(run, key) for run in runs)
        if len(set(values)) > 1 or (key == "outcome" and values[0] != "finished"):
            yield SettingDifference(key=key, values=values)
    told = [run.settings for run in runs]
    for key in sorted(set().union(*told)):
        values = tuple(settings.get(key) for settings in told)
        if any(value != values[0] for value in values) and _all_tell(key, told):
            yield SettingDifference(key=key, values=values)


def _all_tell(key: str, told: Sequence[Mapping[str, Any]]) -> bool:
    """DLIO's files hold only keys that somebody set: where one does not tell, there is nothing to compare."""
    return all(key in settings for settings in told)


def _delta(figure: str, values: Sequence[float | None]) -> FigureChange:
    first = values[0]
    changes = tuple(None if value is None or not first else value / first - 1 for value in values)
    return FigureChange(figure=figure, values=tuple(values), changes=changes)


def _own_view(folder: Path, record: RunRecord) -> RunSummary:
    train, taken = record.train, read_checkpoint_figures(folder)
    strict = train.au_strict_percent if train else None
    return RunSummary(
        id=record.id,
        folder=str(folder),
        kind="penstock",
        workload="_".join(filter(None, (record.name, record.accelerator))),
        started=record.started_at,
        ranks=record.ranks,
        outcome=record.outcome.value,
        why=record.why,
        au_compat_percent=train.au_compat_percent.mean if train else None,
        au_strict_percent=strict.mean if strict else None,
        samples_per_s_compat=train.samples_per_s_compat.mean if train else None,
        samples_per_s_strict=train.samples_per_s_strict if train else None,
        io_compat_mib_per_s=train.io_compat_mib_per_s.mean if train else None,
        read_bytes=train.read_bytes if train else None,
        read_bytes_per_s=train.read_bytes_per_s if train else None,
        bottleneck=_bottleneck(train, taken),
        write_gib_per_s=taken.write.gib_per_s if taken and taken.write else None,
        read_gib_per_s=taken.read.gib_per_s if taken and taken.read else None,
        settings=_settings(record.workload),
        notes=record.remarks,
    )


def _bottleneck(train: PhaseFigures | None, taken: CheckpointFigures | None) -> str | None:
    if train is not None and train.verdict is not None:
        return train.verdict.bottleneck.value
    return taken.bottleneck if taken else None


def _dlio_view(folder: Path) -> RunSummary:
    found = read_dlio_result(folder)
    return RunSummary(
        id=folder.name,
        folder=str(folder),
        kind="DLIO",
        workload=found.workload_name,
        started=found.started,
        ranks=found.num_accelerators,
        outcome="finished" if found.ended else "unknown",
        why="" if found.ended else "Its summary has no end.",
        au_compat_percent=found.au_mean_percent,
        au_strict_percent=None,
        samples_per_s_compat=found.samples_per_s_mean,
        samples_per_s_strict=None,
        io_compat_mib_per_s=found.io_mib_per_s_mean,
        read_bytes=None,
        read_bytes_per_s=None,
        bottleneck=None,
        settings=_settings(found.workload),
        notes=found.notes,
    )


def _settings(workload: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted(path): value for path, value in flatten(workload)}
