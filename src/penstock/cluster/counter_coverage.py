"""Which of a host's counters cover the bytes of a storage, determined once before a run.

Invariant: where it is not certain that counters cover a storage, the answer is "nothing", with the reason.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from penstock.storage import Storage
from penstock.storage.capabilities import SupportsEndpoints, find_local_root, unwrap
from penstock.storage.volumes import nearest_folder

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "lustre", "beegfs", "ceph", "cifs", "smb3", "pvfs2", "orangefs", "afs", "gpfs"}
)
_POOLS: Final = frozenset({"btrfs", "zfs", "bcachefs"})
"""File systems over several drives, under a device number of their own."""
_IN_MEMORY: Final = ("loop", "ram", "zram")
"""Devices backed by files or memory: what they count may have come from RAM."""

Watched = Literal["device", "drives", "network", "client", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterCoverage:
    """The counters to read: of one device, drives, networks, a client's networks and caches, or none."""

    watched: Watched
    device: str = ""
    reason: str = ""


def find_coverage(storage: Storage, *, proc: Path = Path("/proc")) -> CounterCoverage:
    """Which counters of this host cover the storage's bytes."""
    if isinstance(unwrap(storage), SupportsEndpoints):
        return CounterCoverage(watched="network")
    root = find_local_root(storage)
    if root is None:
        return _nothing(f"{storage.uri} is on no device with counters")
    folder = nearest_folder(root).resolve()
    return find_device_coverage(folder, folder.stat().st_dev, proc=proc)


def find_device_coverage(folder: Path, device: int, *, proc: Path) -> CounterCoverage:
    """The same for a folder on the file system with device number `device`."""
    if os.major(device):
        return _of_block_device(device, proc / "diskstats")
    kind = _kind_of(folder, proc / "self/mountinfo")
    if kind in _NETWORK:
        return CounterCoverage(watched="client")
    if kind in _POOLS:
        return CounterCoverage(watched="drives")
    return _nothing(f"{kind} at {folder} is on no device with counters")


def _of_block_device(device: int, diskstats: Path) -> CounterCoverage:
    numbers = [str(os.major(device)), str(os.minor(device))]
    for line in diskstats.read_text(encoding="ascii", errors="replace").splitlines():
        fields = line.split()
        if fields[:2] == numbers:
            name = fields[2]
            if name.startswith(_IN_MEMORY):
                return _nothing(f"{name} is backed by a file or by memory")
            return CounterCoverage(watched="device", device=name)
    return _nothing(f"device {':'.join(numbers)} has no counters")


def _kind_of(folder: Path, mountinfo: Path) -> str:
    """The type of the innermost mount; of several on one folder the last."""
    kind_found, depth = "an unknown file system", -1
    for mounted, mount_kind in _mounts(mountinfo):
        if folder.is_relative_to(mounted) and len(mounted.parts) >= depth:
            kind_found, depth = mount_kind, len(mounted.parts)
    return kind_found


def _mounts(mountinfo: Path) -> Iterator[tuple[Path, str]]:
    for line in mountinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, source = line.partition(" - ")
        yield Path(mount.split(" ")[4].replace("\\040", " ")), source.split(" ")[0]


def _nothing(reason: str) -> CounterCoverage:
    return CounterCoverage(watched="nothing", reason=reason)
