"""Runs of Penstock and DLIO in one form, found below a folder and compared setting by setting.

`penstock results` shows them. Invariants: a folder that cannot be read is named, and hides no other; figures
of runs that are not comparable are only shown together with the settings that prevent it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.results.checkpoint_figures import CheckpointFigures, read_checkpoint_figures
from penstock.results.dlio.dlio_result import read_dlio_result
from penstock.results.phase_figures import PhaseFigures
from penstock.results.run_folder import RUN_FILE
from penstock.results.run_record import RunRecord, read_record
from penstock.workload.layered_settings import dotted, flatten

VARIABLE_SETTINGS: Final = (
    "reader.read_threads", "reader.write_threads", "reader.computation_threads", "reader.prefetch_size",
    "reader.transfer_size", "reader.odirect", "reader.pin_memory", "reader.multiprocessing_context",
    "reader.data_loader", "dataset.data_folder", "dataset.skip_listing",
    "dataset.listing_validation_interval", "dataset.listing_threads", "dataset.keep_files",
    "checkpoint.checkpoint_folder", "workflow.generate_data", "workflow.profiling", "train.seed", "metric.au",
)  # fmt: skip
"""Settings that users vary to see their effect. Any other difference changes what is asked of storage."""
_FREE_SECTIONS: Final = ("storage", "output", "profiling")
_LOADER: Final = "loader"
"""The name of the user's own loader, which is what such runs vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run; None for unknown figures. `settings` are the workload's values by dotted key.

    Of a run of the user's own loader, `workload` is the loader's name.
    """

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
    is_own_loader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting in which runs differ, and each run's value; None where a run does not state it."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """A figure of each run, and its relative change from the first run; None where that is undefined."""

    figure: str
    values: tuple[float | None, ...]
    changes: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs and their differences. `obstacles` are those that make the figures incomparable."""

    runs: tuple[RunSummary, ...]
    obstacles: tuple[SettingDifference, ...]
    varied: tuple[SettingDifference, ...]
    deltas: tuple[FigureChange, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether the changes can be attributed to storage and settings alone."""
        return not self.obstacles


_FIGURES: Final = (
    "au_compat_percent", "au_strict_percent", "samples_per_s_compat", "samples_per_s_strict",
    "io_compat_mib_per_s", "read_bytes", "read_bytes_per_s", "write_gib_per_s", "read_gib_per_s",
)  # fmt: skip


def summarize_run(folder: Path) -> RunSummary:
    """The run in `folder`: by our record where there is one, else by DLIO's files."""
    if (folder / RUN_FILE).is_file():
        return _summarize_own(folder, read_record(folder))
    return _summarize_dlio(folder)


def compare_runs(runs: Sequence[RunSummary]) -> RunComparison:
    """Compare two or more runs with the first."""
    differences = list(_find_differences(runs))
    return RunComparison(
        runs=tuple(runs),
        obstacles=tuple(difference for difference in differences if not may_vary(difference.key)),
        varied=tuple(difference for difference in differences if may_vary(difference.key)),
        deltas=tuple(_compare_figure(figure, [getattr(run, figure) for run in runs]) for figure in _FIGURES),
    )


def may_vary(key: str) -> bool:
    """Whether runs that differ in this setting remain comparable."""
    return key in (*VARIABLE_SETTINGS, _LOADER) or key.partition(".")[0] in _FREE_SECTIONS


def _find_differences(runs: Sequence[RunSummary]) -> Iterator[SettingDifference]:
    for key in ("workload", "ranks", "outcome"):
        values = tuple(getattr(run, key) for run in runs)
        if len(set(values)) > 1 or (key == "outcome" and values[0] != "finished"):
            is_loader = key == "workload" and all(run.is_own_loader for run in runs)
            yield SettingDifference(key=_LOADER if is_loader else key, values=values)
    # DLIO's files hold only keys that were set explicitly: a key that one run does not state cannot differ.
    for key in sorted(set.intersection(*(set(run.settings) for run in runs))):
        values = tuple(run.settings[key] for run in runs)
        if any(value != values[0] for value in values):
            yield SettingDifference(key=key, values=values)


def _compare_figure(figure: str, values: Sequence[float | None]) -> FigureChange:
    first = values[0]
    changes = tuple(None if value is None or not first else value / first - 1 for value in values)
    return FigureChange(figure=figure, values=tuple(values), changes=changes)


def _summarize_own(folder: Path, record: RunRecord) -> RunSummary:
    train, checkpoints = record.train, read_checkpoint_figures(folder)
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
        bottleneck=_bottleneck(train, checkpoints),
        write_gib_per_s=checkpoints.write.gib_per_s if checkpoints and checkpoints.write else None,
        read_gib_per_s=checkpoints.read.gib_per_s if checkpoints and checkpoints.read else None,
        settings=_settings(record.workload),
        notes=record.remarks,
        is_own_loader=_LOADER in record.plan,
    )


def _bottleneck(train: PhaseFigures | None, checkpoints: CheckpointFigures | None) -> str | None:
    if train is not None and train.verdict is not None:
        return train.verdict.bottleneck.value
    return checkpoints.bottleneck if checkpoints else None


def _summarize_dlio(folder: Path) -> RunSummary:
    result = read_dlio_result(folder)
    return RunSummary(
        id=folder.name,
        folder=str(folder),
        kind="DLIO",
        workload=result.workload_name,
        started=result.started,
        ranks=result.num_accelerators,
        outcome="finished" if result.ended else "unknown",
        why="" if result.ended else "Its summary has no end.",
        au_compat_percent=result.au_mean_percent,
        au_strict_percent=None,
        samples_per_s_compat=result.samples_per_s_mean,
        samples_per_s_strict=None,
        io_compat_mib_per_s=result.io_mib_per_s_mean,
        read_bytes=None,
        read_bytes_per_s=None,
        bottleneck=None,
        settings=_settings(result.workload),
        notes=result.notes,
    )


def _settings(workload: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted(path): value for path, value in flatten(workload)}
