"""Counts what devices move during a run, and reconciles it with what the run says it moved.

One sampler per host, in the process of its lowest rank. A host whose counters cannot be read makes the result
"not checked", never a failed run.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from penstock.cluster import host_counters
from penstock.cluster.comm import Comm
from penstock.cluster.host_counters import CounterCoverage, find_coverage
from penstock.results.counter_files import (
    CounterSpool,
    Direction,
    HostTraffic,
    IoReconciliation,
    SampledHost,
    reconcile,
)
from penstock.storage import Storage

ROOT: Final = Path("/")
_NO_HARDWARE: Final = host_counters.HostHardware(boot_id="", drives=(), nics=(), ports=())


class DeviceObserver:
    """One rank's part: the lowest rank of each host samples its counters, the others only take part."""

    def __init__(self, comm: Comm, run_folder: Path, storage: Storage, *, root: Path = ROOT) -> None:
        """Collective."""
        self._comm = comm
        self._moved: dict[Direction, Counter[str]] = {"read": Counter(), "write": Counter()}
        self._failure: str | None = None
        self._hardware = _NO_HARDWARE
        self._coverage = CounterCoverage(watched="nothing", reason="it was not looked at")
        self._sampler: host_counters.CounterSampler | None = None
        self._resources = ExitStack()
        hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
        self._samples = hosts.index(comm.host) == comm.rank
        if self._samples:
            try:
                self._begin(run_folder, storage, root)
            except (OSError, ValueError, LookupError) as error:
                self._failure = f"{type(error).__name__}: {error}"

    def _begin(self, run_folder: Path, storage: Storage, root: Path) -> None:
        self._coverage = find_coverage(storage, proc=root / "proc")
        hardware = self._hardware = host_counters.find_hardware(root)
        host = SampledHost(
            host=self._comm.host,
            rank=self._comm.rank,
            boot_id=hardware.boot_id,
            drives=hardware.drives,
            interval_s=host_counters.INTERVAL_S,
            wall_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
        )
        # Entered first, left last: the sampler writes a last sample when it stops.
        spool = self._resources.enter_context(CounterSpool(run_folder, host))
        self._sampler = self._resources.enter_context(
            host_counters.CounterSampler(lambda: host_counters.read_sample(hardware, root), spool.append)
        )

    @contextmanager
    def during(self, direction: Direction) -> Iterator[None]:
        """Attribute what devices move while the block runs to `direction`."""
        before = self._sampler.sample() if self._sampler else None
        yield
        after = self._sampler.sample() if self._sampler else None
        if before is not None and after is not None:
            self._moved[direction].update(
                {name: after.values[name] - before.values.get(name, 0) for name in after.values}
            )

    def deliver(self, direction: Direction, application_bytes: int) -> IoReconciliation:
        """Compare devices' bytes with the application's; `application_bytes` are this rank's. Collective."""
        sampler_failure = self._sampler.failure if self._sampler else None
        mine = HostTraffic(
            host=self._comm.host,
            coverage=self._coverage,
            hardware=self._hardware,
            moved=dict(self._moved[direction]),
            failure=self._failure or sampler_failure,
        )
        reports = self._comm.gather(
            (application_bytes, mine if self._samples else None), awaiting="what all hosts counted"
        )
        hosts = [traffic for _, traffic in reports if traffic is not None]
        return reconcile(direction, sum(size_bytes for size_bytes, _ in reports), hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Sample once more, and stop."""
        self._resources.close()
