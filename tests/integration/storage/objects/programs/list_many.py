"""List all objects of a server; print their number, and this process's size before and at its peak."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.s3.server import BUCKET, S3Server

from penstock.storage import open_storage


def _peak_bytes() -> int:
    """Not ru_maxrss: that one begins with the size of the process that started this one."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024


def main(endpoint: str, client: str) -> None:
    storage = open_storage(
        f"s3://{BUCKET}", S3Server("given", endpoint).environment, options={"client": client}
    )
    before_bytes = _peak_bytes()
    num_keys = sum(1 for _ in storage.list("many"))
    sys.stdout.write(f"{num_keys} {before_bytes} {_peak_bytes()}\n")


main(*sys.argv[1:])
