"""Compare the bytes that devices and networks moved with those that the application counted.

Pure: what hosts counted in, one `IoReconciliation` per direction out. Device counters include every process,
so they can prove that bytes came from memory instead of a device, but never that all came from the device.
Storage that no counter covers is "not checked", with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    uncovered = {host.host: host.failure or host.coverage.reason for host in hosts if _lacks_counters(host)}
    if uncovered or not hosts:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in uncovered.items())
        return _not_checked(direction, application_bytes, reasons or "no host counted")
    by = _sum_traffic(direction, hosts)
    delivered_bytes = sum(by.values())
    if application_bytes < LEAST_BYTES:
        why = f"only {format_bytes(application_bytes)}: too few to tell apart from other traffic of the hosts"
        return _not_checked(direction, application_bytes, why, by)
    loopback_bytes = sum(host.moved.get(f"net.lo.{_NETWORK[direction]}", 0) for host in hosts)
    if delivered_bytes < LEAST_SHARE * application_bytes <= loopback_bytes and _is_network_storage(hosts):
        why = "the service runs on the ranks' own hosts: its bytes came over the loopback"
        return _not_checked(direction, application_bytes, why, by)
    verdict, why = _judge(direction, application_bytes, delivered_bytes)
    return IoReconciliation(
        direction=direction,
        application_bytes=application_bytes,
        delivered_bytes=delivered_bytes,
        by=by,
        verdict=verdict,
        why=why,
    )


def _sum_traffic(direction: Direction, hosts: Sequence[HostTraffic]) -> dict[str, int]:
    """Sum by host and device. Hosts on one machine share its drives, which count once."""
    by: dict[str, int] = {}
    drives: set[tuple[str, str]] = set()
    for host in hosts:
        for name, size_bytes in _relevant_traffic(host, direction):
            drive = (host.hardware.boot_id or host.host, name)
            is_counted = drive in drives and name not in (*host.hardware.nics, *host.hardware.ports)
            drives.add(drive)
            if size_bytes and not is_counted:
                by[f"{host.host} {name}"] = size_bytes
    return by


def _judge(
    direction: Direction, application_bytes: int, delivered_bytes: int
) -> tuple[ReconciliationVerdict, str]:
    summary = (
        f"devices and networks moved {format_bytes(delivered_bytes)} "
        f"while the application moved {format_bytes(application_bytes)}"
    )
    if delivered_bytes >= LEAST_SHARE * application_bytes:
        return ReconciliationVerdict.PASS, summary
    if direction == "read":
        return ReconciliationVerdict.FAIL, f"{summary}: the rest was served from the page cache, or other RAM"
    return ReconciliationVerdict.WARNING, f"{summary}: the rest had not reached them when the write ended"


def _lacks_counters(host: HostTraffic) -> bool:
    return host.failure is not None or host.coverage.watched == "nothing"


def _is_network_storage(hosts: Sequence[HostTraffic]) -> bool:
    return any(host.coverage.watched in ("network", "client") for host in hosts)


def _relevant_traffic(host: HostTraffic, direction: Direction) -> Iterator[tuple[str, int]]:
    """The bytes that moved on the devices behind the storage."""
    disk, network = _DISK[direction], _NETWORK[direction]
    if host.coverage.watched == "device":
        yield host.coverage.device, host.moved.get(f"disk.{host.coverage.device}.{disk}", 0)
        return
    if host.coverage.watched in ("network", "client"):
        for name in host.hardware.nics:
            yield name, host.moved.get(f"net.{name}.{network}", 0)
        for name in host.hardware.ports:
            yield name, host.moved.get(f"ib.{name}.{network}", 0)
    if host.coverage.watched in ("drives", "client"):
        # Clients of network file systems may keep a cache on drives of their own.
        for name in host.hardware.drives:
            yield name, host.moved.get(f"disk.{name}.{disk}", 0)


def _not_checked(
    direction: Direction, application_bytes: int, why: str, by: Mapping[str, int] | None = None
) -> IoReconciliation:
    return IoReconciliation(
        direction=direction,
        application_bytes=application_bytes,
        delivered_bytes=None if by is None else sum(by.values()),
        by=by or {},
        verdict=ReconciliationVerdict.NOT_CHECKED,
        why=why,
    )
