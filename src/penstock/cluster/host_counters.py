"""The kernel counters of a host during a run: read from `/proc` and `/sys`, once a second.

Tests replace the root. Invariants: a sample holds only integers that the kernel counts by itself, so that the
difference of two samples is what happened between them on the whole host; the sampler keeps one sample in
memory, and its failure does not fail the run but is reported at the end.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path("/")
_SECTOR_BYTES: Final = 512
_IB_WORD_BYTES: Final = 4
"""InfiniBand's ports count words of four bytes, whatever their width."""
_NO_DRIVES: Final = ("loop", "ram", "zram", "sr", "fd")
_MEMORY: Final = {
    "MemFree": "free", "MemAvailable": "available", "Cached": "cached", "Dirty": "dirty",
    "Writeback": "writeback",
}  # fmt: skip
_DRIVE: Final = (
    "reads", "merged_reads", "read_bytes", "read_ms", "writes", "merged_writes", "written_bytes", "write_ms",
    "", "busy_ms", "queued_ms", "discards", "merged_discards", "discarded_bytes", "discard_ms", "flushes",
    "flush_ms",
)  # fmt: skip
"""The fields of a line of `/proc/diskstats` in their order; older kernels end earlier."""
_CPU: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHardware:
    """The devices of a host that move bytes: whole drives, network interfaces and InfiniBand ports.

    `boot_id` identifies the machine, "" if unknown: its containers share its drives.
    """

    boot_id: str
    drives: tuple[str, ...]
    nics: tuple[str, ...]
    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """All counters at one moment of CLOCK_MONOTONIC, by names like `disk.vda.read_bytes`."""

    monotonic_ns: int
    values: Mapping[str, int]


def find_hardware(root: Path = ROOT) -> HostHardware:
    """Find the devices; once, before the first sample."""
    boot_id = root / "proc/sys/kernel/random/boot_id"
    return HostHardware(
        boot_id=_text(boot_id).strip() if boot_id.is_file() else "",
        drives=tuple(
            name for name in _names(root / "sys/block") if not name.startswith((*_NO_DRIVES, "dm-", "md"))
        ),
        nics=tuple(
            name
            for name in _names(root / "sys/class/net")
            if (root / "sys/class/net" / name / "device").exists()
        ),
        ports=tuple(
            f"{device}/{port}"
            for device in _names(root / "sys/class/infiniband")
            for port in _names(root / "sys/class/infiniband" / device / "ports")
        ),
    )


def read_sample(hardware: HostHardware, root: Path = ROOT) -> CounterSample:
    """The counters now. `OSError` without `/proc`; counters that this kernel lacks are left out."""
    monotonic_ns = time.monotonic_ns()
    values = dict(_processors(_text(root / "proc/stat")))
    values.update(_memory(_text(root / "proc/meminfo")))
    values.update(_drives(_text(root / "proc/diskstats")))
    values.update(_networks(_text(root / "proc/net/dev"), hardware))
    values.update(_ports(root / "sys/class/infiniband", hardware))
    return CounterSample(monotonic_ns=monotonic_ns, values=values)


def _processors(text: str) -> Iterator[tuple[str, int]]:
    """The sums of all processors, in milliseconds; the kernel counts ticks."""
    ticks = text.partition("\n")[0].split()[1:]
    tick_ms = 1000 // os.sysconf("SC_CLK_TCK")
    for name, count in zip(_CPU, ticks, strict=False):
        yield f"cpu.{name}_ms", int(count) * tick_ms


def _memory(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in _MEMORY:
            yield f"memory.{_MEMORY[name]}_bytes", int(value.split()[0]) * 1024


def _drives(text: str) -> Iterator[tuple[str, int]]:
    """Drives, partitions and devices made of them; those that were never used are left out."""
    for line in text.splitlines():
        _, _, name, *fields = line.split()
        counts = dict(zip(_DRIVE, fields, strict=False))
        if name.startswith(_NO_DRIVES) or counts["reads"] == counts["writes"] == "0":
            continue
        for counter, count in counts.items():
            if counter:
                unit = _SECTOR_BYTES if counter.endswith("_bytes") else 1
                yield f"disk.{name}.{counter}", int(count) * unit


def _networks(text: str, hardware: HostHardware) -> Iterator[tuple[str, int]]:
    """Physical interfaces, and the loopback, which shows services on the same host."""
    for line in text.splitlines()[2:]:
        name, _, counts = line.partition(":")
        name = name.strip()
        if name in hardware.nics or name == "lo":
            fields = counts.split()
            yield f"net.{name}.received_bytes", int(fields[0])
            yield f"net.{name}.sent_bytes", int(fields[8])


def _ports(folder: Path, hardware: HostHardware) -> Iterator[tuple[str, int]]:
    """RDMA, which network interfaces do not count."""
    for name in hardware.ports:
        device, _, port = name.partition("/")
        counters = folder / device / "ports" / port / "counters"
        for counter, meaning in (("port_rcv_data", "received"), ("port_xmit_data", "sent")):
            if (counters / counter).is_file():
                yield f"ib.{name}.{meaning}_bytes", int(_text(counters / counter)) * _IB_WORD_BYTES


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace")


logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0


class CounterSampler:
    """Calls `read` every `interval_s` and passes each sample to `write`, in order and one at a time."""

    def __init__(
        self,
        read: Callable[[], CounterSample],
        write: Callable[[CounterSample], None],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._read = read
        self._write = write
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="counters", daemon=True)
        self.failure: str | None = None
        """Why sampling stopped; None while it runs."""

    def sample(self) -> CounterSample | None:
        """Take one more sample now; None once sampling has failed. Any thread may call."""
        with self._lock:
            if self.failure is not None:
                return None
            try:
                sample = self._read()
                self._write(sample)
            except (OSError, ValueError, LookupError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("Host counters are no longer sampled: %s", self.failure)
                return None
        return sample

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.sample()

    def _work(self) -> None:
        while not self._ends.wait(self._interval_s) and self.failure is None:
            self.sample()
