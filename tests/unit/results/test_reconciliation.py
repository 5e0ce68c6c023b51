"""The application's bytes beside those of devices: what is missing came from memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.host_counters import CounterCoverage, HostHardware, Watched
from penstock.results.counter_files import Direction, HostTraffic, ReconciliationVerdict, reconcile

MIB = 1 << 20
HARDWARE = HostHardware(boot_id="", drives=("vda", "nvme0n1"), nics=("eth0",), ports=("mlx5_0/1",))


def traffic(
    host: str = "a", *, watched: Watched = "device", failure: str | None = None, **moved: int
) -> HostTraffic:
    """A host whose counters moved by so many bytes, e.g. `disk_vda=7`; reads."""
    names = {
        "vda": "disk.vda.read_bytes",
        "vda_written": "disk.vda.written_bytes",
        "nvme0n1": "disk.nvme0n1.read_bytes",
        "eth0": "net.eth0.received_bytes",
        "ib": "ib.mlx5_0/1.received_bytes",
        "lo": "net.lo.received_bytes",
    }
    return HostTraffic(
        host=host,
        coverage=CounterCoverage(
            watched=watched, device="vda" if watched == "device" else "", reason="tmpfs shows none"
        ),
        hardware=HARDWARE,
        moved={names[name]: size for name, size in moved.items()},
        failure=failure,
    )


@given(wanted=st.integers(MIB, 1 << 50), moved=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=4))
def test_read_fails_if_devices_moved_less_than_the_application(wanted: int, moved: list[int]) -> None:
    found = reconcile("read", wanted, [traffic(f"h{each}{n}", vda=each) for n, each in enumerate(moved)])
    assert found.delivered_bytes == sum(moved) == sum(found.by.values())
    is_enough = sum(moved) >= 0.9 * wanted
    assert found.verdict is (ReconciliationVerdict.PASS if is_enough else ReconciliationVerdict.FAIL)
    assert ("page cache" in found.why) != is_enough


@pytest.mark.parametrize(
    ("watched", "by"),
    [
        ("device", {"a vda": 1}),
        ("drives", {"a vda": 1, "a nvme0n1": 2}),
        ("network", {"a eth0": 4, "a mlx5_0/1": 8}),
        ("client", {"a vda": 1, "a nvme0n1": 2, "a eth0": 4, "a mlx5_0/1": 8}),
        ("memory", {}),
    ],
)
def test_only_what_can_carry_the_storages_bytes_counts(watched: Watched, by: dict[str, int]) -> None:
    found = reconcile("read", MIB, [traffic(watched=watched, vda=1, nvme0n1=2, eth0=4, ib=8, lo=0)])
    assert found.by == by


def test_a_drive_of_hosts_that_are_one_machine_counts_once() -> None:
    one, other = traffic("a", vda=3 * MIB), traffic("b", vda=2 * MIB)
    machine = replace(HARDWARE, boot_id="x")
    found = reconcile("read", 5 * MIB, [replace(each, hardware=machine) for each in (one, other)])
    assert found.by == {"a vda": 3 * MIB}
    assert found.verdict is ReconciliationVerdict.FAIL


def test_reads_and_writes_are_reconciled_separately() -> None:
    host = traffic(vda=5 * MIB, vda_written=MIB)
    assert reconcile("read", 5 * MIB, [host]).verdict is ReconciliationVerdict.PASS
    late = reconcile("write", 5 * MIB, [host])
    assert late.verdict is ReconciliationVerdict.WARNING
    assert late.delivered_bytes == MIB


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ([traffic(vda=9 * MIB), traffic("b", watched="nothing")], "b: tmpfs shows none"),
        ([traffic(vda=9 * MIB, failure="OSError: gone")], "a: OSError: gone"),
        ([], "no host counted"),
    ],
)
def test_one_host_that_saw_nothing_leaves_all_unchecked(
    direction: Direction, hosts: list[HostTraffic], why: str
) -> None:
    found = reconcile(direction, 9 * MIB, hosts)
    assert found.verdict is ReconciliationVerdict.NOT_CHECKED
    assert found.delivered_bytes is None
    assert why in found.why


def test_a_handful_of_bytes_is_not_judged() -> None:
    found = reconcile("read", MIB - 1, [traffic(vda=0)])
    assert found.verdict is ReconciliationVerdict.NOT_CHECKED
    assert "too few" in found.why


def test_a_service_on_the_same_host_is_not_taken_for_memory() -> None:
    found = reconcile("read", 9 * MIB, [traffic(watched="network", lo=9 * MIB, eth0=5)])
    assert found.verdict is ReconciliationVerdict.NOT_CHECKED
    assert "loopback" in found.why
    assert reconcile("read", 9 * MIB, [traffic(lo=9 * MIB)]).verdict is ReconciliationVerdict.FAIL


@pytest.mark.parametrize(
    ("received", "loopback", "verdict"),
    [
        (900 * MIB, 1000 * MIB, ReconciliationVerdict.PASS),
        (900 * MIB - 1, 900 * MIB, ReconciliationVerdict.NOT_CHECKED),
        (900 * MIB - 1, 900 * MIB - 1, ReconciliationVerdict.FAIL),
    ],
)
def test_loopback_counts_only_where_networks_moved_too_little(
    received: int, loopback: int, verdict: ReconciliationVerdict
) -> None:
    host = traffic(watched="network", eth0=received, lo=loopback)
    assert reconcile("read", 1000 * MIB, [host]).verdict is verdict
