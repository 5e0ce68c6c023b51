"""Read a run of any version of DLIO as far as possible, for comparison with our own runs.

The only tolerant reader: what is missing or malformed is noted, never guessed.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import StorageError
from penstock.results.run_folder import SUMMARY_FILE

_EXPECTED: Final = ("start", "end", "epochs", "num_accelerators", "num_hosts", "metric", "num_files_train")


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioResult:
    """What a run of DLIO states. None for what it does not state, or not as a number.

    Throughputs are means over epochs; `io_mib_per_s` is nominal. `workload` is the configuration under DLIO's
    keys, empty if it was not kept; `durations_s` of epochs are rank 0's.
    """

    workload_name: str
    workload: Mapping[str, Any]
    started: str | None
    ended: str | None
    num_accelerators: int | None
    num_hosts: int | None
    num_files_train: int | None
    num_samples_per_file: int | None
    host_memory_gib: tuple[float, ...]
    au_percent: tuple[float, ...]
    au_mean_percent: float | None
    meets_threshold: bool | None
    samples_per_s: tuple[float, ...]
    samples_per_s_mean: float | None
    io_mib_per_s_mean: float | None
    metrics: Mapping[str, Any]
    durations_s: tuple[float, ...]
    notes: tuple[str, ...]


def read_dlio_result(folder: Path) -> DlioResult:
    """Read the run in `folder`; `StorageError` only if its summary cannot be read at all."""
    summary = _json(folder / SUMMARY_FILE)
    metric = summary.get("metric")
    metrics = metric if isinstance(metric, dict) else {}
    overrides, workload, config_notes = _configuration(folder)
    durations_s, stats_notes = _durations(folder)
    missing = [key for key in _EXPECTED if key not in summary]
    notes = [f"summary.json has no {', '.join(missing)}"] if missing else []
    verdict = metrics.get("train_au_meet_expectation")
    return DlioResult(
        workload_name=_workload_name(overrides, workload),
        workload=workload,
        started=_text(summary.get("start")),
        ended=_text(summary.get("end")),
        num_accelerators=_whole(summary.get("num_accelerators")),
        num_hosts=_whole(summary.get("num_hosts")),
        num_files_train=_whole(summary.get("num_files_train")),
        num_samples_per_file=_whole(summary.get("num_samples_per_file")),
        host_memory_gib=_numbers(summary.get("host_memory_GB")),
        au_percent=_numbers(metrics.get("train_au_percentage")),
        au_mean_percent=_number(metrics.get("train_au_mean_percentage")),
        meets_threshold=None if verdict is None else verdict == "success",
        samples_per_s=_numbers(metrics.get("train_throughput_samples_per_second")),
        samples_per_s_mean=_number(metrics.get("train_throughput_mean_samples_per_second")),
        io_mib_per_s_mean=_number(metrics.get("train_io_mean_MB_per_second")),
        metrics=metrics,
        durations_s=durations_s,
        notes=(*notes, *config_notes, *stats_notes),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read this summary: {error}", uri=str(path)) from error
    if not isinstance(document, dict):
        raise StorageError("Not a summary of a run", uri=str(path))
    return document


def _configuration(folder: Path) -> tuple[list[str], dict[str, Any], list[str]]:
    """Overrides and workload from the sub-folder that has them: `.hydra`, `configs`, `dlio_config`, ..."""
    overrides_files = sorted(folder.glob("*/overrides.yaml"))
    if not overrides_files:
        return [], {}, ["its configuration was not kept"]
    notes: list[str] = []
    overrides = _read_yaml(overrides_files[0], notes)
    config = _read_yaml(overrides_files[0].with_name("config.yaml"), notes)
    workload = config.get("workload", {}) if isinstance(config, dict) else {}
    return (
        [word for word in overrides if isinstance(word, str)] if isinstance(overrides, list) else [],
        workload if isinstance(workload, dict) else {},
        notes,
    )


def _read_yaml(path: Path, notes: list[str]) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(f"cannot read {path.name}: {error}")
        return None


def _workload_name(overrides: list[str], workload: Mapping[str, Any]) -> str:
    named = (word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("workload="))
    model = workload.get("model")
    model_name = model.get("name") if isinstance(model, dict) else model
    return next(named, None) or _text(model_name) or "unknown"


def _durations(folder: Path) -> tuple[tuple[float, ...], list[str]]:
    candidates = (folder / "0_per_epoch_stats.json", folder / "per_epoch_stats.json")
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        return (), ["its times of epochs were not kept"]
    try:
        stats = _json(path)
    except StorageError as error:
        return (), [str(error)]
    return tuple(_epoch_durations(stats)), []


def _epoch_durations(stats: Mapping[str, Any]) -> Iterator[float]:
    for epoch in sorted((key for key in stats if key.isdecimal()), key=int):
        entry = stats[epoch]
        duration = _number(entry.get("duration")) if isinstance(entry, dict) else None
        if duration is not None:
            yield duration


def _number(value: Any) -> float | None:
    """A finite number, also one written as text, as DLIO writes durations."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _numbers(value: Any) -> tuple[float, ...]:
    """A list's numbers; a bare number is a list of one."""
    entries = value if isinstance(value, list) else [value]
    return tuple(number for number in map(_number, entries) if number is not None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
