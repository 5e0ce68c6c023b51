"""Made-up hosts for tests: a complete report, an answer, and a folder like `/`."""

from pathlib import Path

from penstock.cluster.facts.collect_facts import AgentOutput
from penstock.cluster.facts.host_facts import (
    Clock,
    ClusterFacts,
    Cpu,
    HostReport,
    Mount,
    PresentHost,
    frame_document,
)

ASKED_UNIX_S = 1_000.0
ANSWERED_UNIX_S = 1_002.0
LUSTRE = Mount(folder="/data", device="10.0.0.1@o2ib:/fs", kind="lustre", options=("flock", "rw"))


def report(name: str, **changed: object) -> HostReport:
    """A host like all others, but for its name and what is `changed`."""
    whole = HostReport(
        name=name,
        boot_id=f"boot of {name}",
        cpu=Cpu(model="Zen", machine="x86_64", num_logical=64, num_physical=32, num_sockets=2),
        memory_bytes=512 << 30,
        numa=(),
        nics=(),
        drives=(),
        mounts=(Mount(folder="/", device=f"/dev/{name}", kind="ext4", options=("rw",)), LUSTRE),
        kernel="Linux 6.1",
        system="Debian 12",
        dmi={},
        sysctl={"vm.dirty_ratio": "20"},
        limits={"open files": "1024"},
        environment={},
        versions={"penstock": "0.1.0", "python": "3.11.7"},
        clock=Clock(read_unix_s=1_001.0, is_synchronised=True),
        unread={},
    )
    return whole.model_copy(update=changed)


def present(host: str, **changed: object) -> PresentHost:
    return PresentHost(
        host=host,
        asked_unix_s=ASKED_UNIX_S,
        answered_unix_s=ANSWERED_UNIX_S,
        report=report(host, **changed),
    )


def cluster(*hosts: PresentHost) -> ClusterFacts:
    return ClusterFacts(
        via="mpi",
        collected_at="2026-01-02T03:04:05+00:00",
        asked=tuple(each.host for each in hosts),
        is_partial=False,
        present=hosts,
        absent=(),
    )


def answer(
    host: str, *, exit_code: int | None = 0, stdout: str | None = None, stderr: str = ""
) -> AgentOutput:
    """What a sound host says, but for what is given."""
    return AgentOutput(
        host=host,
        exit_code=exit_code,
        stdout=frame_document(report(host).model_dump_json()) if stdout is None else stdout,
        stderr=stderr,
        asked_unix_s=ASKED_UNIX_S,
        answered_unix_s=ANSWERED_UNIX_S,
    )


def machine(root: Path) -> Path:
    """The files of a machine with two sockets of two cores of two threads each, below `root`."""
    cores = [
        f"processor\t: {number}\nmodel name\t: Zen 9\n"
        f"physical id\t: {number // 4}\ncore id\t: {number // 2 % 2}"
        for number in range(8)
    ]
    files = {
        "proc/cpuinfo": "\n\n".join(cores) + "\n\n",
        "proc/meminfo": "MemTotal:       1048576 kB\nMemFree: 5 kB\n",
        "proc/mounts": "/dev/a / ext4 rw 0 0\nproc /proc proc rw 0 0\n"
        "//nas/x /my\\040data cifs rw,password=hush 0 0\n",
        "proc/sys/kernel/random/boot_id": "abc-def\n",
        "proc/sys/vm/dirty_ratio": "20\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "proc/sys/kernel/hostname": "not on the list\n",
        "dev/shm/here": "",
        "etc/os-release": 'NAME=x\nPRETTY_NAME="Debian 12"\n',
        "sys/class/dmi/id/product_name": "PowerEdge\n",
        "sys/class/dmi/id/product_serial": "S3R1AL\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  524288 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:  1024 kB\n",
        "sys/devices/system/node/node10/cpulist": "4-7\n",
        "sys/devices/system/node/online": "0,10\n",
        **_nic("eth0", type="1", speed="25000"),
        **_nic("ib0", type="32", speed="-1"),
        "sys/class/net/lo/mtu": "65536\n",
        **_drive("nvme0n1", removable="0", model="Quick"),
        **_drive("sda", removable="1", model="Stick"),
        **_drive("loop0", removable="0", model=""),
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _nic(name: str, **facts: str) -> dict[str, str]:
    folder = f"sys/class/net/{name}"
    whole = {"operstate": "up", "mtu": "9000", "device/vendor": "0x15b3", **facts}
    return {f"{folder}/{fact}": f"{value}\n" for fact, value in whole.items()}


def _drive(name: str, *, removable: str, model: str) -> dict[str, str]:
    folder = f"sys/block/{name}"
    return {
        f"{folder}/removable": f"{removable}\n",
        f"{folder}/size": "2048\n",
        f"{folder}/device/model": f"{model}   \n",
        f"{folder}/queue/rotational": "0\n",
    }
