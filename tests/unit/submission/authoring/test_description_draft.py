"""The description of a system from what its machines tell."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cluster.facts.host_facts import (
    AbsentHost,
    ClusterFacts,
    Cpu,
    Drive,
    HostReport,
    Nic,
    PresentHost,
)
from penstock.submission.authoring.description_draft import (
    REHEARSED_PICTURE,
    diff_description,
    draft_description,
    find_placeholders,
    initial_text,
)
from penstock.submission.parsed_file import read_description
from penstock.submission.system_description import find_schema_problems


def host(name: str, *, cores: int = 64) -> PresentHost:
    drive = {"name": "nvme0n1", "model": "Fast", "transport": "nvme", "size_bytes": 3_840_000_000_000}
    processor = {"model": "Processor 9", "machine": "x86_64", "num_sockets": 2}
    report = HostReport(
        name=name,
        boot_id=None,
        cpu=Cpu.model_validate({**processor, "num_logical": 2 * cores, "num_physical": cores}),
        memory_bytes=503 * 2**30,
        numa=None,
        nics=tuple(
            Nic(name=f"eth{number}", kind="ethernet", state="up", mtu=9000, speed_mbit_per_s=200_000)
            for number in range(2)
        ),
        drives=(Drive.model_validate({**drive, "is_rotational": False}),),
        mounts=(),
        kernel="Linux 6.1",
        system="Debian GNU/Linux 12",
        dmi={"product_name": "Box 1"},
        sysctl={},
        limits={},
        environment={},
        versions={},
        clock=None,
        unread={},
    )  # fmt: skip
    return PresentHost(host=name, asked_unix_s=0.0, answered_unix_s=1.0, report=report)


def cluster(*present: PresentHost) -> ClusterFacts:
    names = tuple(each.host for each in present)
    return ClusterFacts(
        via="mpi", collected_at="2026-07-01", asked=names, is_partial=False, present=present, absent=()
    )


def filled(tree: dict[str, Any]) -> dict[str, Any]:
    """What a human would have made of it."""
    written = copy.deepcopy(tree)
    system = written["system_under_test"]
    system["solution"] |= {
        "friendly_description": "A fast storage",
        "usable_capacity_tib": "12.5",
        "availability": "RDI",
        "architecture": {
            "storage_location": "local",
            "benchmark_API": "file",
            "product_API": "file",
            "client_footprint": "open_source",
            "client_installation": "in_box",
        },
        "capabilities": {
            "multi_host": True,
            "simultaneous_write": True,
            "simultaneous_read": True,
            "remap_time_in_seconds": 0,
        },
    }
    system["deployment"] = "onprem"
    for client in system["clients"]:
        client["friendly_description"] = "A client"
        client["networking"][0]["traffic"] = ["data"]
        client["drives"][0] |= {"vendor_name": "Drives & Co", "media_type": "TLC"}
    return written


def test_equal_hosts_are_one_kind_of_client() -> None:
    clients = draft_description(cluster(host("a"), host("b"), host("c", cores=32)), "fast")[
        "system_under_test"
    ]["clients"]
    assert [(client["quantity"], client["chassis"]["cpu_cores"]) for client in clients] == [(2, 64), (1, 32)]
    assert clients[0]["chassis"] == {
        "model_name": "Box 1",
        "cpu_model": "Processor 9",
        "cpu_qty": 2,
        "cpu_cores": 64,
        "memory_capacity": 503,
    }
    assert clients[0]["networking"][0] | {"traffic": None} == {
        "unit_count": 2, "type": "ethernet", "state": "up", "speed": 200, "traffic": None,
    }  # fmt: skip
    assert clients[0]["drives"][0]["capacity_in_GB"] == 3840


def test_drives_and_ports_of_one_kind_are_counted_and_odd_ones_named_as_the_schema_can() -> None:
    def drive(model: str, transport: str, size_gb: int, *, is_rotational: bool = False) -> Drive:
        stated = {"name": "d", "model": model, "transport": transport, "size_bytes": size_gb * 10**9}
        return Drive.model_validate({**stated, "is_rotational": is_rotational})

    def port(state: str, speed_mbit_per_s: int | None) -> Nic:
        return Nic(name="p", kind="infiniband", state=state, mtu=4096, speed_mbit_per_s=speed_mbit_per_s)

    drives = (
        drive("Big", "SATA", 4000, is_rotational=True),
        drive("Big", "sata", 4000, is_rotational=True),
        drive("", "usb", 64),
        drive("Empty slot", "sas", 0),
    )
    ports = (port("up", 400_000), port("up", None), port("down", 400_000), port("dormant", 400_000))
    present = host("a")
    report = present.report.model_copy(update={"drives": drives, "nics": ports})
    present = present.model_copy(update={"report": report})
    (client,) = draft_description(cluster(present), "fast")["system_under_test"]["clients"]
    assert client["drives"] == [
        {"unit_count": 2, "vendor_name": None, "model_name": "Big", "interface": "sata", "media_type": "HDD",
         "capacity_in_GB": 4000},
        {"unit_count": 1, "vendor_name": None, "model_name": None, "interface": "other", "media_type": None,
         "capacity_in_GB": 64},
    ]  # fmt: skip
    assert client["networking"] == [
        {"unit_count": 1, "type": "infiniband", "state": "up", "speed": 400, "traffic": None},
        {"unit_count": 1, "type": "infiniband", "state": "up", "speed": None, "traffic": None},
        {"unit_count": 2, "type": "infiniband", "state": "down"},
    ]


def test_completed_draft_follows_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    path.write_text(yaml.safe_dump(filled(draft_description(cluster(host("a")), "fast")), sort_keys=False))
    assert find_schema_problems(read_description(path, tmp_path)) == []


def test_values_to_fill_in_have_hints_and_are_schema_problems(tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    path.write_text(initial_text(draft_description(cluster(host("a")), "fast")))
    lines = path.read_text().splitlines()
    for problem in find_schema_problems(read_description(path, tmp_path)):
        around = lines[problem.line - 1 : problem.line + 5]
        assert any("null  # " in line for line in around), problem
    assert yaml.safe_load(path.read_text()) == draft_description(cluster(host("a")), "fast")


def test_the_humans_part_is_never_drift() -> None:
    collected = draft_description(cluster(host("a")), "fast")
    written = filled(collected)
    written["system_under_test"]["product_nodes"] = [{"quantity": 4}]
    written["system_under_test"]["clients"][0]["drives"][0]["performance"] = {"form_factor": "U.2"}
    assert diff_description(written, collected, name="fast.yaml") == ()


@pytest.mark.parametrize("change", ["cores", "hosts", "speed"])
def test_values_that_differ_from_the_machines_are_in_the_diff(change: str) -> None:
    collected = draft_description(cluster(host("a"), host("b")), "fast")
    written = filled(collected)
    client = written["system_under_test"]["clients"][0]
    if change == "cores":
        client["chassis"]["cpu_cores"] = 48
        expected = ["-      cpu_cores: 48", "+      cpu_cores: 64"]
    elif change == "hosts":
        client["quantity"] = 3
        expected = ["-    quantity: 3", "+    quantity: 2"]
    else:
        client["networking"][0]["speed"] = 100
        expected = ["-      speed: 100", "+      speed: 200"]
    told = diff_description(written, collected, name="fast.yaml")
    assert [line for line in told if line[0] in "+-" and line[:3] not in ("---", "+++")] == expected


def test_an_absent_host_leaves_the_facts_partial() -> None:
    absent = AbsentHost(host="b", reason="no answer", exit_code=None, stderr="")
    facts = ClusterFacts(
        via="mpi",
        collected_at="2026",
        asked=("a", "b"),
        is_partial=True,
        present=(host("a"),),
        absent=(absent,),
    )
    assert draft_description(facts, "fast")["system_under_test"]["clients"][0]["quantity"] == 1


def test_diff_adds_collected_values_and_no_empty_keys() -> None:
    written = {"kept": 1, "clients": [{"model": "old"}]}
    collected = {"empty": None, "added": 2, "kept": None, "clients": [{"model": "new"}, {"cores": 4}]}
    lines = diff_description(written, collected, name="fast.yaml")
    assert lines[:2] == ("--- fast.yaml as written", "+++ fast.yaml as collected")
    assert [line for line in lines[2:] if line[0] in "+-"] == [
        "-- model: old",
        "+- model: new",
        "+- cores: 4",
        "+added: 2",
    ]


def test_rehearsed_description_follows_the_schema_and_lists_its_placeholders(tmp_path: Path) -> None:
    text = initial_text(draft_description(cluster(host("a")), "fast"), is_rehearsal=True)
    (tmp_path / "fast.yaml").write_text(text)
    assert find_schema_problems(read_description(tmp_path / "fast.yaml", tmp_path)) == []
    placeholders = find_placeholders(text)
    assert "line 5: friendly_description" in placeholders
    assert len(placeholders) == initial_text(draft_description(cluster(host("a")), "fast")).count(": null")
    assert find_placeholders(text.replace("# placeholder: ", "# ")) == ()


def test_rehearsed_picture_is_a_pdf_whose_table_points_to_its_objects() -> None:
    content = REHEARSED_PICTURE
    start = int(content.rsplit(b"startxref\n", 1)[1].split()[0])
    entries = content[start:].splitlines()[3:7]
    for number, entry in enumerate(entries, 1):
        assert content[int(entry.split()[0]) :].startswith(b"%d 0 obj" % number)
