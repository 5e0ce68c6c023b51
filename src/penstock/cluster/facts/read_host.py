"""Read the facts of this machine from `/proc`, `/sys` and `/etc`, below a root that tests replace.

`python -m penstock.cluster.facts.read_host` is the agent, which runs once on every host and prints the facts.
Invariants: a fact that cannot be read is None, and `unread` has the reason; nothing is guessed, and an
unreadable file does not affect other facts. Only listed settings and variables are reported, and never a
value whose name or form suggests a secret.
"""

import ctypes
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Final, Literal, TypeVar

from penstock import __version__
from penstock.cluster.comm import format_cause
from penstock.cluster.facts.host_facts import (
    Clock,
    Cpu,
    Drive,
    HostReport,
    Mount,
    Nic,
    NumaNode,
    frame_document,
)
from penstock.environment import Environment, process_environment, user_settings
from penstock.results.provenance import (
    PROC,
    memory_bytes,
    package_versions,
    parse_pairs,
    read_meminfo,
    redact_variables,
    redact_word,
)

OPEN_FILES: Final = "open files"
PROCESSES: Final = "processes"
LOCKED_BYTES: Final = "locked bytes"
BYTES_OF_A_FILE: Final = "bytes of a file"

_KINDS: Final = {
    OPEN_FILES: resource.RLIMIT_NOFILE,
    PROCESSES: resource.RLIMIT_NPROC,
    LOCKED_BYTES: resource.RLIMIT_MEMLOCK,
    BYTES_OF_A_FILE: resource.RLIMIT_FSIZE,
}


def soft_limits() -> dict[str, int | None]:
    """Return the soft limits of this process; None means no limit."""
    soft = {name: resource.getrlimit(kind)[0] for name, kind in _KINDS.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


Fact = TypeVar("Fact")

ROOT: Final = Path("/")
_SECTOR_BYTES = 512
"""The unit of sizes below `/sys/block`, whatever the drive's sector size is."""

_NO_DRIVES = ("loop", "dm-", "zram", "ram", "sr", "fd", "md", "nbd")
_STATE_KINDS = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs"),
        *("efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "overlay", "proc", "pstore", "ramfs"),
        *("rpc_pipefs", "securityfs", "selinuxfs", "squashfs", "sysfs", "tmpfs", "tracefs"),
    }
)
"""File systems that hold no data sets: the kernel's state, memory, and container images."""

_NIC_KINDS: Final[dict[str, Literal["ethernet", "infiniband"]]] = {"1": "ethernet", "32": "infiniband"}
_DMI = ("sys_vendor", "product_name", "board_name", "bios_version", "bios_date")
"""The vendor and model, without serial numbers. Virtual machines may have none."""
_PACKAGES = ("mpi4py", "torch", "numpy")

SYSCTLS = (
    "fs.aio-max-nr",
    "fs.file-max",
    "fs.nr_open",
    "kernel.io_uring_disabled",
    "kernel.numa_balancing",
    "kernel.shmall",
    "kernel.shmmax",
    "net.core.netdev_max_backlog",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_max",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "vm.dirty_background_bytes",
    "vm.dirty_background_ratio",
    "vm.dirty_bytes",
    "vm.dirty_expire_centisecs",
    "vm.dirty_ratio",
    "vm.dirty_writeback_centisecs",
    "vm.min_free_kbytes",
    "vm.nr_hugepages",
    "vm.overcommit_memory",
    "vm.swappiness",
    "vm.vfs_cache_pressure",
    "vm.zone_reclaim_mode",
)
"""Kernel settings that are tuned for storage and networks."""

_PREFIXES = (
    *("DLIO_", "FI_", "GOMP_", "HDF5_", "I_MPI_", "KMP_", "MKL_", "MPICH_", "NCCL_", "OMP_", "OPENBLAS_"),
    *("TORCH_", "UCX_"),
)
_NAMES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "PYTHONPATH", "VIRTUAL_ENV"}
)


def read_report(name: str, environment: Environment, *, root: Path = ROOT) -> HostReport:
    """Read all facts of this machine, whose name is `name`."""
    unread: dict[str, str] = {}
    listed = user_settings(environment)
    listed |= {
        name: value for name, value in environment.items() if name in _NAMES or name.startswith(_PREFIXES)
    }

    def attempt(fact: str, read: Callable[[], Fact]) -> Fact | None:
        try:
            return read()
        except (OSError, ValueError, KeyError) as error:
            unread[fact] = format_cause(error)
            return None

    return HostReport(
        name=name,
        boot_id=attempt("boot_id", lambda: _text(root / "proc/sys/kernel/random/boot_id")),
        cpu=attempt("cpu", lambda: parse_cpu((root / "proc/cpuinfo").read_text(encoding="utf-8"))),
        memory_bytes=attempt("memory_bytes", lambda: memory_bytes(read_meminfo(root / "proc"))),
        numa=attempt("numa", lambda: tuple(_numa(root / "sys/devices/system/node"))),
        nics=attempt("nics", lambda: tuple(_nics(root / "sys/class/net"))),
        drives=attempt("drives", lambda: tuple(_drives(root / "sys/block"))),
        mounts=attempt(
            "mounts", lambda: tuple(parse_mounts((root / "proc/mounts").read_text(encoding="utf-8")))
        ),
        kernel=f"{platform.system()} {platform.release()}",
        system=attempt("system", lambda: parse_system(_text(root / "etc/os-release"))),
        dmi=attempt("dmi", lambda: _settings(root / "sys/class/dmi/id", _DMI)),
        sysctl=attempt("sysctl", lambda: _settings(root / "proc/sys", SYSCTLS)),
        limits=attempt("limits", lambda: _limits(root / "dev/shm")),
        environment=redact_variables(listed),
        versions={
            "penstock": __version__,
            "python": platform.python_version(),
            **dict.fromkeys(_PACKAGES, "not installed"),
            **package_versions(_PACKAGES),
        },
        clock=attempt(
            "clock", lambda: Clock(read_unix_s=time.time(), is_synchronised=clock_is_synchronised())
        ),
        unread=unread,
    )


def parse_cpu(cpuinfo: str) -> Cpu:
    """Parse one block for each logical core. Blocks with the same socket and core are one physical core."""
    blocks = [parse_pairs(block) for block in cpuinfo.split("\n\n")]
    cores = [block for block in blocks if "processor" in block]
    placed = {
        (core["physical id"], core["core id"]) for core in cores if {"physical id", "core id"} <= core.keys()
    }
    first = cores[0] if cores else {}
    return Cpu(
        # ARM has no model name, only numbers for the implementer and the part.
        model=first.get("model name") or first.get("CPU part", "") or platform.processor(),
        machine=platform.machine(),
        num_logical=len(cores),
        num_physical=len(placed) or None,
        num_sockets=len({socket for socket, _ in placed}) or None,
    )


def parse_mounts(text: str, *, left_out: Collection[str] = _STATE_KINDS) -> Iterator[Mount]:
    """Parse `/proc/mounts`, sorted by folder.

    If several file systems are mounted on one folder, only the last counts, because it hides the others.
    """
    by_folder: dict[str, Mount] = {}
    for line in text.splitlines():
        # The kernel writes spaces and backslashes as octal numbers.
        device, folder, kind, options, *_ = (
            re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word) for word in line.split(" ")
        )
        by_folder.pop(folder, None)
        if kind not in left_out:
            by_folder[folder] = Mount(
                folder=folder,
                device=redact_word(device),
                kind=kind,
                options=tuple(sorted(map(redact_word, options.split(",")))),
            )
    yield from sorted(by_folder.values(), key=lambda mount: mount.folder)


def find_mount(folder: Path, proc: Path = PROC) -> Mount | None:
    """Return the innermost file system that holds a folder; None if it is unknown."""
    text = (proc / "mounts").read_text(encoding="utf-8", errors="replace")
    # Mounts are sorted by folder, and a folder follows those above it.
    mounts = [mount for mount in parse_mounts(text, left_out=()) if folder.is_relative_to(mount.folder)]
    return mounts[-1] if mounts else None


def parse_system(os_release: str) -> str:
    """Return the name of the distribution in `/etc/os-release`."""
    pairs = (line.partition("=") for line in os_release.splitlines())
    return {name: value.strip("\"'") for name, _, value in pairs}["PRETTY_NAME"]


def _numa(folder: Path) -> Iterator[NumaNode]:
    nodes = [
        folder_of_node for folder_of_node in folder.iterdir() if re.fullmatch(r"node\d+", folder_of_node.name)
    ]
    for folder_of_node in sorted(nodes, key=lambda node: int(node.name.removeprefix("node"))):
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(folder_of_node / "meminfo"))
        if total is None:
            raise ValueError(f"{folder_of_node / 'meminfo'} holds no MemTotal")
        yield NumaNode(
            node=int(folder_of_node.name.removeprefix("node")),
            cores=_text(folder_of_node / "cpulist"),
            memory_bytes=int(total[1]) * 1024,
        )


def _nics(folder: Path) -> Iterator[Nic]:
    for interface in sorted(folder.iterdir()):
        if not (interface / "device").exists():  # bridges, tunnels and loopback have no hardware
            continue
        # If the link is down or its speed unknown, reading fails or the kernel reports -1.
        speed = 0
        with suppress(OSError):
            speed = int(_text(interface / "speed"))
        yield Nic(
            name=interface.name,
            kind=_NIC_KINDS.get(_text(interface / "type"), "other"),
            state=_text(interface / "operstate"),
            mtu=int(_text(interface / "mtu")),
            speed_mbit_per_s=speed if speed > 0 else None,
        )


def _drives(folder: Path) -> Iterator[Drive]:
    for drive in sorted(folder.iterdir()):
        if drive.name.startswith(_NO_DRIVES) or _text(drive / "removable") == "1":
            continue
        yield Drive(
            name=drive.name,
            model=_optional_text(drive / "device/model"),
            transport=_transport(drive.name, str(drive.resolve())),
            size_bytes=int(_text(drive / "size")) * _SECTOR_BYTES,
            is_rotational=_text(drive / "queue/rotational") == "1",
        )


def _transport(name: str, device: str) -> str:
    """Return the transport of a drive, from the path of its device; "" if the path does not show it."""
    if name.startswith("nvme"):
        return "nvme"
    marks = {"/usb": "usb", "/ata": "sata", "/virtio": "virtio", "/end_device": "sas", "/rport": "fc"}
    return next((transport for mark, transport in marks.items() if mark in device), "")


def _settings(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the settings among `names` that this kernel has below `folder`, with their values."""
    values = {name: _optional_text(folder / name.replace(".", "/")) for name in names}
    return {name: " ".join(value.split()) for name, value in values.items() if value}


def _limits(shared_memory: Path) -> dict[str, str]:
    """Return the limits of a process started by a launcher, which are often lower than in a login shell."""
    limits = {name: "unlimited" if limit is None else str(limit) for name, limit in soft_limits().items()}
    return {**limits, "bytes of shared memory": str(shutil.disk_usage(shared_memory).total)}


class _Timex(ctypes.Structure):
    """A structure of the size of the kernel's `struct timex`. Only the call's return value is used."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 252))


def clock_is_synchronised() -> bool:
    """Return True if the kernel considers this machine's wall clock synchronized."""
    unsynchronised = 5  # TIME_ERROR of adjtimex(2)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    return bool(0 <= state < unsynchronised)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _optional_text(path: Path) -> str:
    return _text(path) if path.is_file() else ""


if __name__ == "__main__":
    own_report = read_report(gethostname(), process_environment())
    sys.stdout.write(frame_document(own_report.model_dump_json()))
