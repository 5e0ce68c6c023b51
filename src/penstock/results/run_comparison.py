"""Runs of Penstock and DLIO in one form, found below a folder and compared setting by setting.

`penstock results` shows them. Invariants: a folder that cannot be read is named, and does not hide other
folders; if runs are not comparable, their figures are shown only together with the settings that differ.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import StorageError, name_some
from penstock.reports.report import Banner, Chart, Kind, Look, Report, Series, table_section
from penstock.results.checkpoint_files import read_checkpoints
from penstock.results.published_files import read_json
from penstock.results.run_folder import MEASURED_FILES, RUN_FILE, SUMMARY_FILE
from penstock.results.run_record import RunRecord, read_record
from penstock.storage.files.local_files import read_document
from penstock.units import format_number
from penstock.workload.settings import dotted, flatten
from penstock.workload.strict_yaml import limit_values

VARIABLE_SETTINGS: Final = (
    "reader.read_threads", "reader.write_threads", "reader.computation_threads", "reader.prefetch_size",
    "reader.transfer_size", "reader.odirect", "reader.pin_memory", "reader.multiprocessing_context",
    "reader.data_loader", "dataset.data_folder", "dataset.skip_listing",
    "dataset.listing_validation_interval", "dataset.listing_threads", "dataset.keep_files",
    "checkpoint.checkpoint_folder", "workflow.generate_data", "workflow.profiling", "train.seed", "metric.au",
)  # fmt: skip
"""Settings that users vary to see their effect. Any other difference changes the load on the storage."""
_FREE_SECTIONS: Final = ("storage", "output", "profiling", "access", "pipe", "engine", "seeds")
_ASKED: Final = ("access", "pipe", "division", "scale", "is_subset", "parallelism")
"""Parts of a run's plan that the user chose and that are not in the workload."""
_LOADER: Final = "loader"
"""The setting with the name of the user's own loader; runs with such loaders may differ in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run. Unknown figures are None. `settings` are the workload's values by dotted key.

    Settings of Penstock's own runs (those with `penstock_version`) are complete. For a run of the user's own
    loader, `workload` is the loader's name.
    """

    id: str
    folder: str
    kind: str
    workload: str
    started: str | None
    ranks: int | None
    outcome: str
    why: str
    au_compat_percent: float | None = None
    au_strict_percent: float | None = None
    samples_per_s_compat: float | None = None
    samples_per_s_strict: float | None = None
    io_compat_mib_per_s: float | None = None
    read_bytes: int | None = None
    read_bytes_per_s: float | None = None
    bottleneck: str | None = None
    write_gib_per_s: float | None = None
    read_gib_per_s: float | None = None
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    is_own_loader: bool = False
    penstock_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs and their differences. `obstacles` are the differences that make the figures incomparable.

    A difference has the `key` of a setting and its `values` in all runs, None where a run does not state it.
    A delta has the `figure`, its `values`, and its relative `changes` from the first run, if defined.
    """

    runs: tuple[RunSummary, ...]
    obstacles: tuple[Mapping[str, Any], ...]
    varied: tuple[Mapping[str, Any], ...]
    deltas: tuple[Mapping[str, Any], ...]


_FIGURES: Final = (
    "au_compat_percent", "au_strict_percent", "samples_per_s_compat", "samples_per_s_strict",
    "io_compat_mib_per_s", "read_bytes", "read_bytes_per_s", "write_gib_per_s", "read_gib_per_s",
)  # fmt: skip


def summarize_run(folder: Path) -> RunSummary:
    """Summarize the run in `folder` from Penstock's record or, if there is none, from DLIO's files."""
    if (folder / RUN_FILE).is_file():
        return _summarize_own(folder, read_record(folder))
    return _summarize_dlio(folder)


def compare_runs(runs: Sequence[RunSummary]) -> RunComparison:
    """Compare all runs with the first of them. There must be at least two."""
    obstacles: list[Mapping[str, Any]] = []
    varied: list[Mapping[str, Any]] = []
    for difference in _find_differences(runs):
        (varied if may_vary(difference["key"]) else obstacles).append(difference)
    deltas = []
    for figure in _FIGURES:
        values = tuple(getattr(run, figure) for run in runs)
        first = values[0]
        changes = tuple(None if value is None or not first else value / first - 1 for value in values)
        deltas.append({"figure": figure, "values": values, "changes": changes})
    return RunComparison(
        runs=tuple(runs),
        obstacles=tuple(obstacles),
        varied=tuple(varied),
        deltas=tuple(deltas),
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
    # DLIO's files have only the keys that were set explicitly, and other versions have other keys. A setting
    # that a run does not state therefore cannot differ.
    stated = [set(run.settings) for run in runs]
    versions = {run.penstock_version for run in runs}
    are_complete = len(versions) == 1 and None not in versions
    for key in sorted(set.union(*stated) if are_complete else set.intersection(*stated)):
        values = tuple(run.settings.get(key) for run in runs)
        if any(value != values[0] for value in values):
            yield {"key": key, "values": values}


def _summarize_own(folder: Path, record: RunRecord) -> RunSummary:
    train, checkpoints = record.train, read_checkpoints(folder) or {}
    kind = record.plan.get("kind", "training")
    moved: Mapping[str, Any] = checkpoints
    asked = {key: record.plan[key] for key in _ASKED if key in record.plan}
    if kind in MEASURED_FILES:  # the user chose all of the plan
        asked = {key: value for key, value in record.plan.items() if key not in ("kind", "uri")}
        moved = _read_rates(folder / MEASURED_FILES[kind])
    summary = RunSummary(
        id=record.id,
        folder=str(folder),
        kind="penstock",
        workload="_".join(filter(None, (record.name, record.accelerator))),
        started=record.started_at,
        ranks=record.ranks,
        outcome=record.outcome.value,
        why=record.why,
        bottleneck=checkpoints.get("bottleneck"),
        write_gib_per_s=(moved.get("write") or {}).get("gib_per_s"),
        read_gib_per_s=(moved.get("read") or {}).get("gib_per_s"),
        settings=_settings({**record.workload, **asked, "seeds": record.seeds}),
        notes=record.remarks,
        is_own_loader=_LOADER in record.plan,
        penstock_version=record.penstock_version,
    )
    if train is None:
        return summary
    return replace(
        summary,
        au_compat_percent=train.au_compat_percent.mean,
        au_strict_percent=train.au_strict_percent.mean if train.au_strict_percent else None,
        samples_per_s_compat=train.samples_per_s_compat.mean,
        samples_per_s_strict=train.samples_per_s_strict,
        io_compat_mib_per_s=train.io_compat_mib_per_s.mean,
        read_bytes=train.read_bytes,
        read_bytes_per_s=train.read_bytes_per_s,
        bottleneck=train.verdict.bottleneck.value if train.verdict else summary.bottleneck,
    )


def _read_rates(path: Path) -> dict[str, Any]:
    """Read the rates of a run that neither trains nor writes checkpoints.

    For a probe, these are the best rates of each operation.
    """
    try:
        document = read_json(path)
        found: dict[str, Any] = {name: document.get(name) for name in ("write", "read")}
        for one in document.get("measurements", ()):
            best = found.get(one["op"]) or one
            found[one["op"]] = max(best, one, key=lambda each: each["gib_per_s"])
    except (StorageError, TypeError, KeyError, AttributeError):
        return {}  # the run did not finish
    return found


_EXPECTED: Final = ("start", "end", "epochs", "num_accelerators", "num_hosts", "metric", "num_files_train")


def _summarize_dlio(folder: Path) -> RunSummary:
    """Summarize a run of any version of DLIO as far as its files can be read.

    Missing figures are noted, never guessed.
    """
    summary = read_json(folder / SUMMARY_FILE, has_nan=True)
    metric = summary["metric"] if isinstance(summary.get("metric"), dict) else {}
    missing = [key for key in _EXPECTED if key not in summary]
    notes = [f"summary.json has no {', '.join(missing)}"] if missing else []
    # The sub-folder with the configuration may be .hydra, configs, dlio_config, ...
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
        samples_per_s_compat=_number(metric.get("train_throughput_mean_samples_per_second")),
        io_compat_mib_per_s=_number(metric.get("train_io_mean_MB_per_second")),
        write_gib_per_s=_number(metric.get("save_checkpoint_io_mean_GB_per_second")),
        read_gib_per_s=_number(metric.get("load_checkpoint_io_mean_GB_per_second")),
        settings=_settings(workload),
        notes=tuple(notes),
    )


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses numbers of thousands of digits."""


limit_values(_Loader)


def _read_yaml(path: Path, kind: type, notes: list[str]) -> Any:
    try:
        content = read_document(path)
        # Aliases in aliases multiply, and one may lead back to itself. DLIO writes none.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content)):
            raise ValueError("it has aliases")  # noqa: TRY301 - noted like other reasons
        document = yaml.load(content, Loader=_Loader)  # noqa: S506 - safe
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"cannot read {path.name}: {error}")
        document = None
    return document if isinstance(document, kind) else kind()


def _number(value: Any) -> float | None:
    """Return `value` as a number if it is a finite number or a string that represents one, else None."""
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
"""Figures that differ by less count as equal."""

_VERDICTS: Final = {
    (False, False): ("alike", Look.PLAIN),
    (False, True): ("faster", Look.GOOD),
    (True, False): ("slower", Look.BAD),
    (True, True): ("mixed", Look.PLAIN),
}
"""The verdict and its look, by whether some run is slower, and some run is faster, than the first."""

_CHARTED: Final = {
    "au_compat_percent": ("AU", 1, "%"),
    "samples_per_s_strict": ("Samples per second", 1, ""),
    "read_bytes_per_s": ("Bytes read", 1, "B/s"),
    "write_gib_per_s": ("Checkpoints written", 2**30, "B/s"),
    "read_gib_per_s": ("Checkpoints read back", 2**30, "B/s"),
}
"""The figures by which runs are compared, all better if larger: title, factor and unit of a chart."""


def figure_rows(comparison: RunComparison, names: Sequence[str]) -> list[dict[str, str]]:
    """Return a table row for each figure that a run has, with changes from the first run."""
    rows = []
    for delta in comparison.deltas:
        style = ",.0f" if "bytes" in delta["figure"] else ",.2f"
        texts = [format_number(value, style) for value in delta["values"]]
        for number, change in enumerate(delta["changes"]):
            texts[number] += f" ({change:+.1%})" if number and change is not None else ""
        if any(value is not None for value in delta["values"]):
            rows.append({"figure": delta["figure"], **dict(zip(names, texts, strict=True))})
    return rows


def difference_rows(differences: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, str]]:
    """Return a table row for each setting in which runs differ."""
    return [
        {"key": each["key"], **dict(zip(names, map(str, each["values"]), strict=True))}
        for each in differences
    ]


def make_comparison_page(comparison: RunComparison) -> Report:
    """Build the page of two or more runs, each compared with the first."""
    runs, names = comparison.runs, [run.id for run in comparison.runs]
    rows = [
        {
            "run": run.id,
            "workload": run.workload,
            "ranks": str(run.ranks or "-"),
            "outcome": run.outcome,
            "limited by": run.bottleneck or "-",
            "folder": run.folder,
        }
        for run in runs
    ]
    charts = []
    for delta in comparison.deltas:
        # Each run has its own color.
        title, factor, unit = _CHARTED.get(delta["figure"], ("", 1, ""))
        bars = [
            Series(name=name, run=name, x=[number], y=[value * factor])
            for number, (name, value) in enumerate(zip(names, delta["values"], strict=True))
            if value is not None
        ]
        if title and bars:
            y_end = 100 if unit == "%" else 0
            charts.append(
                Chart(kind=Kind.BARS, title=title, run=names[0], unit=unit, y_end=y_end, series=bars)
            )
    return Report(
        title=f"{len(runs)} runs compared",
        subtitle=f"{', '.join(names)}; against {names[0]}",
        banner=_banner(comparison, names),
        highlights=charts,
        runs=names,
        sections=[
            table_section("obstacles", "Requested differently", difference_rows(comparison.obstacles, names)),
            table_section("varied", "Set differently", difference_rows(comparison.varied, names)),
            table_section("figures", "Figures", figure_rows(comparison, names)),
            table_section("runs", "Runs", rows),
        ],
    )


def _banner(comparison: RunComparison, names: Sequence[str]) -> Banner:
    runs = comparison.runs
    rows = {row["figure"]: row for row in figure_rows(comparison, names) if row["figure"] in _CHARTED}
    figures = [
        f"{name}: {', '.join(f'{_CHARTED[figure][0]} {row[name]}' for figure, row in rows.items())}"
        for name in names[1:]
    ]
    # Of training, samples per second count, of which AU is a consequence.
    known = [delta["changes"][1:] for delta in comparison.deltas if delta["figure"] in list(_CHARTED)[1:]]
    changes = next(filter(None, ([one for one in each if one is not None] for each in known)), [])
    if comparison.obstacles:
        verdict, look = "not comparable", Look.DOUBT
    elif not changes:
        verdict, look = "no figures", Look.DOUBT
    else:
        verdict, look = _VERDICTS[min(changes) <= -_NOTICED, max(changes) >= _NOTICED]
    differing = [difference["key"] for difference in (*comparison.obstacles, *comparison.varied)]
    return Banner(
        verdict=verdict,
        look=look,
        figure="; ".join(figures),
        limited_by=", ".join(f"{run.id}: {run.bottleneck or 'not known'}" for run in runs),
        since=f"what differs: {name_some(differing)}" if differing else "nothing differs in what was asked",
        to_do=(
            "Compare runs of the same workload, ranks and data set: see what was requested differently."
            if comparison.obstacles
            else "Look at each run's own page (`penstock results page RUN`) for when and where it lost time."
        ),
        troubles=[f"{run.id} is {run.outcome}: {run.why}" for run in runs if run.why],
    )
