"""`iostat.json` as DLIO's users have it: the counters of rank 0's host, second by second, in sysstat's words.

DLIO starts `iostat -mdxtcy -o JSON 1`; here the samples that every run keeps are converted, and no program
has to be installed. Dates are UTC, as in all of DLIO's files.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from penstock.results.counter_files import COUNTERS_FILE, SampledHost, read_counters
from penstock.results.provenance import HostFacts
from penstock.results.published_files import write_json

logger = logging.getLogger(__name__)

IOSTAT_FILE: Final = "iostat.json"
_SHORTEST: Final = 0.9
"""Samples that follow sooner than this share of the interval belong to the next report."""
_MIB: Final = 2**20
_KIB: Final = 2**10
_DATE: Final = "%m/%d/%y"
_CPU: Final = ("user", "nice", "system", "iowait", "steal", "idle")
_KINDS: Final = (
    ("r", "reads", "read_bytes", "merged_reads", "read_ms"),
    ("w", "writes", "written_bytes", "merged_writes", "write_ms"),
    ("d", "discards", "discarded_bytes", "merged_discards", "discard_ms"),
)
"""The letter of a kind of request, and its counters: requests, bytes, merged ones, and their time."""

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Sample:
    monotonic_ns: int
    counts: Counts


def write_iostat(folder: Path, host: HostFacts, devices: Sequence[str]) -> None:
    """Write the file of a run whose counters are gathered; without `devices`, of all whole devices."""
    if not (folder / COUNTERS_FILE).exists():
        logger.warning("No %s is written: the counters of no host could be read", IOSTAT_FILE)
        return
    hosts, table = read_counters(folder)
    sampled = min(hosts, key=lambda one: one.rank)
    rows = (row for row in table.to_pylist() if row["host"] == sampled.host)
    samples = list(_reports(_samples(rows), sampled.interval_s))
    names = tuple(devices) or _whole_devices(sampled, samples)
    date = _date(sampled, samples[0].monotonic_ns) if samples else datetime.now(UTC)
    document = {
        "nodename": host.host,
        "sysname": "Linux",
        "release": host.kernel.partition(" ")[2],
        "machine": host.machine,
        "number-of-cpus": host.num_cores,
        "date": date.strftime(_DATE),
        "statistics": [_report(sampled, before, after, names) for before, after in pairwise(samples)],
    }
    write_json(folder, IOSTAT_FILE, {"sysstat": {"hosts": [document]}})


def _samples(rows: Iterator[Mapping[str, Any]]) -> Iterator[_Sample]:
    """All counters at each moment; a row is written only where one has changed."""
    counts: dict[str, int] = {}
    moment = None
    for row in rows:
        if moment is not None and row["monotonic_ns"] != moment:
            yield _Sample(moment, dict(counts))
        moment = row["monotonic_ns"]
        counts[row["counter"]] = row["value"]
    if moment is not None:
        yield _Sample(moment, counts)


def _reports(samples: Iterator[_Sample], interval_s: float) -> Iterator[_Sample]:
    """Samples about an interval apart; the last one in any case, or what a short run moved would be lost."""
    begun, last = None, None
    for sample in samples:
        last = sample
        if begun is None or sample.monotonic_ns - begun >= _SHORTEST * interval_s * 1e9:
            begun, last = sample.monotonic_ns, None
            yield sample
    if last is not None:
        yield last


def _whole_devices(host: SampledHost, samples: Sequence[_Sample]) -> tuple[str, ...]:
    """The drives of the host, and the devices that are made of them, that have ever been used."""
    used = {
        name.split(".")[1] for sample in samples[-1:] for name in sample.counts if name.startswith("disk.")
    }
    return tuple(sorted(name for name in used if name in host.drives or name.startswith(("dm-", "md"))))


def _report(host: SampledHost, before: _Sample, after: _Sample, devices: Sequence[str]) -> dict[str, Any]:
    elapsed_s = (after.monotonic_ns - before.monotonic_ns) / 1e9
    moved = {name: value - before.counts.get(name, 0) for name, value in after.counts.items()}
    return {
        "timestamp": _date(host, after.monotonic_ns).strftime(f"{_DATE} %H:%M:%S"),
        "avg-cpu": _processors(moved),
        "disk": [_device(name, moved, elapsed_s) for name in devices],
    }


def _date(host: SampledHost, monotonic_ns: int) -> datetime:
    return datetime.fromtimestamp((host.wall_ns + monotonic_ns - host.monotonic_ns) / 1e9, UTC)


def _processors(moved: Counts) -> dict[str, float]:
    """Shares in percent; interrupts are the system's, as in iostat."""
    spent = {name: moved.get(f"cpu.{name}_ms", 0) for name in (*_CPU, "irq", "softirq")}
    whole = sum(spent.values()) or 1
    spent["system"] += spent["irq"] + spent["softirq"]
    return {name: round(100 * spent[name] / whole, 2) for name in _CPU}


def _device(name: str, moved: Counts, elapsed_s: float) -> dict[str, Any]:
    def count(counter: str) -> int:
        return moved.get(f"disk.{name}.{counter}", 0)

    rates, merged, waits, sizes = {}, {}, {}, {}
    for letter, requests, size_bytes, joined, spent_ms in _KINDS:
        done, together = count(requests), count(joined)
        rates[f"{letter}/s"] = done / elapsed_s
        rates[f"{letter}MB/s"] = count(size_bytes) / _MIB / elapsed_s
        merged[f"{letter}rqm/s"] = together / elapsed_s
        merged[f"{letter}rqm"] = 100 * together / (done + together or 1)
        waits[f"{letter}_await"] = count(spent_ms) / (done or 1)
        sizes[f"{letter}areq-sz"] = count(size_bytes) / _KIB / (done or 1)
    flushes = count("flushes")
    rates["f/s"], waits["f_await"] = flushes / elapsed_s, count("flush_ms") / (flushes or 1)
    last = {
        "aqu-sz": count("queued_ms") / 1000 / elapsed_s,
        "util": min(100.0, count("busy_ms") / 10 / elapsed_s),
    }
    values = {**rates, **merged, **waits, **sizes, **last}
    return {"disk_device": name, **{key: round(value, 2) for key, value in values.items()}}
