"""`iostat.json` from counters of a made-up host: what sysstat says of the same numbers."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.cluster.host_counters import CounterSample
from penstock.results.counter_files import CounterSpool, SampledHost, gather_counters
from penstock.results.dlio_files import IOSTAT_FILE, write_iostat
from penstock.results.provenance import HostFacts

SECOND = 10**9
BEGAN = datetime(2026, 11, 23, 9, 30, tzinfo=UTC)
FACTS = HostFacts(
    host="node0", kernel="Linux 6.5.1", machine="x86_64", num_cores=2, memory_bytes=1, cpuinfo={}, meminfo={}
)
BEFORE = {"cpu.idle_ms": 100, "disk.vda.reads": 10, "disk.vda1.reads": 10, "disk.dm-0.reads": 1}
AFTER = {
    "cpu.idle_ms": 1100,
    "cpu.user_ms": 500,
    "cpu.system_ms": 300,
    "cpu.irq_ms": 50,
    "cpu.softirq_ms": 150,
    "disk.vda.reads": 90,
    "disk.vda.merged_reads": 20,
    "disk.vda.read_bytes": 8 << 20,
    "disk.vda.read_ms": 160,
    "disk.vda.writes": 0,
    "disk.vda.flushes": 4,
    "disk.vda.flush_ms": 2,
    "disk.vda.queued_ms": 400,
    "disk.vda.busy_ms": 250,
    "disk.vda1.reads": 90,
    "disk.dm-0.reads": 5,
}


def spool(folder: Path, *samples: tuple[int, dict[str, int]]) -> None:
    host = SampledHost(
        host="node0",
        rank=0,
        boot_id="",
        drives=("vda",),
        interval_s=1.0,
        wall_ns=int(BEGAN.timestamp()) * SECOND,
        monotonic_ns=0,
    )
    with CounterSpool(folder, host) as out:
        for moment, values in samples:
            out.append(CounterSample(monotonic_ns=moment, values=values))
    gather_counters(folder)


def test_a_report_has_the_rates_and_shares_between_two_samples(tmp_path: Path) -> None:
    # The sample in between belongs to the second: reports are about an interval apart.
    spool(tmp_path, (0, BEFORE), (SECOND // 4, BEFORE | {"disk.vda.reads": 30}), (2 * SECOND, AFTER))
    write_iostat(tmp_path, FACTS, ())
    (host,) = json.loads((tmp_path / IOSTAT_FILE).read_text())["sysstat"]["hosts"]
    assert (host["nodename"], host["release"], host["date"]) == ("node0", "6.5.1", "11/23/26")
    (report,) = host["statistics"]
    assert report["timestamp"] == "11/23/26 09:30:02"
    assert report["avg-cpu"] == {
        "user": 25.0,
        "nice": 0.0,
        "system": 25.0,
        "iowait": 0.0,
        "steal": 0.0,
        "idle": 50.0,
    }
    mapped, drive = report["disk"]
    assert (mapped["disk_device"], mapped["r/s"]) == ("dm-0", 2.0)
    expected = {
        "disk_device": "vda",
        "r/s": 40.0,
        "rMB/s": 4.0,
        "rrqm/s": 10.0,
        "rrqm": 20.0,
        "r_await": 2.0,
        "rareq-sz": 102.4,
        "f/s": 2.0,
        "f_await": 0.5,
        "w/s": 0.0,
        "w_await": 0.0,
        "aqu-sz": 0.2,
        "util": 12.5,
    }
    assert {name: drive[name] for name in expected} == expected


@pytest.mark.parametrize(("devices", "shown"), [((), ["dm-0", "vda"]), (("vda1",), ["vda1"])])
def test_devices_are_those_named_or_all_whole_ones(
    devices: tuple[str, ...], shown: list[str], tmp_path: Path
) -> None:
    spool(tmp_path, (0, BEFORE), (SECOND, AFTER))
    write_iostat(tmp_path, FACTS, devices)
    (host,) = json.loads((tmp_path / IOSTAT_FILE).read_text())["sysstat"]["hosts"]
    assert [disk["disk_device"] for disk in host["statistics"][0]["disk"]] == shown


def test_counters_that_could_not_be_read_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_iostat(tmp_path, FACTS, ())
    assert not (tmp_path / IOSTAT_FILE).exists()
    assert "counters of no host could be read" in caplog.text
