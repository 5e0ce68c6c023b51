"""Another user of the same machine, beside a job on four ranks: he reads, ends and changes nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TRY_ALL = """
import encodings.idna, json, os, socket, sys  # all before the code is out of reach
from pathlib import Path
pids, ports = json.loads(sys.argv[1])
os.setgroups([]); os.setgid(40001); os.setuid(40001)
done = []
for pid in pids:
    for name in ("environ", "mem", "fd/0"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file: file.read(1)
            done.append(f"read {name}")
        except OSError: pass
    try: os.kill(pid, 15); done.append("ended a process")
    except OSError: pass
for port in ports:
    for sent in (b"[" * 100_000, b"GET / HTTP/1.1\\r\\n\\r\\n", b'{"kind": "stop"}\\n', b"\\x80\\x04." * 99):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.5) as stranger:
                stranger.sendall(sent)
                answer = stranger.recv(1000)
                if b"challenge" not in answer and answer: done.append(f"was told {answer!r}")
        except OSError: pass
for folder in map(Path, ("/tmp", "/dev/shm")):
    for path in folder.glob("*penstock*"):
        try:
            if path.stat().st_uid == 0 and os.access(path, os.W_OK): done.append(f"may change {path}")
        except OSError: pass
print(json.dumps(done))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_nothing_of_a_job_on_ranks_is_read_or_ended_by_another_user(tmp_path: Path) -> None:
    words = ["--size", "32MiB", "--blocks", "1MiB", "--streams", "1", "--ranks", "4", "--json"]
    probe = [str(Path(sys.executable).with_name("penstock")), "storage", "probe", str(tmp_path / "p"), *words]
    job = subprocess.Popen(probe, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    attacks = 0
    while job.poll() is None:
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        ports = {
            place.laddr[1]  # type: ignore[misc]  # listening sockets have one
            for place in psutil.net_connections("tcp")
            if place.pid in {each.pid for each in family} and place.status == psutil.CONN_LISTEN
        }
        if not ports:
            continue
        targets = json.dumps([[each.pid for each in family], sorted(ports)])
        attack = [sys.executable, "-I", "-c", TRY_ALL, targets]
        tried = subprocess.run(attack, cwd="/", capture_output=True, text=True, check=False, timeout=60)
        assert (tried.stdout, tried.stderr) == ("[]\n", "")
        attacks += 1
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, attacks > 0) == (0, True), errors
