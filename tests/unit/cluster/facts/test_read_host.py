"""The facts of a machine, from made-up files, without secrets."""

import resource
import shutil
from pathlib import Path

import pytest
from tests.unit.cluster.facts.known_hosts import machine

from penstock.cluster.facts.host_facts import HostReport, parse_facts
from penstock.cluster.facts.read_host import (
    parse_mounts,
    read_report,
)


def test_facts_are_read_from_the_files_of_the_machine(tmp_path: Path) -> None:
    seen = read_report("node1", {}, root=machine(tmp_path))
    assert seen.unread == {}
    assert seen.boot_id == "abc-def"
    assert seen.cpu is not None
    assert (seen.cpu.model, seen.cpu.num_logical) == ("Zen 9", 8)
    assert (seen.cpu.num_physical, seen.cpu.num_sockets) == (4, 2)
    assert seen.memory_bytes == 1 << 30
    assert seen.system == "Debian 12"
    assert seen.sysctl == {"vm.dirty_ratio": "20", "net.ipv4.tcp_rmem": "4096 131072 6291456"}


def test_numa_nodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    numa = read_report("node1", {}, root=machine(tmp_path)).numa
    assert numa is not None
    assert [(node.node, node.cores, node.memory_bytes) for node in numa] == [
        (0, "0-3", 512 << 20),
        (10, "4-7", 1 << 20),
    ]


def test_only_interfaces_with_hardware_are_networks_and_an_unknown_speed_is_none(tmp_path: Path) -> None:
    nics = read_report("node1", {}, root=machine(tmp_path)).nics
    assert nics is not None
    assert [(nic.name, nic.kind, nic.speed_mbit_per_s) for nic in nics] == [
        ("eth0", "ethernet", 25000),
        ("ib0", "infiniband", None),
    ]


def test_limits_are_those_of_the_reading_process(tmp_path: Path) -> None:
    limits = read_report("node1", {}, root=machine(tmp_path)).limits
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits is not None
    assert limits["open files"] == ("unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    assert limits["bytes of shared memory"] == str(shutil.disk_usage(tmp_path).total)


def test_only_drives_that_stay_are_listed(tmp_path: Path) -> None:
    (drive,) = read_report("node1", {}, root=machine(tmp_path)).drives or ()
    assert (drive.name, drive.model, drive.transport) == ("nvme0n1", "Quick", "nvme")
    assert drive.size_bytes == 1 << 20
    assert not drive.is_rotational


def test_mounts_of_the_kernels_state_are_left_out_and_their_secrets_withheld(tmp_path: Path) -> None:
    mounts = read_report("node1", {}, root=machine(tmp_path)).mounts
    assert mounts is not None
    assert [(mount.folder, mount.kind) for mount in mounts] == [("/", "ext4"), ("/my data", "cifs")]
    assert mounts[1].options == ("password=***", "rw")


def test_of_mounts_on_one_folder_the_last_one_is_seen() -> None:
    hidden = "a /x ext4 rw 0 0\nb /x xfs rw 0 0\nc /y ext4 rw 0 0\ntmpfs /y tmpfs rw 0 0\n"
    assert [(mount.folder, mount.device) for mount in parse_mounts(hidden)] == [("/x", "b")]


def test_serial_numbers_stay_on_the_machine(tmp_path: Path) -> None:
    seen = read_report("node1", {}, root=machine(tmp_path))
    assert seen.dmi == {"product_name": "PowerEdge"}
    assert "S3R1AL" not in seen.model_dump_json()


@pytest.mark.parametrize(
    ("missing", "fact"),
    [
        ("proc/meminfo", "memory_bytes"),
        ("proc/cpuinfo", "cpu"),
        ("proc/mounts", "mounts"),
        ("etc/os-release", "system"),
        ("sys/block/nvme0n1/size", "drives"),
    ],
)
def test_what_cannot_be_read_is_none_and_named_and_hides_nothing_else(
    tmp_path: Path, missing: str, fact: str
) -> None:
    (machine(tmp_path) / missing).unlink()
    seen = read_report("node1", {}, root=tmp_path)
    assert getattr(seen, fact) is None
    assert list(seen.unread) == [fact]
    assert "FileNotFoundError" in seen.unread[fact]


def test_a_memory_node_without_a_size_is_unread(tmp_path: Path) -> None:
    (machine(tmp_path) / "sys/devices/system/node/node0/meminfo").write_text("nothing")
    seen = read_report("node1", {}, root=tmp_path)
    assert seen.numa is None
    assert "MemTotal" in seen.unread["numa"]


def test_a_report_survives_its_way_as_text(tmp_path: Path) -> None:
    seen = read_report("node1", {"OMP_NUM_THREADS": "4"}, root=machine(tmp_path))
    assert parse_facts(HostReport, seen.model_dump_json(), where="node1") == seen


def test_only_listed_variables_leave_and_never_a_secret(tmp_path: Path) -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "AKID",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_ENDPOINT_URL": "http://me:hush@store:9000",
        "HOME": "/home/me",
        "MY_PASSWORD": "hush",
        "NCCL_IB_HCA": "mlx5",
        "PENSTOCK_CONTROL_TOKEN": "hush",
        "PENSTOCK_HOST": "a",
        "PYTHONPATH": "/x",
    }
    assert read_report("node1", environment, root=machine(tmp_path)).environment == {
        "AWS_ACCESS_KEY_ID": "***",
        "AWS_ENDPOINT_URL": "http://***@store:9000",
        "AWS_SECRET_ACCESS_KEY": "***",
        "NCCL_IB_HCA": "mlx5",
        "PENSTOCK_HOST": "a",
        "PYTHONPATH": "/x",
    }
