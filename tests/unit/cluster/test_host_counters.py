"""Counters from made-up `/proc` and `/sys`, and a sampler that neither grows nor fails its run."""

import threading
from pathlib import Path

import pytest

from penstock.cluster.host_counters import (
    CounterCoverage,
    CounterSample,
    CounterSampler,
    HostHardware,
    find_coverage,
    find_device_coverage,
    find_hardware,
    read_sample,
)
from penstock.storage import open_storage

DISKSTATS = """ 254       0 vda {reads} 1 {sectors} 3 40 5 600 7 0 80 9 0 0 0 0 0 0
 254       1 vda1 10 1 200 3 40 5 600 7 0 80 9 0 0 0 0 0 0
 253       0 dm-0 10 1 200 3 40 5 600 7 0 80 9 0 0 0 0 0 0
   7       0 loop0 10 1 200 3 40 5 600 7 0 80 9 0 0 0 0 0 0
   8       0 sda 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
"""
NET_DEV = """Inter-|   Receive                |  Transmit
 face |bytes    packets errs drop ... |bytes    packets errs drop ...
    lo: 111 1 0 0 0 0 0 0 112 1 0 0 0 0 0 0
  eth0: 2000 1 0 0 0 0 0 0 3000 1 0 0 0 0 0 0
docker0:9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0
"""
MOUNTS = """/dev/vda1 / ext4 rw 0 0
10.0.0.1@o2ib:/fs /pfs lustre rw 0 0
pool /pool zfs rw 0 0
tmpfs /my\\040memory tmpfs rw 0 0
overlay /pfs/inner overlay rw 0 0
a:/ /twice nfs4 rw 0 0
b /twice fuse.thing rw 0 0
"""


def host(root: Path, *, reads: int = 10, sectors: int = 200) -> Path:
    for name, text in {
        "proc/stat": "cpu  100 0 50 800 25 0 5 0 0 0\ncpu0 1 2\n",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  4 kB\nDirty: 1 kB\n",
        "proc/diskstats": DISKSTATS.format(reads=reads, sectors=sectors),
        "proc/net/dev": NET_DEV,
        "proc/mounts": MOUNTS,
        "sys/block/vda/size": "1",
        "sys/block/loop0/size": "1",
        "sys/block/dm-0/size": "1",
        "sys/class/net/eth0/device/vendor": "x",
        "sys/class/net/lo/mtu": "1",
        "sys/class/net/docker0/mtu": "1",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "1000\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "2000\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_host_s_counters_are_read_in_units_that_their_names_say(tmp_path: Path) -> None:
    hardware = find_hardware(host(tmp_path))
    assert hardware == HostHardware(boot_id="", drives=("vda",), nics=("eth0",), ports=("mlx5_0/1",))
    values = read_sample(hardware, tmp_path).values
    assert values["disk.vda.read_bytes"] == 200 * 512
    assert values["disk.vda1.written_bytes"] == 600 * 512
    assert values["disk.dm-0.busy_ms"] == 80
    assert values["net.eth0.received_bytes"] == 2000
    assert values["net.lo.sent_bytes"] == 112
    assert values["ib.mlx5_0/1.received_bytes"] == 4000
    assert values["memory.available_bytes"] == 4096
    assert values["cpu.system_ms"] == 5 * values["cpu.irq_ms"] + 500
    assert not any(name.startswith(("disk.loop0", "disk.sda", "net.docker0")) for name in values)


def uncovered(reason: str) -> CounterCoverage:
    return CounterCoverage(watched="nothing", reason=reason)


@pytest.mark.parametrize(
    ("folder", "device", "sight"),
    [
        ("/data", 254 << 8 | 1, CounterCoverage(watched="device", device="vda1")),
        ("/data", 253 << 8, CounterCoverage(watched="device", device="dm-0")),
        (
            "/data",
            7 << 8,
            uncovered("loop0 is backed by a file or by memory"),
        ),
        ("/data", 99 << 8, uncovered("device 99:0 has no counters")),
        ("/pfs/deep", 40, CounterCoverage(watched="client")),
        ("/pool/x", 41, CounterCoverage(watched="drives")),
        ("/my memory", 42, CounterCoverage(watched="memory")),
        (
            "/pfs/inner/x",
            43,
            uncovered("overlay at /pfs/inner/x is on no device with counters"),
        ),
        ("/twice", 45, uncovered("fuse.thing at /twice is on no device with counters")),
    ],
)
def test_the_counters_of_a_storages_bytes_are_known_or_the_reason_is_given(
    tmp_path: Path, folder: str, device: int, sight: CounterCoverage
) -> None:
    assert find_device_coverage(Path(folder), device, proc=host(tmp_path) / "proc") == sight


def test_objects_come_over_networks_and_memory_over_nothing() -> None:
    environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "z"}
    assert find_coverage(open_storage("s3://bucket/x", environment)).watched == "network"
    assert find_coverage(open_storage("mem://x", {})).reason == "mem://x is on no device with counters"


def test_samples_come_in_order_from_the_thread_and_on_demand() -> None:
    kept: list[CounterSample] = []
    third = threading.Event()

    def write(sample: CounterSample) -> None:
        kept.append(sample)
        if len(kept) >= 3:
            third.set()

    numbers = iter(range(1000))
    sampler = CounterSampler(
        lambda: CounterSample(monotonic_ns=next(numbers), values={}), write, interval_s=0.001
    )
    with sampler:
        assert third.wait(timeout=60)
        seen = sampler.sample()
        assert seen is not None
        assert seen in kept
    assert [each.monotonic_ns for each in kept] == list(range(len(kept)))
    assert sampler.failure is None


@pytest.mark.parametrize("error", [FileNotFoundError("/proc/stat"), ValueError("odd")])
def test_a_sampler_that_cannot_read_reports_its_failure(error: Exception) -> None:
    def read() -> CounterSample:
        raise error

    with CounterSampler(read, lambda _sample: None, interval_s=0.001) as sampler:
        assert sampler.sample() is None
    assert sampler.failure is not None
    assert type(error).__name__ in sampler.failure
