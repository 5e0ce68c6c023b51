"""What may be reported of a host: allow-lists of kernel settings and variables, with secrets removed.

Pure. Invariant: a value whose name or form suggests a secret is never reported, even if its name is allowed.
"""

import re

from penstock.environment import Environment, user_settings

WITHHELD = "<withheld>"

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
"""Kernel settings that storage and networks are tuned by."""

_PREFIXES = (
    *("DLIO_", "FI_", "GOMP_", "HDF5_", "I_MPI_", "KMP_", "MKL_", "MPICH_", "NCCL_", "OMP_", "OPENBLAS_"),
    *("TORCH_", "UCX_"),
)
_NAMES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "PYTHONPATH", "VIRTUAL_ENV"}
)

_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASS|CREDENTIAL|KEY|AUTH|SIGNATURE|COOKIE|CERT", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY_OF_URL = re.compile(r"(://[^\s?]*\?)\S+")


def redact_environment(environment: Environment) -> dict[str, str]:
    """The variables that affect a run, sorted by name, without secrets."""
    settings = user_settings(environment)
    return {
        name: redact_value(name, environment[name])
        for name in sorted(environment)
        if name in settings or name in _NAMES or name.startswith(_PREFIXES)
    }


def redact_value(name: str, value: str) -> str:
    """`value`, withheld where `name` suggests a secret; else without users and queries of URLs."""
    if _SECRET_NAME.search(name):
        return WITHHELD
    return _QUERY_OF_URL.sub(rf"\1{WITHHELD}", _USER_IN_URL.sub(f"{WITHHELD}@", value))


def redact_mount_option(option: str) -> str:
    """`name=value` or a plain word; the value is withheld where the name suggests a secret."""
    name, equals, value = option.partition("=")
    return f"{name}={redact_value(name, value)}" if equals else option
