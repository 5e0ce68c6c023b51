"""Facts of a machine that took part in a run: what it was, how much memory, which kernel.

Place in the flow: each rank reads its own before the run; one record a host goes into `run.json`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host. `cpuinfo` (of its last core) and `meminfo` are the kernel's own words."""

    host: str
    kernel: str
    machine: str
    num_cores: int
    memory_bytes: int
    cpuinfo: Mapping[str, str]
    meminfo: Mapping[str, str]


ReadHostFacts = Callable[[str], HostFacts]
"""Reads the facts of the machine that a job calls by this name; called there."""


def read_host(host: str, *, proc: Path = PROC) -> HostFacts:
    """The facts of this machine, which the job calls `host`."""
    meminfo = read_meminfo(proc)
    kernel = platform.uname()
    return HostFacts(
        host=host,
        kernel=f"{kernel.system} {kernel.release}",
        machine=kernel.machine,
        num_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(meminfo),
        cpuinfo=_pairs((proc / "cpuinfo").read_text(encoding="utf-8")),
        meminfo=meminfo,
    )


def read_meminfo(proc: Path = PROC) -> dict[str, str]:
    """What the kernel says of this machine's memory, in its own words."""
    return _pairs((proc / "meminfo").read_text(encoding="utf-8"))


def memory_bytes(meminfo: Mapping[str, str]) -> int:
    """The memory that the kernel manages; KeyError where it does not tell."""
    return int(meminfo["MemTotal"].removesuffix(" kB")) * 1024


def one_per_host(facts: Iterable[HostFacts]) -> tuple[HostFacts, ...]:
    """Of all ranks' facts the first of each host, in rank order."""
    by_host: dict[str, HostFacts] = {}
    for each in facts:
        by_host.setdefault(each.host, each)
    return tuple(by_host.values())


def _pairs(text: str) -> dict[str, str]:
    """`name : value` lines; where cores repeat a name, the last core's value stands."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}
