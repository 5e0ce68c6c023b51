"""Compare the bytes that devices and networks moved with those that the application counted.

Pure: what hosts counted in, one `IoReconciliation` per direction out. Device counters include every process,
so they can prove that bytes came from memory instead of a device, but never that all came from the device.
Storage that no counter covers is "not checked", with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from penstock.cluster.host_counters import CounterCoverage, HostHardware
from penstock.units import format_bytes

LEAST_SHARE: Final = 0.9
"""Below this share, bytes came from elsewhere: devices move whole blocks, and networks add headers."""
LEAST_BYTES: Final = 1 << 20
"""Fewer bytes cannot be told apart from a host's other reads and traffic."""

Direction = Literal["read", "write"]
_DISK: Final[Mapping[Direction, str]] = {"read": "read_bytes", "write": "written_bytes"}
_NETWORK: Final[Mapping[Direction, str]] = {"read": "received_bytes", "write": "sent_bytes"}


class ReconciliationVerdict(StrEnum):
    """The verdict on whether bytes went through devices. Missing bytes fail a read: they came from memory."""

    PASS = "pass"  # noqa: S105 - no secret
    WARNING = "warning"
    FAIL = "fail"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class IoReconciliation:
    """The bytes that all ranks moved in one direction, and those that all hosts' devices and networks moved.

    `by` has the bytes by host and device. `delivered_bytes` is None if no counter covers the storage.
    """

    direction: Direction
    application_bytes: int
    delivered_bytes: int | None
    by: Mapping[str, int]
    verdict: ReconciliationVerdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """The counts of one host while the application moved its bytes; `failure` is why it could not count."""

    host: str
    coverage: CounterCoverage
    hardware: HostHardware
    moved: Mapping[str, int]
    failure: str | None = None


def reconcile(direction: Direction, application_bytes: int, hosts: Sequence[HostTraffic]) -> IoReconciliation:
    """Compare what the application moved with what the hosts' devices and networks moved."""
    uncovered = {
        host.host: host.failure or host.coverage.reason
        for host in hosts
        if host.failure is not None or host.coverage.watched == "nothing"
    }
    is_covered = bool(hosts) and not uncovered
    by = _sum_traffic(direction, hosts) if is_covered else {}
    delivered_bytes = sum(by.values())
    loopback_bytes = sum(host.moved.get(f"net.lo.{_NETWORK[direction]}", 0) for host in hosts)
    is_network = any(host.coverage.watched in ("network", "client") for host in hosts)
    moved = (
        f"devices and networks moved {format_bytes(delivered_bytes)} "
        f"while the application moved {format_bytes(application_bytes)}"
    )
    verdict = ReconciliationVerdict.NOT_CHECKED
    if not is_covered:
        why = "; ".join(f"{host}: {reason}" for host, reason in uncovered.items()) or "no host counted"
    elif application_bytes < LEAST_BYTES:
        why = f"only {format_bytes(application_bytes)}: too few to tell apart from other traffic of the hosts"
    elif delivered_bytes >= LEAST_SHARE * application_bytes:
        verdict, why = ReconciliationVerdict.PASS, moved
    elif is_network and loopback_bytes >= LEAST_SHARE * application_bytes:
        why = "the service runs on the ranks' own hosts: its bytes came over the loopback"
    elif direction == "read":
        verdict = ReconciliationVerdict.FAIL
        why = f"{moved}: the rest was served from the page cache, or other RAM"
    else:
        verdict = ReconciliationVerdict.WARNING
        why = f"{moved}: the rest had not reached them when the write ended"
    return IoReconciliation(
        direction=direction,
        application_bytes=application_bytes,
        delivered_bytes=delivered_bytes if is_covered else None,
        by=by,
        verdict=verdict,
        why=why,
    )


def _sum_traffic(direction: Direction, hosts: Sequence[HostTraffic]) -> dict[str, int]:
    """The bytes of the devices behind the storage, by host and device.

    Hosts on one machine share its drives, which count once.
    """
    by: dict[str, int] = {}
    drives: set[tuple[str, str]] = set()
    for host in hosts:
        watched, hardware = host.coverage.watched, host.hardware
        counters: dict[str, str] = {}
        if watched in ("network", "client"):
            counters |= {name: f"net.{name}.{_NETWORK[direction]}" for name in hardware.nics}
            counters |= {name: f"ib.{name}.{_NETWORK[direction]}" for name in hardware.ports}
        # Clients of network file systems may keep a cache on drives of their own.
        shared = {"device": (host.coverage.device,), "drives": hardware.drives, "client": hardware.drives}
        for name in shared.get(watched, ()):
            if (hardware.boot_id or host.host, name) not in drives:
                drives.add((hardware.boot_id or host.host, name))
                counters[name] = f"disk.{name}.{_DISK[direction]}"
        by |= {
            f"{host.host} {name}": size_bytes
            for name, counter in counters.items()
            if (size_bytes := host.moved.get(counter, 0))
        }
    return by
