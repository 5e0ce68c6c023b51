"""`penstock storage probe direct://...` beside fio: the same sizes, blocks and depths, on the same disk.

fio runs psync threads, one block in flight each, O_DIRECT: exactly what the probe's streams do. The goal is a
ratio within 10 % of 1: neither slower than the disk allows nor faster than the truth.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from harness import Ratio, interleave

SIZE_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
RANDOM_BLOCK_BYTES = 128 << 10
NUM_RANDOM_READS = 4096
STREAMS = (1, 8)


def measure(repetitions: int) -> list[Ratio]:
    """Both sides at each depth, in a folder on the disk that holds the current folder."""
    if shutil.which("fio") is None:
        sys.exit(
            "fio is not installed: apt-get install fio (or your distribution's package), then try again."
        )
    ratios: list[Ratio] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        for streams in STREAMS:
            ratios += interleave(
                partial(_penstock, folder, streams),
                partial(_fio, folder, streams),
                repetitions=repetitions,
                unit="GiB/s",
            )
    return ratios


def _name(operation: str, streams: int) -> str:
    return f"{operation} direct, {streams} streams"


def _penstock(folder: str, streams: int) -> Mapping[str, float]:
    command = [
        *(sys.executable, "-m", "penstock", "storage", "probe", f"direct://{folder}", "--json"),
        *("--size", str(SIZE_BYTES), "--streams", str(streams), "--blocks", str(BLOCK_BYTES)),
    ]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    wanted = ("write", "read", "random_read")
    return {
        _name(seen["op"], streams): seen["gib_per_s"]
        for seen in result["measurements"]
        if seen["op"] in wanted
    }


def _fio(folder: str, streams: int) -> Mapping[str, float]:
    write = _fio_job(folder, streams, "write", BLOCK_BYTES, "--end_fsync=1")
    read = _fio_job(folder, streams, "read", BLOCK_BYTES)
    reads_each = f"--number_ios={NUM_RANDOM_READS // streams}"
    random = _fio_job(folder, streams, "randread", RANDOM_BLOCK_BYTES, reads_each)
    for path in Path(folder).glob("peer.*"):
        path.unlink()
    return {
        _name("write", streams): write,
        _name("read", streams): read,
        _name("random_read", streams): random,
    }


def _fio_job(folder: str, streams: int, pattern: str, block_bytes: int, *more: str) -> float:
    command = [
        *(
            "fio",
            "--name=peer",
            f"--directory={folder}",
            "--filename_format=peer.$jobnum",
            "--output-format=json",
        ),
        *("--thread", "--direct=1", "--ioengine=psync", f"--numjobs={streams}", "--group_reporting"),
        *(f"--rw={pattern}", f"--bs={block_bytes}", f"--size={SIZE_BYTES // streams}", *more),
    ]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    side = result["jobs"][0]["write" if pattern == "write" else "read"]
    return float(side["bw_bytes"]) / 2**30


if __name__ == "__main__":
    for ratio in measure(repetitions=5):
        print(ratio.line(None))
