"""Several runs of cache operations in one table: which storage is faster, did they do the same? Pure.

Runs are comparable if the digests of their plans are equal. Latencies order storages only where all runs kept
as many operations in flight: more of them wait longer for each on the same storage. For runs of mlperf-v3 the
published metrics stand next to ours, with the order of the storages that each of them gives.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.errors import StorageError
from penstock.kvcache.cache_run import FILE, FORMAT_VERSION

_FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "read_gib_per_s": ("read", "gib_per_s"),
    "write_gib_per_s": ("write", "gib_per_s"),
    "read_p99_ms": ("read", "latency_ms", "p99"),
    "write_p99_ms": ("write", "latency_ms", "p99"),
    "load_p95_ms": ("requests", "load_ms", "p95"),
    "hits_worth_it": ("time_to_first_token", "hits_worth_it"),
    "saved_s": ("time_to_first_token", "saved_s"),
}


def read_cache_run(folder: Path) -> dict[str, Any]:
    """The document of the run in a folder."""
    path = folder / FILE
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"This folder has no run of `penstock kvcache`: {error}",
            uri=str(path),
            fix="Name a run's folder.",
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT_VERSION:
        raise StorageError(
            "This run has another format", uri=str(path), fix="Read it with the version that wrote it."
        )
    return document


def compare_cache_runs(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of all runs by name, each with the order of the runs that it gives, best first."""
    figures = [_figures(document) for document in documents]
    names = [name for name in figures[0] if all(name in of_run for of_run in figures)]
    in_flight = [_in_flight(document) for document in documents]
    unordered = {name for name in names if is_latency(name)} if len(set(in_flight)) > 1 else set()
    return {
        "targets": [document["target"] for document in documents],
        "is_comparable": len({_identity(document) for document in documents}) == 1,
        "in_flight": in_flight,
        "figures": {
            name: {
                "values": [of_run[name] for of_run in figures],
                "best_first": [] if name in unordered else _order([of_run[name] for of_run in figures], name),
            }
            for name in names
        },
    }


def is_latency(name: str) -> bool:
    """True if a figure is a latency of ours; the published ones are shown with the order that they claim."""
    return "_ms" in name and not name.endswith("theirs")


def latency_note(comparison: Mapping[str, Any]) -> str | None:
    """Why latencies of these runs order nothing; None where they do."""
    in_flight = comparison["in_flight"]
    if len(set(in_flight)) <= 1:
        return None
    counts = ", ".join("an unknown number of" if count is None else f"{count:,}" for count in in_flight)
    return f"Latencies order no storages: the runs had {counts} operations in flight."


def _in_flight(document: Mapping[str, Any]) -> int | None:
    streams = document.get("engine", {}).get("streams")
    return None if streams is None else int(streams) * int(document.get("ranks", 1))


def _identity(document: Mapping[str, Any]) -> str:
    """The digests of a run's plans."""
    return json.dumps(document.get("digests") or document["plan"]["digest"], sort_keys=True)


def _figures(document: Mapping[str, Any]) -> dict[str, float | None]:
    if "options" in document:
        return {
            f"option {number}, {name.removeprefix('aggregated_')}, {whose}": metric[whose]
            for number, option in document["options"].items()
            for name, metric in option["metrics"].items()
            for whose in ("honest", "theirs")
        }
    return {name: _at(document, path) for name, path in _FIGURES.items()}


def _at(document: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = document
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def _order(values: Sequence[float | None], name: str) -> list[int]:
    """The numbers of the runs, best first; those without a figure are left out."""
    known = [(value, number) for number, value in enumerate(values) if value is not None]
    is_time = "_ms" in name
    return [number for _, number in sorted(known, reverse=not is_time)]
