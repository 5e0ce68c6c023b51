"""Report what is installed and usable on this machine, and how to fix what is not. Nothing is changed.

A check never raises an error: it reports whatever it cannot determine.
"""

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from penstock.cluster.facts.read_host import clock_is_synchronised, find_mount
from penstock.environment import Environment
from penstock.optional_libraries import EXTRAS, install_command
from penstock.results.provenance import package_versions
from penstock.units import format_bytes, format_seconds

State = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one check. A result of `limited` or `missing` comes with a `fix`."""

    area: str
    subject: str
    state: State
    found: str
    fix: str = ""


def _check(
    area: str, subject: str, found: str, *, good: bool = True, otherwise: str = "", bad: State = "limited"
) -> Diagnosis:
    if good:
        return Diagnosis(area=area, subject=subject, state="ok", found=found)
    return Diagnosis(area=area, subject=subject, state=bad, found=found, fix=otherwise)


def examine(folder: Path, environment: Environment) -> Iterator[Diagnosis]:
    """Check this machine and the file system that holds `folder`."""
    yield from _machine()
    yield from _ranks(environment)
    yield from _object_clients(environment)
    yield from _packages("packages")
    yield from _files(folder.resolve())
    yield from _limits()
    yield from _clock()
    strace = shutil.which("strace")
    yield _check(
        "programs",
        "strace",
        strace or "not on PATH",
        good=strace is not None,
        otherwise="Optional, for `penstock trace record --tracer strace`: install it.",
    )


def _machine() -> Iterator[Diagnosis]:
    import psutil  # noqa: PLC0415 - slow to import

    version = ".".join(str(part) for part in sys.version_info[:3])
    yield _check("machine", "Python", f"{version} at {sys.executable}")
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
    yield _check("machine", "memory", found)


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
"""For each extra, the area of the report that its packages belong to, and their purpose."""

_DISTRIBUTIONS: Final = {"PIL": "pillow", "s3torchconnectorclient": "s3torchconnector"}
"""Modules whose distribution has a different name."""


def _packages(area: str) -> Iterator[Diagnosis]:
    for module, extras in EXTRAS.items():
        extra_area, purpose = _EXTRAS[extras[0]]
        if extra_area == area:
            command = install_command(extras[0])
            yield _package(area, _DISTRIBUTIONS.get(module, module), purpose, command)


def _package(area: str, distribution: str, purpose: str, command: str) -> Diagnosis:
    """Look a package up in the installed packages' metadata, because importing torch takes seconds."""
    version = package_versions([distribution]).get(distribution)
    return _check(
        area,
        distribution,
        f"{version}, for {purpose}" if version else "not installed",
        good=version is not None,
        otherwise=f"For {purpose}: {command}",
        bad="missing",
    )


def _ranks(environment: Environment) -> Iterator[Diagnosis]:
    yield from _packages("ranks")
    own_mpiexec = Path(sys.executable).with_name("mpiexec")
    mpiexec = (
        str(own_mpiexec) if own_mpiexec.exists() else shutil.which("mpiexec", path=environment.get("PATH"))
    )
    yield _check(
        "ranks",
        "mpiexec",
        mpiexec or "neither next to this Python nor on PATH",
        good=mpiexec is not None,
        otherwise=f"For --ranks: {install_command('mpi')}, or load your site's MPI.",
        bad="missing",
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


def _files(folder: Path) -> Iterator[Diagnosis]:
    mount = find_mount(folder)
    kind = f"{mount.kind} on {mount.device} at {mount.folder}" if mount else "unknown"
    usage = shutil.disk_usage(folder)
    yield _check(
        "files",
        str(folder),
        f"{kind}, {format_bytes(usage.free)} free of {format_bytes(usage.total)}",
        good=usage.free > 0.05 * usage.total,
        otherwise="Free some space before measuring: a nearly full file system is slower.",
    )
    # Files on tmpfs may also open with O_DIRECT, so success does not prove that there is a disk.
    refusal = ""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".penstock-doctor-") as room:
            os.close(os.open(Path(room, "direct"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        refusal = str(error.strerror)
    yield _check(
        "files",
        "O_DIRECT",
        f"refused in {folder}: {refusal}" if refusal else f"opens in {folder}",
        good=not refusal,
        otherwise="Measure with file:// there, or pass a folder on another file system as --at.",
    )
    memory = Path("/dev/shm")  # noqa: S108 - where DataLoader workers and MPI share memory
    if not memory.is_dir():
        fix = "Mount a tmpfs there: MPI on one node and DataLoader workers pass memory through it."
        yield _check("files", str(memory), "no such folder", good=False, otherwise=fix, bad="missing")
        return
    usage = shutil.disk_usage(memory)
    yield _check(
        "files",
        str(memory),
        f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}",
        good=usage.total >= 1 << 30,
        otherwise="Give it 1 GiB or more (in a container: --shm-size); a full one kills workers by SIGBUS.",
    )


def _limits() -> Iterator[Diagnosis]:
    for subject, kind, wanted, fix in (
        ("open files", resource.RLIMIT_NOFILE, 4096, "ulimit -n 65536"),
        ("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 4096"),
        ("locked memory", resource.RLIMIT_MEMLOCK, 64 << 20, "ulimit -l unlimited"),
        ("file size", resource.RLIMIT_FSIZE, 1 << 50, "ulimit -f unlimited"),
    ):
        soft, _hard = resource.getrlimit(kind)
        unlimited = soft == resource.RLIM_INFINITY
        limit = format_bytes(soft) if wanted > 4096 else f"{soft:.0f}"
        yield _check(
            "limits",
            subject,
            "unlimited" if unlimited else limit,
            good=unlimited or soft >= wanted,
            otherwise=f"Raise it in the shell that starts jobs: {fix}",
        )
    is_root = os.access("/proc/sys/vm/drop_caches", os.W_OK)
    yield _check(
        "limits",
        "dropping caches",
        "all caches (root)" if is_root else "own files only (fadvise)",
        good=is_root,
        otherwise="Run as root to drop all caches; for own files fadvise is enough, and is verified.",
    )


def _clock() -> Iterator[Diagnosis]:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text(encoding="ascii").strip() if source.exists() else "unknown source"
    resolution_s = time.get_clock_info("monotonic").resolution
    start = time.perf_counter()
    for _ in range(1000):
        time.monotonic_ns()
    cost_s = (time.perf_counter() - start) / 1000
    yield _check(
        "clock",
        "monotonic",
        f"{name}, {format_seconds(resolution_s)} resolution, {format_seconds(cost_s)} per reading",
        good=cost_s < 1e-6,
        otherwise="Reading the clock takes a system call; select the clock source tsc if there is one.",
    )
    is_synchronised = clock_is_synchronised()
    yield _check(
        "clock",
        "synchronized",
        f"{'yes' if is_synchronised else 'no'}, according to the kernel",
        good=is_synchronised,
        otherwise="Durations are not affected; start chrony to compare times between hosts.",
    )
