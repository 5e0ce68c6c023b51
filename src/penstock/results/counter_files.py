"""The counters of a run's hosts over time, and what they show about the bytes that the run transferred.

While the run lasts, the counters are in spools, and afterwards in one `counters.parquet`. A spool has a JSON
line about its host, then one line for each sample, with its time and the counters that have changed since the
previous sample. The table has one row for each changed counter. Times are nanoseconds of the host's
CLOCK_MONOTONIC, as in steps and spans, and can therefore be compared with these. Invariants: neither writing
nor gathering a spool holds all samples in memory; a counter is assumed to grow evenly between two samples,
and not at all before the first and after the last. If phases cover only a part of the time between two
samples, all growth is theirs, because a run transfers its bytes within its phases.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.cluster.host_counters import CounterCoverage, CounterSample, HostHardware
from penstock.errors import ObjectNotFound
from penstock.results.parquet_tables import WORDS, Spool, open_table, publishing_table, read_spool_header
from penstock.results.step_events import RankEvents, SpanKind
from penstock.storage.files.local_files import open_to_read, parse_json
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import MOST_BYTES
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

FOLDER: Final = "counters"
COUNTERS_FILE: Final = "counters.parquet"
FORMAT_VERSION: Final = 1
"""Incremented whenever a column or a counter is renamed or changes its meaning."""
_BATCH: Final = 50_000
"""The minimum number of rows of a record batch."""
_COLUMNS: Final = {"host": WORDS, "monotonic_ns": pa.int64(), "counter": WORDS, "value": pa.int64()}

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledHost:
    """A host whose counters are recorded, its drives (not partitions), and one moment on both of its clocks.

    `boot_id` identifies the machine ("" if unknown): hosts on one machine have the same drives.
    """

    host: str
    rank: int
    boot_id: str
    drives: Sequence[str]
    interval_s: float
    wall_ns: int
    monotonic_ns: int


class CounterSpool(Spool):
    """One host's samples, while the run lasts."""

    def __init__(self, run_folder: Path, host: SampledHost) -> None:
        super().__init__(spool_path(run_folder, host.rank), {"format": FORMAT_VERSION, **asdict(host)})
        self._before: Mapping[str, int] = {}

    def append(self, sample: CounterSample) -> None:
        """Append the counters that have changed since the last sample; if none has changed, append all.

        Otherwise, the table would lack the sample, and later growth would seem to begin before it.
        """
        before = self._before
        changed = {name: value for name, value in sample.values.items() if before.get(name) != value}
        line = json.dumps(
            {"t": sample.monotonic_ns, "c": changed or {**sample.values}}, separators=(",", ":")
        )
        self.write(line.encode() + b"\n")
        self._before = sample.values


def spool_path(run_folder: Path, rank: int) -> Path:
    """Return the spool of the host whose lowest rank is `rank`."""
    return run_folder / FOLDER / f"{rank:06d}.jsonl"


def gather_counters(run_folder: Path) -> None:
    """Convert all hosts' spools to the table, and remove them. Only one rank calls this, after a barrier."""
    paths = sorted((run_folder / FOLDER).glob("*.jsonl"))
    if not paths:
        return
    hosts = [_read_host(path) for path in paths]
    header = {"format": FORMAT_VERSION, "hosts": [asdict(host) for host in hosts]}
    with publishing_table(run_folder, COUNTERS_FILE, _COLUMNS, header) as table:
        for path, host in zip(paths, hosts, strict=True):
            for batch in _batches(path, host.host, table.schema):
                table.write_batch(batch)
    for path in paths:
        path.unlink()
    (run_folder / FOLDER).rmdir()


def read_counters(run_folder: Path) -> tuple[list[SampledHost], pa.Table]:
    """Read all hosts' counters from the table, or from the spools of an active or interrupted run."""
    path = run_folder / COUNTERS_FILE
    if path.exists():
        file, header = open_table(path, "counters", FORMAT_VERSION)
        return [SampledHost(**host) for host in header["hosts"]], file.read()
    paths = sorted((run_folder / FOLDER).glob("*.jsonl"))
    if not paths:
        raise ObjectNotFound("This run has no sampled counters", uri=str(run_folder))
    hosts, schema = [_read_host(spool) for spool in paths], pa.schema(list(_COLUMNS.items()))
    batches = [
        batch
        for spool, host in zip(paths, hosts, strict=True)
        for batch in _batches(spool, host.host, schema)
    ]
    return hosts, pa.Table.from_batches(batches, schema).unify_dictionaries()


def _read_host(path: Path) -> SampledHost:
    return read_spool_header(path, SampledHost, what="counters", version=FORMAT_VERSION)


def _batches(path: Path, host: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all complete samples. If a line was cut off when its writer was killed, log a warning."""
    rows: list[tuple[int, str, int]] = []
    with translate_os_errors("Opening", str(path)), open_to_read(path) as file:
        file.readline(MOST_BYTES)
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b""), start=2):
            try:
                sample = parse_json(line)
                rows += [(sample["t"], name, value) for name, value in sample["c"].items()]
            except (ValueError, KeyError, TypeError, AttributeError):
                logger.warning("%s: line %d is torn, what follows is left out", path, number)
                break
            if len(rows) >= _BATCH:
                yield _batch(host, rows, schema)
                rows.clear()
    yield _batch(host, rows, schema)


def _batch(host: str, rows: Sequence[tuple[int, str, int]], schema: pa.Schema) -> pa.RecordBatch:
    moments, names, values = zip(*rows, strict=True) if rows else ((), (), ())
    hosts, words = (
        pa.array(column, pa.string()).dictionary_encode() for column in ([host] * len(rows), names)
    )
    columns = [hosts, pa.array(moments, pa.int64()), words, pa.array(values, pa.int64())]
    return pa.record_batch(columns, schema=schema)


HostRates = Mapping[str, Numbers]
"""One host's figures between successive times: its `cpu_busy_share`, and bytes per second as `drives_read`,
`drives_written`, `networks_received` and `networks_sent`.
"""


CounterSeries = tuple[NDArray[np.int64] | Numbers, dict[str, Numbers]]
"""The times of one host's samples, and its counters at each of them."""


def read_series(counters: pa.Table, host: str, *, from_zero: bool = False) -> CounterSeries:
    """Return the counters of one host's CPUs, drives and networks at the times of its samples.

    Before a counter first appears, it counts as its first value or, with `from_zero`, as 0.
    """
    hosts, names = (counters[name].unify_dictionaries().combine_chunks() for name in ("host", "counter"))
    known = hosts.dictionary.to_pylist()
    of_host = hosts.indices.to_numpy() == (known.index(host) if host in known else -1)
    moments, values = (counters[name].to_numpy()[of_host] for name in ("monotonic_ns", "value"))
    numbers, all_moments = names.indices.to_numpy()[of_host], np.unique(moments)
    series = {}
    for number in np.unique(numbers).tolist():
        name = names.dictionary[number].as_py()
        if name.startswith(("cpu.", "disk.", "net.", "ib.")) and not name.startswith("net.lo."):
            of_name = numbers == number
            # A counter has rows only where it changed; in between, it keeps its previous value.
            latest = np.searchsorted(moments[of_name], all_moments, side="right") - 1
            series[name] = values[of_name][np.maximum(latest, 0)].astype(np.float64)
            if from_zero:
                series[name][latest < 0] = 0.0
    return all_moments, series


def host_rates(host: SampledHost, series: CounterSeries, edges_ns: Numbers) -> HostRates:
    """Return one host's rates between successive edges (times of its CLOCK_MONOTONIC); NaN if unknown."""
    moments, values = series
    growth = {name: np.diff(np.interp(edges_ns, moments, of_name)) for name, of_name in values.items()}
    spans_s = np.diff(edges_ns) / 1e9

    def total(prefix: str, *endings: str) -> Numbers:
        # Partitions and volumes would count the bytes of their drives a second time.
        chosen = (
            values
            for name, values in growth.items()
            if name.startswith(prefix)
            and name.endswith(endings)
            and (prefix != "disk." or name.split(".")[1] in host.drives)
        )
        return sum(chosen, np.zeros(len(spans_s)))

    whole, idle = total("cpu.", ""), total("cpu.", ".idle_ms", ".iowait_ms")
    received = total("net.", ".received_bytes") + total("ib.", ".received_bytes")
    sent = total("net.", ".sent_bytes") + total("ib.", ".sent_bytes")
    with np.errstate(invalid="ignore"):
        busy = (whole - idle) / np.where(whole > 0, whole, np.nan)
        return {
            "cpu_busy_share": busy,
            "drives_read": total("disk.", ".read_bytes") / spans_s,
            "drives_written": total("disk.", ".written_bytes") / spans_s,
            "networks_received": received / spans_s,
            "networks_sent": sent / spans_s,
        }


Phase = tuple[tuple[int, ...], int, int]
"""A phase of a rank, or a part of one: its kind, epoch, block and step; its beginning, and its end."""


def _phases(rank: RankEvents) -> list[Phase]:
    """Return the parts of each epoch between its checkpoints, and the checkpoints, in order of time."""
    checkpoints = list(rank.spans_of(SpanKind.SAVE, SpanKind.LOAD))
    blocks, epochs = list(rank.spans_of(SpanKind.BLOCK)), list(rank.spans_of(SpanKind.EPOCH))
    if checkpoints and not blocks:  # a run without training
        epochs = []
    ended = {span.epoch for span in epochs}
    phases: list[Phase] = [(span.place, span.start_ns, span.end_ns) for span in checkpoints]
    for span in (*epochs, *(block for block in blocks if block.epoch not in ended)):
        inner = [one for one in checkpoints if span.start_ns <= one.start_ns and one.end_ns <= span.end_ns]
        starts_ns = (span.start_ns, *(one.end_ns for one in inner))
        ends_ns = (*(one.start_ns for one in inner), span.end_ns)
        phases += [((SpanKind.EPOCH, span.epoch), *part) for part in zip(starts_ns, ends_ns, strict=True)]
    return sorted((phase for phase in phases if phase[2] > phase[1]), key=lambda phase: phase[1])


def summarize_activity(
    hosts: Sequence[SampledHost], counters: pa.Table, events: Sequence[RankEvents]
) -> list[dict[str, Any]]:
    """Sum up all hosts' counters in each phase: each checkpoint, and the rest of each epoch.

    Steps are numbered within their epoch, so if there are several epochs, a checkpoint's name includes its
    epoch. `cpu_busy_share` is the mean over hosts, None if no time was counted.
    """
    ranks = {rank.clock.rank: rank for rank in events}
    by_phase: dict[tuple[int, ...], list[tuple[Numbers, HostRates]]] = defaultdict(list)
    machines: set[str] = set()
    for host in hosts:
        phases = _phases(ranks[host.rank]) if host.rank in ranks else ()
        if not phases:
            continue
        # Hosts on one machine share its drives, which count only for the first host.
        counted = replace(host, drives=()) if host.boot_id in machines else host
        machines |= {host.boot_id} - {""}
        # Time and growth outside phases are left out, so that phases adjoin.
        borders_ns = np.array([times for _, *times in phases], np.float64)
        spans_ns = np.diff(borders_ns)
        edges_ns = np.concatenate([[0.0], np.cumsum(spans_ns)])
        moments, values = read_series(counters, host.host)
        within_ns = np.interp(moments, borders_ns.ravel(), np.repeat(edges_ns, 2)[1:-1])
        is_within = np.diff(within_ns, prepend=within_ns[:1]) > 0
        grown = {
            name: np.cumsum(np.diff(of_name, prepend=of_name[0]) * is_within)
            for name, of_name in values.items()
        }
        rates = host_rates(counted, (within_ns, grown), edges_ns)
        for place in dict.fromkeys(place for place, *_ in phases):
            chosen = [one == place for one, *_ in phases]
            of_phase = {what: of_what[chosen] for what, of_what in rates.items()}
            by_phase[place].append((spans_ns.ravel()[chosen] / 1e9, of_phase))
    activities = []
    of_epoch = " of epoch {}" if len({epoch for _, epoch, *_ in by_phase}) > 1 else ""
    for (kind, epoch, *rest), by_host in by_phase.items():
        checkpoint = f"{SpanKind(kind).name.lower()} {rest[-1]}{of_epoch.format(epoch)}" if rest else ""
        busy = []
        for spans_s, rates in by_host:
            shares = rates["cpu_busy_share"]
            is_known = ~np.isnan(shares)
            if is_known.any():
                busy.append(float(np.average(shares[is_known], weights=spans_s[is_known])))
        moved = {
            f"{what}_bytes": round(sum(float(spans_s @ rates[what]) for spans_s, rates in by_host))
            for what in ("drives_read", "drives_written", "networks_received", "networks_sent")
        }
        activities.append(
            {
                "phase": checkpoint or f"epoch {epoch}",
                "hosts": len(by_host),
                "elapsed_s": max(float(spans_s.sum()) for spans_s, _ in by_host),
                "cpu_busy_share": fmean(busy) if busy else None,
                **moved,
            }
        )
    return activities


# Reconcile the bytes that devices and networks transferred with those that the application counted. Device
# counters include every process, so they can prove that bytes came from memory instead of a device, but never
# that all bytes came from the device. Storage that no counter covers is "not checked", with the reason.

LEAST_SHARE: Final = 0.9
"""If devices and networks moved a lower share of the bytes, some bytes came from elsewhere. Otherwise, the
share is near or above 1, because devices transfer whole blocks, and networks add headers.
"""
LEAST_BYTES: Final = 1 << 20
"""Fewer bytes cannot be distinguished from a host's other reads and traffic."""

Direction = Literal["read", "write"]
_DISK: Final[Mapping[Direction, str]] = {"read": "read_bytes", "write": "written_bytes"}
_NETWORK: Final[Mapping[Direction, str]] = {"read": "received_bytes", "write": "sent_bytes"}


class ReconciliationVerdict(StrEnum):
    """The verdict on whether bytes passed through devices.

    Missing bytes fail a read, because they came from memory.
    """

    PASS = "pass"  # noqa: S105 - no secret
    WARNING = "warning"
    FAIL = "fail"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class IoReconciliation:
    """The bytes that all ranks transferred in one direction, and that all hosts' devices and networks moved.

    `by` has the bytes of each host and device. `delivered_bytes` is None if no counter covers the storage.
    """

    direction: Direction
    application_bytes: int
    delivered_bytes: int | None
    by: Mapping[str, int]
    verdict: ReconciliationVerdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """The counts of one host during the application's transfers.

    `failure` is the reason if the host could not count.
    """

    host: str
    coverage: CounterCoverage
    hardware: HostHardware
    moved: Mapping[str, int]
    failure: str | None = None


def reconcile(direction: Direction, application_bytes: int, hosts: Sequence[HostTraffic]) -> IoReconciliation:
    """Compare the application's bytes with those of the hosts' devices and networks."""
    uncovered = {
        host.host: host.failure or host.coverage.reason
        for host in hosts
        if host.failure is not None or host.coverage.watched == "nothing"
    }
    is_covered = bool(hosts) and not uncovered
    by: dict[str, int] = {}
    drives: set[tuple[str, str]] = set()
    for host in hosts if is_covered else ():
        watched, hardware = host.coverage.watched, host.hardware
        counters: dict[str, str] = {}
        if watched in ("network", "client"):
            counters |= {name: f"net.{name}.{_NETWORK[direction]}" for name in hardware.nics}
            counters |= {name: f"ib.{name}.{_NETWORK[direction]}" for name in hardware.ports}
        # Clients of network file systems may keep a cache on local drives.
        shared = {"device": (host.coverage.device,), "drives": hardware.drives, "client": hardware.drives}
        for name in shared.get(watched, ()):
            # Hosts on one machine share its drives, which count once.
            if (hardware.boot_id or host.host, name) not in drives:
                drives.add((hardware.boot_id or host.host, name))
                counters[name] = f"disk.{name}.{_DISK[direction]}"
        by |= {
            f"{host.host} {name}": size_bytes
            for name, counter in counters.items()
            if (size_bytes := host.moved.get(counter, 0))
        }
    delivered_bytes = sum(by.values())
    loopback_bytes = sum(host.moved.get(f"net.lo.{_NETWORK[direction]}", 0) for host in hosts)
    is_network = any(host.coverage.watched in ("network", "client") for host in hosts)
    moved = (
        f"devices and networks moved {format_bytes(delivered_bytes)} "
        f"while the application moved {format_bytes(application_bytes)}"
    )
    verdict = ReconciliationVerdict.NOT_CHECKED
    if not is_covered:
        why = "; ".join(f"{host}: {reason}" for host, reason in uncovered.items()) or "no host counted"
    elif application_bytes < LEAST_BYTES:
        why = f"only {format_bytes(application_bytes)}: too few to tell apart from other traffic of the hosts"
    elif delivered_bytes >= LEAST_SHARE * application_bytes:
        verdict, why = ReconciliationVerdict.PASS, moved
    elif is_network and loopback_bytes >= LEAST_SHARE * application_bytes:
        why = "the service runs on the ranks' own hosts: its bytes came over the loopback"
    elif direction == "read":
        verdict = ReconciliationVerdict.FAIL
        why = f"{moved}: the rest was served from the page cache, or other RAM"
    else:
        verdict = ReconciliationVerdict.WARNING
        why = f"{moved}: the rest had not reached them when the write ended"
    return IoReconciliation(
        direction=direction,
        application_bytes=application_bytes,
        delivered_bytes=delivered_bytes if is_covered else None,
        by=by,
        verdict=verdict,
        why=why,
    )
