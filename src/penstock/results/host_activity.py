"""What a run's hosts did in each of its phases: the counters' growth between the phases' edges.

Pure: two tables in, figures out. Both use the host's own CLOCK_MONOTONIC, so their times compare. Invariant:
between two samples a counter is assumed to grow evenly, outside of them not at all.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.results.arrow_columns import read_numbers
from penstock.results.counter_files import SampledHost
from penstock.results.step_events import RankEvents, SpanEvent, SpanKind

Numbers = NDArray[np.float64]

_IDLE: Final = ("cpu.idle_ms", "cpu.iowait_ms")
_WORDS: Final = {SpanKind.EPOCH: "epoch", SpanKind.SAVE: "save", SpanKind.LOAD: "load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseActivity:
    """One phase over all hosts. `cpu_busy_share` is their mean, None where no time was counted."""

    phase: str
    hosts: int
    elapsed_s: float
    cpu_busy_share: float | None
    drives_read_bytes: int
    drives_written_bytes: int
    networks_received_bytes: int
    networks_sent_bytes: int


def summarize_activity(
    hosts: Sequence[SampledHost], counters: pa.Table, events: Sequence[RankEvents]
) -> tuple[PhaseActivity, ...]:
    """The phases in the order in which they began: checkpoints where there are any, else epochs."""
    ranks = {rank.clock.rank: rank for rank in events}
    by_phase: dict[str, list[tuple[float, Mapping[str, float], SampledHost]]] = defaultdict(list)
    machines: set[str] = set()
    for host in hosts:
        if host.rank not in ranks:
            continue
        series = _Series(counters, host.host)
        # Hosts on one machine share its drives, which count under the first host alone.
        counted = replace(host, drives=()) if host.boot_id in machines else host
        machines |= {host.boot_id} - {""}
        for span in _phases(ranks[host.rank]):
            growth = series.growth(span.start_ns, span.end_ns)
            by_phase[_format_phase(span)].append(((span.end_ns - span.start_ns) / 1e9, growth, counted))
    return tuple(_sum_hosts(phase, samples) for phase, samples in by_phase.items())


def _phases(events: RankEvents) -> list[SpanEvent]:
    checkpoints = list(events.spans_of(SpanKind.SAVE, SpanKind.LOAD))
    return checkpoints or list(events.spans_of(SpanKind.EPOCH))


def _format_phase(span: SpanEvent) -> str:
    kind = SpanKind(span.kind)
    return f"{_WORDS[kind]} {span.epoch if kind is SpanKind.EPOCH else span.step}"


def _sum_hosts(
    phase: str, samples: Sequence[tuple[float, Mapping[str, float], SampledHost]]
) -> PhaseActivity:
    def total(prefix: str, ending: str) -> int:
        return round(
            sum(
                value
                for _, growth, host in samples
                for counter, value in growth.items()
                if counter.startswith(prefix)
                and counter.endswith(ending)
                # Partitions and volumes would count their drives' bytes a second time.
                and (prefix != "disk." or counter.removeprefix(prefix).removesuffix(ending) in host.drives)
            )
        )

    busy = [share for _, growth, _ in samples if (share := _busy_share(growth)) is not None]
    return PhaseActivity(
        phase=phase,
        hosts=len(samples),
        elapsed_s=max(elapsed_s for elapsed_s, _, _ in samples),
        cpu_busy_share=sum(busy) / len(busy) if busy else None,
        drives_read_bytes=total("disk.", ".read_bytes"),
        drives_written_bytes=total("disk.", ".written_bytes"),
        networks_received_bytes=total("net.", ".received_bytes") + total("ib.", ".received_bytes"),
        networks_sent_bytes=total("net.", ".sent_bytes") + total("ib.", ".sent_bytes"),
    )


def _busy_share(growth: Mapping[str, float]) -> float | None:
    whole = sum(value for counter, value in growth.items() if counter.startswith("cpu."))
    idle = sum(growth.get(counter, 0.0) for counter in _IDLE)
    return (whole - idle) / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """One host between moments: its CPU's busy share, and bytes a second of its drives and networks."""

    cpu_busy_share: Numbers
    drives_read: Numbers
    drives_written: Numbers
    networks_received: Numbers
    networks_sent: Numbers


def host_rates(host: SampledHost, counters: pa.Table, edges_ns: Numbers) -> HostRates:
    """What a host did between neighbouring edges, moments of its CLOCK_MONOTONIC; NaN is not counted."""
    growth = {name: np.diff(values) for name, values in _Series(counters, host.host).at(edges_ns).items()}
    whole = _total(growth, "cpu.", len(edges_ns) - 1)
    idle = sum((growth.get(name, np.zeros(1)) for name in _IDLE), np.zeros(len(edges_ns) - 1))
    spans_s = np.diff(edges_ns) / 1e9
    drives = {name: values for name, values in growth.items() if name.split(".")[1] in host.drives}

    def network(ending: str) -> Numbers:
        sums = (_total(growth, prefix, len(spans_s), ending) for prefix in ("net.", "ib."))
        return sum(sums, np.zeros(len(spans_s))) / spans_s

    with np.errstate(invalid="ignore"):
        busy = (whole - idle) / np.where(whole > 0, whole, np.nan)
    return HostRates(
        cpu_busy_share=busy,
        drives_read=_total(drives, "disk.", len(spans_s), ".read_bytes") / spans_s,
        drives_written=_total(drives, "disk.", len(spans_s), ".written_bytes") / spans_s,
        networks_received=network(".received_bytes"),
        networks_sent=network(".sent_bytes"),
    )


def _total(growth: Mapping[str, Numbers], prefix: str, length: int, ending: str = "") -> Numbers:
    chosen = (values for name, values in growth.items() if name.startswith(prefix) and name.endswith(ending))
    return sum(chosen, np.zeros(length))


class _Series:
    """One host's counters, each at every moment of a sample."""

    def __init__(self, counters: pa.Table, host: str) -> None:
        hosts = counters["host"].unify_dictionaries().combine_chunks()
        names = counters["counter"].unify_dictionaries().combine_chunks()
        known = hosts.dictionary.to_pylist()
        of_host = read_numbers(hosts.indices) == (known.index(host) if host in known else -1)
        moments = read_numbers(counters["monotonic_ns"])[of_host]
        values = read_numbers(counters["value"])[of_host]
        numbers = read_numbers(names.indices)[of_host]
        self._moments = np.unique(moments)
        self._values: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
        for number in np.unique(numbers).tolist():
            name = names.dictionary[number].as_py()
            if name.startswith(("cpu.", "disk.", "net.", "ib.")) and not name.startswith("net.lo."):
                of_name = numbers == number
                # A counter has rows only where it changed: in between it keeps its last value.
                latest = np.searchsorted(moments[of_name], self._moments, side="right") - 1
                self._values[name] = values[of_name][np.maximum(latest, 0)].astype(np.float64)

    def at(self, moments_ns: Any) -> dict[str, Numbers]:
        """Each counter at these moments."""
        return {name: np.interp(moments_ns, self._moments, values) for name, values in self._values.items()}

    def growth(self, start_ns: int, end_ns: int) -> dict[str, float]:
        """How much each counter grew from one moment to another."""
        return {name: float(after - before) for name, (before, after) in self.at((start_ns, end_ns)).items()}
