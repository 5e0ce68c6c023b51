"""Set the bytes that devices and networks moved beside those that the application counted.

Pure: what hosts counted in, one `IoReconciliation` per direction out. Device counters see the bytes of every
process, so they can prove that bytes came from memory instead of a device, but never that all came from one.
What no counter could see is "not checked", with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.cluster.counter_coverage import CounterCoverage
    from penstock.cluster.host_counters import HostHardware

LEAST_SHARE: Final = 0.9
"""Below this share, bytes came from elsewhere: devices move whole blocks, and networks add headers."""
LEAST_BYTES: Final = 1 << 20
"""Fewer bytes are indistinguishable from a host's other reads and traffic."""

Direction = Literal["read", "write"]
_DISK: Final[Mapping[Direction, str]] = {"read": "read_bytes", "write": "written_bytes"}
_NETWORK: Final[Mapping[Direction, str]] = {"read": "received_bytes", "write": "sent_bytes"}


class ReconciliationVerdict(StrEnum):
    """Whether the bytes went through devices. Missing bytes fail a read: they came from memory."""

    PASS = "pass"  # noqa: S105 - no secret
    WARNING = "warning"
    FAIL = "fail"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class IoReconciliation:
    """What all ranks moved in one direction, beside what devices and networks of all hosts moved.

    `by` is by host and device. `delivered_bytes` is None if no counter covers the storage.
    """

    direction: Direction
    application_bytes: int
    delivered_bytes: int | None
    by: Mapping[str, int]
    verdict: ReconciliationVerdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """What one host counted while the application moved its bytes; `failure` says why it could not count."""

    host: str
    sight: CounterCoverage
    hardware: HostHardware
    moved: Mapping[str, int]
    failure: str | None = None


def reconcile(direction: Direction, application_bytes: int, hosts: Sequence[HostTraffic]) -> IoReconciliation:
    """Compare what the application moved with what the hosts' devices and networks moved."""
    blind = {each.host: each.failure or each.sight.reason for each in hosts if _is_blind(each)}
    if blind or not hosts:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in blind.items())
        return _not_checked(direction, application_bytes, reasons or "no host counted")
    by = _moved(direction, hosts)
    delivered_bytes = sum(by.values())
    if application_bytes < LEAST_BYTES:
        why = f"only {format_bytes(application_bytes)}: too few to tell from what hosts do anyway"
        return _not_checked(direction, application_bytes, why, by)
    looped = sum(each.moved.get(f"net.lo.{_NETWORK[direction]}", 0) for each in hosts)
    if delivered_bytes < LEAST_SHARE * application_bytes <= looped and _is_network(hosts):
        why = "the service runs on the ranks' own hosts: its bytes came over the loopback"
        return _not_checked(direction, application_bytes, why, by)
    verdict, why = _judged(direction, application_bytes, delivered_bytes)
    return IoReconciliation(
        direction=direction,
        application_bytes=application_bytes,
        delivered_bytes=delivered_bytes,
        by=by,
        verdict=verdict,
        why=why,
    )


def _moved(direction: Direction, hosts: Sequence[HostTraffic]) -> dict[str, int]:
    """Sum by host and device. Hosts on one machine see the same drives, which count once."""
    by: dict[str, int] = {}
    drives: set[tuple[str, str]] = set()
    for host in hosts:
        for name, size_bytes in _seen(host, direction):
            drive = (host.hardware.boot_id or host.host, name)
            is_counted = drive in drives and name not in (*host.hardware.nics, *host.hardware.ports)
            drives.add(drive)
            if size_bytes and not is_counted:
                by[f"{host.host} {name}"] = size_bytes
    return by


def _judged(
    direction: Direction, application_bytes: int, delivered_bytes: int
) -> tuple[ReconciliationVerdict, str]:
    told = (
        f"devices and networks moved {format_bytes(delivered_bytes)} "
        f"while the application moved {format_bytes(application_bytes)}"
    )
    if delivered_bytes >= LEAST_SHARE * application_bytes:
        return ReconciliationVerdict.PASS, told
    if direction == "read":
        return ReconciliationVerdict.FAIL, f"{told}: the rest was served from the page cache, or other RAM"
    return ReconciliationVerdict.WARNING, f"{told}: the rest had not reached them when the write ended"


def _is_blind(host: HostTraffic) -> bool:
    return host.failure is not None or host.sight.watched == "nothing"


def _is_network(hosts: Sequence[HostTraffic]) -> bool:
    return any(each.sight.watched in ("network", "client") for each in hosts)


def _seen(host: HostTraffic, direction: Direction) -> Iterator[tuple[str, int]]:
    """What moved on the devices in sight of the storage."""
    disk, network = _DISK[direction], _NETWORK[direction]
    if host.sight.watched == "device":
        yield host.sight.device, host.moved.get(f"disk.{host.sight.device}.{disk}", 0)
        return
    if host.sight.watched in ("network", "client"):
        for name in host.hardware.nics:
            yield name, host.moved.get(f"net.{name}.{network}", 0)
        for name in host.hardware.ports:
            yield name, host.moved.get(f"ib.{name}.{network}", 0)
    if host.sight.watched in ("drives", "client"):
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
