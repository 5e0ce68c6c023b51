"""Differences between hosts are found, and unknown facts never count as equal."""

import pytest
from tests.unit.cluster.facts.known_hosts import LUSTRE, cluster, present

from penstock.cluster.facts.homogeneity import HomogeneityCheck, check_homogeneity, overall_verdict
from penstock.cluster.facts.host_facts import AbsentHost, Clock, ClusterFacts, Cpu, Mount, PresentHost

FEWER_CORES = Cpu(model="Zen", machine="x86_64", num_logical=32, num_physical=16, num_sockets=2)
OTHER_MODEL = Cpu(model="Zen 2", machine="x86_64", num_logical=64, num_physical=32, num_sockets=2)
ROOT = Mount(folder="/", device="/dev/x", kind="ext4", options=("ro",))


def _checks(*hosts: PresentHost) -> dict[str, HomogeneityCheck]:
    return {check.subject: check for check in check_homogeneity(cluster(*hosts))}


def test_hosts_that_are_alike_pass_every_check() -> None:
    checks = check_homogeneity(cluster(present("a"), present("b"), present("c")))
    assert {check.verdict for check in checks} == {"pass"}
    assert overall_verdict(checks) == "pass"


def test_one_host_alone_is_alike() -> None:
    assert overall_verdict(check_homogeneity(cluster(present("a")))) == "pass"


@pytest.mark.parametrize(
    ("changed", "subject", "verdict"),
    [
        ({"memory_bytes": 496 << 30}, "memory", "fail"),
        ({"memory_bytes": (512 << 30) - (4 << 30)}, "memory", "pass"),
        ({"cpu": FEWER_CORES}, "cores", "fail"),
        ({"cpu": OTHER_MODEL}, "processor", "fail"),
        ({"kernel": "Linux 6.2"}, "kernel", "fail"),
        ({"system": "Debian 13"}, "system", "fail"),
        ({"versions": {"penstock": "0.2.0", "python": "3.11.7"}}, "penstock", "fail"),
        ({"boot_id": "boot of a"}, "identity", "fail"),
        ({"mounts": (ROOT,)}, "mounts", "fail"),
        ({"mounts": (ROOT, LUSTRE)}, "mounts", "pass"),
        ({"mounts": (ROOT, LUSTRE.model_copy(update={"options": ("rw",)}))}, "mounts", "fail"),
        ({"mounts": (ROOT, LUSTRE.model_copy(update={"device": "other"}))}, "mounts", "fail"),
        ({"sysctl": {"vm.dirty_ratio": "40"}}, "sysctl", "warning"),
        ({"limits": {"open files": "256"}}, "limits", "warning"),
        ({"clock": Clock(read_unix_s=1_003.5, is_synchronised=True)}, "clocks", "fail"),
        ({"clock": Clock(read_unix_s=998.5, is_synchronised=True)}, "clocks", "fail"),
        ({"clock": Clock(read_unix_s=1_002.9, is_synchronised=True)}, "clocks", "pass"),
        ({"clock": Clock(read_unix_s=1_001.0, is_synchronised=False)}, "clock service", "warning"),
    ],
)
def test_a_host_that_differs_is_named(changed: dict[str, object], subject: str, verdict: str) -> None:
    check = _checks(present("a"), present("b", **changed))[subject]
    assert check.verdict == verdict
    if verdict != "pass":
        assert "b" in check.found
        assert check.fix


@pytest.mark.parametrize(
    ("fact", "subject"),
    [
        ("boot_id", "identity"),
        ("memory_bytes", "memory"),
        ("cpu", "cores"),
        ("system", "system"),
        ("mounts", "mounts"),
        ("sysctl", "sysctl"),
        ("limits", "limits"),
        ("clock", "clocks"),
    ],
)
def test_an_unknown_fact_is_not_checked(fact: str, subject: str) -> None:
    check = _checks(present("a"), present("b", **{fact: None}))[subject]
    assert (check.verdict, check.found) == ("not checked", "unknown on b")


def test_a_known_difference_is_reported_even_if_a_third_host_is_unknown() -> None:
    hosts = (present("a"), present("b", memory_bytes=1 << 30), present("c", memory_bytes=None))
    assert _checks(*hosts)["memory"].verdict == "fail"


def test_addresses_of_their_own_do_not_make_mounts_differ() -> None:
    mounts = [
        Mount(folder="/data", device="nas:/x", kind="nfs4", options=(f"clientaddr=10.0.0.{host}", "rw"))
        for host in (1, 2)
    ]
    checks = _checks(present("a", mounts=(mounts[0],)), present("b", mounts=(mounts[1],)))
    assert checks["mounts"].verdict == "pass"


def test_part_of_a_cluster_is_never_wholly_checked() -> None:
    partial = ClusterFacts(
        via="mpi",
        collected_at="2026-01-02T03:04:05+00:00",
        asked=("a", "b"),
        is_partial=True,
        present=(present("a"),),
        absent=(AbsentHost(host="b", reason="exit code 1", exit_code=1, stderr=""),),
    )
    checks = check_homogeneity(partial)
    assert overall_verdict(checks) == "not checked"
    assert "b: exit code 1" in checks[0].found
