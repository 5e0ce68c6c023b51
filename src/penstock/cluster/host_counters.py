"""The kernel counters of a host during a run, and which of them cover the bytes of a storage location.

They are read from `/proc` and `/sys` once a second; tests replace their root.

Invariants: a sample has only integers that the kernel itself counts, so that the difference of two samples is
what happened between them on the whole host; the sampler keeps one sample in memory, and if it fails, the run
does not fail but reports this at its end.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from penstock.cluster.comm import format_cause
from penstock.cluster.facts.read_host import find_mount
from penstock.results.provenance import read_meminfo
from penstock.storage import Storage
from penstock.storage.capabilities import SupportsEndpoints, find_local_root, unwrap
from penstock.storage.volumes import nearest_folder

logger = logging.getLogger(__name__)

ROOT: Final = Path("/")
_SECTOR_BYTES: Final = 512
_IB_WORD_BYTES: Final = 4
"""InfiniBand ports count words of four bytes, whatever the width of their link."""
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
"""The fields of a line of `/proc/diskstats`, in order. Older kernels have only the first of them."""
_CPU: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHardware:
    """The devices of a host that transfer bytes: whole drives, network interfaces and InfiniBand ports.

    `boot_id` identifies the machine, whose drives all its containers share; "" if unknown.
    """

    boot_id: str
    drives: tuple[str, ...]
    nics: tuple[str, ...]
    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """All counters at one time of CLOCK_MONOTONIC, under names like `disk.vda.read_bytes`."""

    monotonic_ns: int
    values: Mapping[str, int]


def find_hardware(root: Path = ROOT) -> HostHardware:
    """Find the devices. Called once, before the first sample."""
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
    """Read the current counters. Raises `OSError` if there is no `/proc`.

    Counters that this kernel lacks are left out.
    """
    monotonic_ns = time.monotonic_ns()
    # The sums of all CPUs, which the kernel counts in ticks.
    tick_ms = 1000 // os.sysconf("SC_CLK_TCK")
    ticks = _text(root / "proc/stat").partition("\n")[0].split()[1:]
    values = {f"cpu.{name}_ms": int(count) * tick_ms for name, count in zip(_CPU, ticks, strict=False)}
    for name, size in read_meminfo(root / "proc").items():
        if name in _MEMORY:
            values[f"memory.{_MEMORY[name]}_bytes"] = int(size.split()[0]) * 1024
    # Drives, partitions and devices built on them. Those that were never used are left out.
    for line in _text(root / "proc/diskstats").splitlines():
        _, _, name, *fields = line.split()
        counts = dict(zip(_DRIVE, fields, strict=False))
        if name.startswith(_NO_DRIVES) or counts["reads"] == counts["writes"] == "0":
            continue
        for counter, count in counts.items():
            if counter:
                unit = _SECTOR_BYTES if counter.endswith("_bytes") else 1
                values[f"disk.{name}.{counter}"] = int(count) * unit
    # Physical interfaces, and the loopback interface, which carries the traffic of services on the same host.
    for line in _text(root / "proc/net/dev").splitlines()[2:]:
        name, _, sizes = line.partition(":")
        name = name.strip()
        if name in hardware.nics or name == "lo":
            fields = sizes.split()
            values[f"net.{name}.received_bytes"] = int(fields[0])
            values[f"net.{name}.sent_bytes"] = int(fields[8])
    # RDMA, which the counters of network interfaces do not include.
    for name in hardware.ports:
        device, _, port = name.partition("/")
        folder = root / "sys/class/infiniband" / device / "ports" / port / "counters"
        for counter, meaning in (("port_rcv_data", "received"), ("port_xmit_data", "sent")):
            if (folder / counter).is_file():
                values[f"ib.{name}.{meaning}_bytes"] = int(_text(folder / counter)) * _IB_WORD_BYTES
    return CounterSample(monotonic_ns=monotonic_ns, values=values)


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


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
        """The reason why sampling stopped; None while it runs."""

    def sample(self) -> CounterSample | None:
        """Take one more sample now; None if sampling has failed. Any thread may call this."""
        with self._lock:
            if self.failure is not None:
                return None
            try:
                sample = self._read()
                self._write(sample)
            except (OSError, ValueError, LookupError) as error:
                self.failure = format_cause(error)
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


# The counters that cover a storage location


_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "lustre", "beegfs", "ceph", "cifs", "smb3", "pvfs2", "orangefs", "afs", "gpfs"}
)
_POOLS: Final = frozenset({"btrfs", "zfs", "bcachefs"})
"""File systems that span several drives and have their own device number."""
_MEMORY_KINDS: Final = frozenset({"tmpfs", "ramfs"})
_IN_MEMORY: Final = ("loop", "ram", "zram")
"""Devices backed by files or memory, so the bytes that they count may have come from RAM."""

Watched = Literal["device", "drives", "network", "client", "memory", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterCoverage:
    """The counters to read: of one device, drives, networks, a client's networks and caches, or none.

    For a file system in memory, it is certain that no device transfers a byte, so there is nothing to read.
    """

    watched: Watched
    device: str = ""
    reason: str = ""


def find_coverage(storage: Storage, *, proc: Path = Path("/proc")) -> CounterCoverage:
    """Find the counters of this host that cover the storage's bytes. Called once, before a run.

    If it is not certain that any counter does, the result is "nothing", with the reason.
    """
    if isinstance(unwrap(storage), SupportsEndpoints):
        return CounterCoverage(watched="network")
    root = find_local_root(storage)
    if root is None:
        return CounterCoverage(watched="nothing", reason=f"{storage.uri} is on no device with counters")
    folder = nearest_folder(root).resolve()
    return find_device_coverage(folder, folder.stat().st_dev, proc=proc)


def find_device_coverage(folder: Path, device: int, *, proc: Path) -> CounterCoverage:
    """Find the counters for a folder on the file system with device number `device`."""
    if os.major(device):
        numbers = [str(os.major(device)), str(os.minor(device))]
        lines = map(str.split, _text(proc / "diskstats").splitlines())
        name = next((fields[2] for fields in lines if fields[:2] == numbers), "")
        if name.startswith(_IN_MEMORY):
            return CounterCoverage(watched="nothing", reason=f"{name} is backed by a file or by memory")
        if not name:
            return CounterCoverage(watched="nothing", reason=f"device {':'.join(numbers)} has no counters")
        return CounterCoverage(watched="device", device=name)
    mount = find_mount(folder, proc)
    kind = mount.kind if mount else "an unknown file system"
    if kind in _NETWORK:
        return CounterCoverage(watched="client")
    if kind in _POOLS:
        return CounterCoverage(watched="drives")
    if kind in _MEMORY_KINDS:
        return CounterCoverage(watched="memory")
    return CounterCoverage(watched="nothing", reason=f"{kind} at {folder} is on no device with counters")
