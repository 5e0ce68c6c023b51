"""What is installed and usable on this machine, and how to fix what is not. It changes nothing.

A check never raises: what it cannot determine, it reports.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from penstock.environment import Environment
from penstock.optional_libraries import EXTRAS, install_command
from penstock.units import format_bytes, format_seconds

State = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one check. What is `limited` or `missing` comes with a `fix`."""

    area: str
    subject: str
    state: State
    found: str
    fix: str = ""


def _check(area: str, subject: str, found: str, *, good: bool, otherwise: str) -> Diagnosis:
    if good:
        return Diagnosis(area=area, subject=subject, state="ok", found=found)
    return Diagnosis(area=area, subject=subject, state="limited", found=found, fix=otherwise)


def examine(folder: Path, environment: Environment) -> Iterator[Diagnosis]:
    """Check this machine and the file system that holds `folder`."""
    yield from _machine()
    yield from _ranks(environment)
    yield from _object_clients(environment)
    yield from _packages("packages")
    yield from _file_system(folder)
    yield from _limits()
    yield _clock_resolution()
    yield _clock_synchronised()
    yield from _programs()


def _machine() -> Iterator[Diagnosis]:
    import psutil  # noqa: PLC0415 - slow to import

    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Diagnosis(area="machine", subject="Python", state="ok", found=f"{version} at {sys.executable}")
    usable = len(os.sched_getaffinity(0))
    total = os.cpu_count() or usable
    yield _check(
        "machine",
        "cores",
        f"{usable} usable of {total}",
        good=usable == total,
        otherwise="This process is bound to some cores, which its ranks will share.",
    )
    memory = psutil.virtual_memory()
    found = f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}"
    yield Diagnosis(area="machine", subject="memory", state="ok", found=found)


_EXTRAS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "mpi": ("ranks", "ranks under MPI"),
        "torch": ("ranks", "ranks under torch.distributed, and the checkpoint engine"),
        "s3dlio": ("objects", "the client s3dlio"),
        "minio": ("objects", "the client minio"),
        "s3torchconnector": ("objects", "the client s3torchconnector"),
        "bench": ("packages", "training data"),
        "zstd": ("packages", "compressed checkpoints"),
        "trace": ("packages", "traces"),
        "darshan": ("packages", "Darshan's logs"),
        "dask": ("packages", "traces that a cluster's workers read"),
        "pages": ("packages", "HTML pages"),
    }
)
"""Extra -> the area of the report that its packages belong to, and what they are for."""

_DISTRIBUTIONS: Final = {"PIL": "pillow", "s3torchconnectorclient": "s3torchconnector"}
"""Modules whose distribution has another name."""


def _packages(area: str) -> Iterator[Diagnosis]:
    for module, extras in EXTRAS.items():
        extra_area, purpose = _EXTRAS[extras[0]]
        if extra_area == area:
            command = install_command(extras[0])
            yield _package(area, _DISTRIBUTIONS.get(module, module), purpose, command)


def _package(area: str, distribution: str, purpose: str, command: str) -> Diagnosis:
    """Whether a package is installed, from its metadata: importing torch takes seconds."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Diagnosis(
            area=area,
            subject=distribution,
            state="missing",
            found="not installed",
            fix=f"For {purpose}: {command}",
        )
    return Diagnosis(area=area, subject=distribution, state="ok", found=f"{version}, for {purpose}")


def _ranks(environment: Environment) -> Iterator[Diagnosis]:
    yield from _packages("ranks")
    own_mpiexec = Path(sys.executable).with_name("mpiexec")
    mpiexec = (
        str(own_mpiexec) if own_mpiexec.exists() else shutil.which("mpiexec", path=environment.get("PATH"))
    )
    yield Diagnosis(
        area="ranks",
        subject="mpiexec",
        state="ok" if mpiexec else "missing",
        found=mpiexec or "neither beside this Python nor on PATH",
        fix="" if mpiexec else f"For --ranks: {install_command('mpi')}, or load your site's MPI.",
    )


def _object_clients(environment: Environment) -> Iterator[Diagnosis]:
    yield _package("objects", "obstore", "the default client for s3://, gs:// and az://", install_command())
    yield from _packages("objects")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in names if name not in environment]
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or "AWS itself"
    yield _check(
        "objects",
        "credentials",
        f"{' and '.join(missing)} not set" if missing else f"set, endpoint: {endpoint}",
        good=not missing,
        otherwise=f"For s3://: set {', '.join(missing)}, and AWS_ENDPOINT_URL for a service other than AWS.",
    )


def _file_system(folder: Path) -> Iterator[Diagnosis]:
    import psutil  # noqa: PLC0415 - slow to import

    place = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    kind = f"{mount.fstype} on {mount.device} at {mount.mountpoint}" if mount else "unknown"
    usage = shutil.disk_usage(place)
    yield _check(
        "files",
        str(place),
        f"{kind}, {format_bytes(usage.free)} free of {format_bytes(usage.total)}",
        good=usage.free > 0.05 * usage.total,
        otherwise="Free some space before measuring: a nearly full file system is slower.",
    )
    yield _direct_io(place)
    yield _shared_memory()


def _direct_io(folder: Path) -> Diagnosis:
    """Whether files open with O_DIRECT here. On tmpfs they may, too: success does not prove a disk."""
    refusal = ""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".penstock-doctor-") as room:
            os.close(os.open(Path(room, "direct"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        refusal = str(error.strerror)
    return _check(
        "files",
        "O_DIRECT",
        f"refused in {folder}: {refusal}" if refusal else f"opens in {folder}",
        good=not refusal,
        otherwise="Measure with file:// there, or pass a folder on another file system as --at.",
    )


def _shared_memory() -> Diagnosis:
    path = Path("/dev/shm")  # noqa: S108 - where DataLoader workers and MPI share memory
    if not path.is_dir():
        return Diagnosis(
            area="files",
            subject=str(path),
            state="missing",
            found="no such folder",
            fix="Mount a tmpfs there: MPI on one node and DataLoader workers pass memory through it.",
        )
    usage = shutil.disk_usage(path)
    return _check(
        "files",
        str(path),
        f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}",
        good=usage.total >= 1 << 30,
        otherwise="Give it 1 GiB or more (in a container: --shm-size); a full one kills workers by SIGBUS.",
    )


@dataclass(frozen=True, slots=True)
class _Limit:
    subject: str
    kind: int
    wanted: int
    fix: str
    show: Callable[[float], str]


_LIMITS: Final = (
    _Limit("open files", resource.RLIMIT_NOFILE, 4096, "ulimit -n 65536", lambda value: f"{value:.0f}"),
    _Limit("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 4096", lambda value: f"{value:.0f}"),
    _Limit("locked memory", resource.RLIMIT_MEMLOCK, 64 << 20, "ulimit -l unlimited", format_bytes),
    _Limit("file size", resource.RLIMIT_FSIZE, 1 << 50, "ulimit -f unlimited", format_bytes),
)


def _limits() -> Iterator[Diagnosis]:
    for limit in _LIMITS:
        soft, _hard = resource.getrlimit(limit.kind)
        unlimited = soft == resource.RLIM_INFINITY
        yield _check(
            "limits",
            limit.subject,
            "unlimited" if unlimited else limit.show(soft),
            good=unlimited or soft >= limit.wanted,
            otherwise=f"Raise it in the shell that starts jobs: {limit.fix}",
        )
    yield from _kernel_switches()


def _kernel_switches() -> Iterator[Diagnosis]:
    aio = _first_line(Path("/proc/sys/fs/aio-max-nr"))
    if aio:
        yield Diagnosis(
            area="limits", subject="asynchronous requests", state="ok", found=f"{aio} system-wide"
        )
    uring = _first_line(Path("/proc/sys/kernel/io_uring_disabled"))
    if uring:
        yield _check(
            "limits",
            "io_uring",
            "allowed" if uring == "0" else f"kernel.io_uring_disabled = {uring}",
            good=uring == "0",
            otherwise="Only other tools need it (fio's io_uring engine); Penstock does not.",
        )
    is_root = os.access("/proc/sys/vm/drop_caches", os.W_OK)
    yield _check(
        "limits",
        "dropping caches",
        "all caches (root)" if is_root else "own files only (fadvise)",
        good=is_root,
        otherwise="Run as root to drop all caches; for own files fadvise is enough, and is verified.",
    )


def _first_line(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _clock_resolution() -> Diagnosis:
    source = _first_line(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    resolution_s = time.get_clock_info("monotonic").resolution
    start = time.perf_counter()
    for _ in range(1000):
        time.monotonic_ns()
    cost_s = (time.perf_counter() - start) / 1000
    return _check(
        "clock",
        "monotonic",
        f"{source or 'unknown source'}, {format_seconds(resolution_s)} resolution, "
        f"{format_seconds(cost_s)} per reading",
        good=cost_s < 1e-6,
        otherwise="Reading the clock takes a system call; select the clock source tsc if there is one.",
    )


class _Timex(ctypes.Structure):
    """As large as the kernel's `struct timex`; only the call's return value is used."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 252))


def clock_is_synchronised() -> bool:
    """Whether the kernel considers this machine's wall clock synchronised."""
    unsynchronised = 5  # TIME_ERROR of adjtimex(2)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    return bool(0 <= state < unsynchronised)


def _clock_synchronised() -> Diagnosis:
    good = clock_is_synchronised()
    return _check(
        "clock",
        "synchronised",
        "yes, according to the kernel" if good else "no, according to the kernel",
        good=good,
        otherwise="Durations are not affected; start chrony to compare times between hosts.",
    )


def _programs() -> Iterator[Diagnosis]:
    for name, purpose in (
        ("fio", "`make bench` compares the probe with it"),
        ("strace", "tests count calls"),
    ):
        path = shutil.which(name)
        yield _check(
            "programs",
            name,
            path or "not on PATH",
            good=path is not None,
            otherwise=f"Optional: {purpose}; install the package {name} of your distribution.",
        )
