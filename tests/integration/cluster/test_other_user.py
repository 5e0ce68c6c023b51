"""Another user of the same machine, beside a job: he reads, ends and changes nothing of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import psutil
import pytest

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
SAVE = """
import os, sys, torch, torch.distributed as dist
import penstock.checkpoint as pc
dist.init_process_group("gloo")
step, is_over = 0, torch.zeros(1)
while not is_over:
    step += 1
    saved = {"w": torch.full((1000,), float(step)), f"own{dist.get_rank()}": torch.ones(10)}
    pc.save(saved, f"{sys.argv[1]}/step-{step}")
    is_over += os.path.exists(sys.argv[2])
    dist.all_reduce(is_over)
state = {"w": torch.zeros(1000), f"own{dist.get_rank()}": torch.zeros(10)}
pc.load(state, f"{sys.argv[1]}/step-{step}")
assert state["w"].tolist() == [step] * 1000
dist.destroy_process_group()
"""
ACT = """
import encodings.idna, json, os, socket, sys  # all before the code is out of reach
pids, ports, names, paths = json.loads(sys.argv[1])
os.setgroups([]); os.setgid(40001); os.setuid(40001)
done = []
"""
ACTS = {
    "read": """
for pid in pids:
    for name in ("environ", "mem", "maps", "fd/0", "fd/1", "cwd/."):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if file.read(1): done.append(f"read {name}")
        except OSError: pass
""",
    "end": """
for pid in pids:
    try: os.kill(pid, 15); done.append("ended a process")
    except OSError: pass
""",
    "connect": """
for kind, place in [(socket.AF_INET, ("127.0.0.1", port)) for port in ports] + [
    (socket.AF_UNIX, name) for name in names
]:
    for sent in (b"[" * 100_000, b"GET / HTTP/1.1\\r\\n\\r\\n", b'{"kind": "stop"}\\n', b"\\x80\\x04." * 99):
        for how in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)[: 1 + (kind == socket.AF_UNIX)]:
            try:
                with socket.socket(kind, how) as stranger:
                    stranger.settimeout(0.5)
                    stranger.connect(place)
                    stranger.sendall(sent)
                    answer = stranger.recv(1000)
                    if b"challenge" not in answer and answer: done.append(f"was told {answer!r}")
            except OSError: pass
""",
    "open": """
for path in paths:
    for mode in ("rb", "r+b"):
        try: open(path, mode).close(); done.append(f"opened {path} as {mode}")
        except OSError: pass
""",
}


def words_of(job: str, folder: Path) -> Sequence[str]:
    """The command line of a job."""
    probe = [PENSTOCK, "storage", "probe", str(folder / "p"), "--size", "32MiB", "--blocks", "1MiB"]
    match job:
        case "trace":
            line = '{{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":{},"dur":1,"ph":"X","args":{{}}}}\n'
            for name in "ab":
                with (folder / f"{name}.pfw").open("w") as file:
                    file.writelines(map(line.format, range(200_000)))
            return [PENSTOCK, "trace", "summary", "--dask", "local", *map(str, folder.glob("*.pfw"))]
        case "metrics":
            return [*probe, "--streams", "1", "--metrics-dir", str(folder / "metrics"), "--json"]
        case "save":
            (folder / "save.py").write_text(SAVE)
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
            return [*run, *map(str, (folder / "save.py", folder / "saved", folder / "attacked"))]
    return [*probe, "--streams", "1", "--ranks", "4", "--json"]


def things_of(job: psutil.Process) -> Iterator[Sequence[object]]:
    """The processes, ports, Unix sockets, and files in shared and temporary folders that a job has now."""
    family = [job, *job.children(recursive=True)]
    yield [each.pid for each in family]
    of_family = [place for place in psutil.net_connections("all") if place.pid in {one.pid for one in family}]
    yield sorted(
        {place.laddr[1] for place in of_family if place.status == psutil.CONN_LISTEN and place.laddr}
    )
    sockets = {place.laddr for place in of_family if place.family.name == "AF_UNIX" and place.laddr}
    yield sorted(str(name).replace("@", "\0", 1) for name in sockets)
    opened = chain.from_iterable(Path(f"/proc/{each.pid}/fd").glob("*") for each in family)
    files = {str(path.readlink()) for path in opened if path.is_symlink()}
    # Code is no secret, and a checkout may lie in a temporary folder.
    code = (sys.prefix, str(Path(__file__).parents[3]))
    yield sorted(
        name for name in files if name.startswith(("/dev/shm", "/tmp")) and not name.startswith(code)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(
    ("job_name", "acts"),
    [
        ("probe", ["read", "end", "connect", "open"]),
        ("trace", ["read", "end", "connect", "open"]),
        ("metrics", ["read", "end", "connect", "open"]),
        ("save", ["read", "end", "connect", "open"]),
    ],
)
def test_nothing_of_a_job_is_read_ended_or_changed_by_another_user(
    job_name: str, acts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "metrics").mkdir()
    words = words_of(job_name, tmp_path)
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    program = ACT + "".join(ACTS[act] for act in acts) + "print(json.dumps(done))"
    attacks = 0
    while job.poll() is None:
        try:
            targets = list(things_of(psutil.Process(job.pid)))
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        if not (targets[1] or job_name in ("trace", "metrics")):
            continue
        if job_name == "save" and not (tmp_path / "saved" / "step-1" / ".metadata").exists():
            # Ranks that load torch would take most of the time of an attack.
            time.sleep(0.1)
            continue
        attack = [sys.executable, "-I", "-c", program, json.dumps(targets)]
        tried = subprocess.run(attack, cwd="/", capture_output=True, text=True, check=False, timeout=120)
        assert (tried.stdout, tried.stderr) == ("[]\n", "")
        attacks += 1
        if job_name == "save":
            # Each attack waits for every socket that does not answer.
            (tmp_path / "attacked").touch()
            break
    _, errors = job.communicate(timeout=120)
    assert (job.returncode, attacks > 0) == (0, True), errors
