"""Programs for which folders are mounted in another way, by default read-only."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" -c "$3" "$1"'


def run_mounted(folder: Path, program: str, mounted: str = READ_ONLY) -> str:
    """What `program` prints when everything below `folder` is mounted read-only for it alone."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    if subprocess.run([unshare, "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts need privileges that this user lacks")
    command = [unshare, "-m", "sh", "-c", mounted, "sh", str(folder), sys.executable, program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
