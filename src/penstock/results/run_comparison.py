"""Runs of Penstock and DLIO in one form, found below a folder and compared setting by setting.

`penstock results` shows them. Invariants: a folder that cannot be read is named, and hides no other; figures
of runs that are not comparable are only shown together with the settings that prevent it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import StorageError, name_some
from penstock.reports.report import Banner, Chart, Kind, Look, Report, Series, table_section
from penstock.results.checkpoint_files import read_checkpoints
from penstock.results.run_folder import RUN_FILE, SUMMARY_FILE
from penstock.results.run_record import RunRecord, read_record
from penstock.units import format_rate
from penstock.workload.settings import dotted, flatten

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
class RunComparison:
    """Runs and their differences. `obstacles` are those that make the figures incomparable.

    A difference has the `key` of a setting, and its `values` in each run, None where a run does not state it.
    A delta has the `figure`, its `values`, and its relative `changes` from the first run, if defined.
    """

    runs: tuple[RunSummary, ...]
    obstacles: tuple[Mapping[str, Any], ...]
    varied: tuple[Mapping[str, Any], ...]
    deltas: tuple[Mapping[str, Any], ...]

    @property
    def is_comparable(self) -> bool:
        """True if the changes can be attributed to storage and settings alone."""
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
        obstacles=tuple(difference for difference in differences if not may_vary(difference["key"])),
        varied=tuple(difference for difference in differences if may_vary(difference["key"])),
        deltas=tuple(_compare_figure(figure, [getattr(run, figure) for run in runs]) for figure in _FIGURES),
    )


def may_vary(key: str) -> bool:
    """Check whether runs that differ in this setting remain comparable."""
    return key in (*VARIABLE_SETTINGS, _LOADER) or key.partition(".")[0] in _FREE_SECTIONS


def _find_differences(runs: Sequence[RunSummary]) -> Iterator[dict[str, Any]]:
    for key in ("workload", "ranks", "outcome"):
        values = tuple(getattr(run, key) for run in runs)
        if len(set(values)) > 1 or (key == "outcome" and values[0] != "finished"):
            is_loader = key == "workload" and all(run.is_own_loader for run in runs)
            yield {"key": _LOADER if is_loader else key, "values": values}
    # DLIO's files hold only keys that were set explicitly: a key that one run does not state cannot differ.
    for key in sorted(set.intersection(*(set(run.settings) for run in runs))):
        values = tuple(run.settings[key] for run in runs)
        if any(value != values[0] for value in values):
            yield {"key": key, "values": values}


def _compare_figure(figure: str, values: Sequence[float | None]) -> dict[str, Any]:
    first = values[0]
    changes = tuple(None if value is None or not first else value / first - 1 for value in values)
    return {"figure": figure, "values": tuple(values), "changes": changes}


def _summarize_own(folder: Path, record: RunRecord) -> RunSummary:
    train, checkpoints = record.train, read_checkpoints(folder) or {}
    strict = train.au_strict_percent if train else None
    found = train.verdict.bottleneck.value if train and train.verdict else checkpoints.get("bottleneck")
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
        bottleneck=found,
        write_gib_per_s=(checkpoints.get("write") or {}).get("gib_per_s"),
        read_gib_per_s=(checkpoints.get("read") or {}).get("gib_per_s"),
        settings=_settings(record.workload),
        notes=record.remarks,
        is_own_loader=_LOADER in record.plan,
    )


_EXPECTED: Final = ("start", "end", "epochs", "num_accelerators", "num_hosts", "metric", "num_files_train")


def _summarize_dlio(folder: Path) -> RunSummary:
    """A run of any version of DLIO, as far as it can be read: what is missing is noted, never guessed."""
    path = folder / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read this summary: {error}", uri=str(path)) from error
    if not isinstance(summary, dict):
        raise StorageError("Not a summary of a run", uri=str(path))
    metric = summary["metric"] if isinstance(summary.get("metric"), dict) else {}
    missing = [key for key in _EXPECTED if key not in summary]
    notes = [f"summary.json has no {', '.join(missing)}"] if missing else []
    # The sub-folder of configuration may be .hydra, configs, dlio_config, ...
    overrides_file = next(iter(sorted(folder.glob("*/overrides.yaml"))), None)
    overrides, config = [], {}
    if overrides_file is None:
        notes.append("its configuration was not kept")
    else:
        overrides = _read_yaml(overrides_file, list, notes)
        config = _read_yaml(overrides_file.with_name("config.yaml"), dict, notes)
    workload = config["workload"] if isinstance(config.get("workload"), dict) else {}
    named = (
        str(word).partition("=")[2] for word in overrides if str(word).lstrip("+").startswith("workload=")
    )
    model = workload.get("model")
    ranks, ended = _number(summary.get("num_accelerators")), _text(summary.get("end"))
    return RunSummary(
        id=folder.name,
        folder=str(folder),
        kind="DLIO",
        workload=next(named, "")
        or _text(model.get("name") if isinstance(model, dict) else model)
        or "unknown",
        started=_text(summary.get("start")),
        ranks=int(ranks) if ranks is not None and ranks.is_integer() else None,
        outcome="finished" if ended else "unknown",
        why="" if ended else "Its summary has no end.",
        au_compat_percent=_number(metric.get("train_au_mean_percentage")),
        au_strict_percent=None,
        samples_per_s_compat=_number(metric.get("train_throughput_mean_samples_per_second")),
        samples_per_s_strict=None,
        io_compat_mib_per_s=_number(metric.get("train_io_mean_MB_per_second")),
        read_bytes=None,
        read_bytes_per_s=None,
        bottleneck=None,
        settings=_settings(workload),
        notes=tuple(notes),
    )


def _read_yaml(path: Path, kind: type, notes: list[str]) -> Any:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(f"cannot read {path.name}: {error}")
        document = None
    return document if isinstance(document, kind) else kind()


def _number(value: Any) -> float | None:
    """A finite number, also one written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _settings(workload: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted(path): value for path, value in flatten(workload)}


# The page


_NOTICED: Final = 0.03
"""Changes below this are called alike."""


@dataclass(frozen=True, slots=True)
class _Charted:
    """A figure that runs are compared by, the more the better."""

    title: str
    value: Callable[[RunSummary], float | None]
    text: Callable[[float], str]
    unit: str
    y_end: float = 0.0


def _gib(value: float | None) -> float | None:
    return None if value is None else value * 2**30


_CHARTED: Final = (
    _Charted("AU", lambda run: run.au_compat_percent, lambda au: f"{au:.2f} %", "%", 100),
    _Charted(
        "Samples a second",
        lambda run: run.samples_per_s_strict,
        lambda rate: f"{rate:,.1f}",
        "",
    ),
    _Charted("Bytes read", lambda run: run.read_bytes_per_s, format_rate, "B/s"),
    _Charted("Checkpoints written", lambda run: _gib(run.write_gib_per_s), format_rate, "B/s"),
    _Charted("Checkpoints read back", lambda run: _gib(run.read_gib_per_s), format_rate, "B/s"),
)


def make_comparison_page(comparison: RunComparison) -> Report:
    """The page of two or more runs, each against the first."""
    runs = comparison.runs
    return Report(
        title=f"{len(runs)} runs compared",
        subtitle=f"{', '.join(run.id for run in runs)}; against {runs[0].id}",
        banner=_banner(comparison),
        highlights=[chart for figure in _CHARTED for chart in _draw(figure, runs)],
        runs=[run.id for run in runs],
        sections=[
            table_section("obstacles", "Requested differently", _differences(comparison.obstacles, runs)),
            table_section("varied", "Set differently", _differences(comparison.varied, runs)),
            table_section("runs", "Runs", list(_run_rows(runs))),
        ],
    )


def _banner(comparison: RunComparison) -> Banner:
    first, *others = comparison.runs
    known = [figure for figure in _CHARTED if figure.value(first) is not None]
    main = next((figure for figure in known if figure.title != "AU"), None)
    changes = {run.id: _change(main, first, run) for run in others}
    verdict, look = _verdict(comparison, list(changes.values()))
    differing = [difference["key"] for difference in (*comparison.obstacles, *comparison.varied)]
    return Banner(
        verdict=verdict,
        look=look,
        figure="; ".join(_say_run(run, first, known) for run in others),
        limited_by=", ".join(f"{run.id}: {run.bottleneck or 'not known'}" for run in comparison.runs),
        since=f"what differs: {name_some(differing)}" if differing else "nothing differs in what was asked",
        to_do=(
            "Compare runs of the same workload, ranks and data set: see what was requested differently."
            if comparison.obstacles
            else "Look at each run's own page (`penstock results page RUN`) for when and where it lost time."
        ),
        troubles=[f"{run.id} is {run.outcome}: {run.why}" for run in comparison.runs if run.why],
    )


def _change(figure: _Charted | None, first: RunSummary, run: RunSummary) -> float | None:
    before, after = (figure.value(one) if figure else None for one in (first, run))
    return after / before - 1 if before and after is not None else None


def _verdict(comparison: RunComparison, changes: Sequence[float | None]) -> tuple[str, Look]:
    if not comparison.is_comparable:
        return "not comparable", Look.DOUBT
    known = [change for change in changes if change is not None]
    if not known:
        return "no figures", Look.DOUBT
    if all(abs(change) < _NOTICED for change in known):
        return "alike", Look.PLAIN
    if all(change > -_NOTICED for change in known):
        return "faster", Look.GOOD
    return ("slower", Look.BAD) if all(change < _NOTICED for change in known) else ("mixed", Look.PLAIN)


def _say_run(run: RunSummary, first: RunSummary, known: Sequence[_Charted]) -> str:
    parts = []
    for figure in known:
        value, change = figure.value(run), _change(figure, first, run)
        if value is not None:
            more = "" if change is None else f" ({change:+.1%})"
            parts.append(f"{figure.title} {figure.text(value)}{more}")
    return f"{run.id}: {', '.join(parts) or 'no figures'}"


def _draw(figure: _Charted, runs: Sequence[RunSummary]) -> Iterator[Chart]:
    """A chart of all runs, each in its own colour; nothing where no run has the figure."""
    values = {run.id: value for run in runs if (value := figure.value(run)) is not None}
    if values:
        yield Chart(
            kind=Kind.BARS,
            title=figure.title,
            run=runs[0].id,
            unit=figure.unit,
            y_end=figure.y_end,
            series=[
                Series(name=run, run=run, x=[number], y=[value])
                for number, (run, value) in enumerate(values.items())
            ],
            note=", ".join(map(figure.text, values.values())),
        )


def _differences(
    differences: Sequence[Mapping[str, Any]], runs: Sequence[RunSummary]
) -> list[dict[str, str]]:
    return [
        {"key": one["key"], **{run.id: str(value) for run, value in zip(runs, one["values"], strict=True)}}
        for one in differences
    ]


def _run_rows(runs: Sequence[RunSummary]) -> Iterator[dict[str, str]]:
    for run in runs:
        figures = {
            figure.title: "-" if (value := figure.value(run)) is None else figure.text(value)
            for figure in _CHARTED
        }
        yield {
            "run": run.id,
            "workload": run.workload,
            "ranks": str(run.ranks or "-"),
            "outcome": run.outcome,
            **figures,
            "limited by": run.bottleneck or "-",
            "folder": run.folder,
        }
