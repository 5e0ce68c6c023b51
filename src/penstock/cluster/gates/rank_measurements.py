"""What one rank measures for the gates: its machine, its process, and the offset of its clock.

Called once on every rank, without side effects. A rank reads its clock after rank 0 has sent and before rank
0 has received, so between two readings of rank 0's clock: a proven bound, however slow the network is.
"""

import os
import platform
import pwd
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.cluster.comm import Comm
from penstock.cluster.facts.read_host import soft_limits
from penstock.cluster.gates.gate_model import ClockOffset, LoginSettings, PreflightRequest, RankReport, Volume
from penstock.results.provenance import package_versions
from penstock.storage.uri import find_local_paths_at
from penstock.storage.volumes import nearest_folder, read_volume_id

_LOGIND = ("etc/systemd/logind.conf", "usr/lib/systemd/logind.conf")
_REMOVE_IPC = re.compile(r"^[ \t]*(#?)[ \t]*RemoveIPC[ \t]*=[ \t]*(\w+)", re.MULTILINE)


def read_rank_report(request: PreflightRequest, comm: Comm) -> RankReport:
    """The report of this rank. `OSError` where a fact cannot be read."""
    root = request.root
    shared_memory = root / "dev/shm"
    return RankReport(
        rank=comm.rank,
        host=comm.host,
        versions=_versions(comm),
        limits=soft_limits(),
        shared_memory=read_volume(shared_memory, comm.host) if shared_memory.is_dir() else None,
        shared_segments=_shared_segments(root / "proc/sys/kernel"),
        login=read_login(root),
        target=_target_volume(request, comm.host),
        results=None if request.results is None else read_volume(request.results, comm.host),
        results_option=request.results_option,
        written_bytes=request.written_bytes,
    )


def read_volume(path: Path, host: str) -> Volume:
    """The file system of `path`, which need not exist yet, on `host`."""
    folder = nearest_folder(path.absolute())
    usage = shutil.disk_usage(folder)
    device = folder.stat().st_dev
    # XFS derives its identity from the device number, which may be equal on several hosts. Only file systems
    # without a block device are shared.
    identity = read_volume_id(folder)
    return Volume(
        identity=f"{host} {identity}" if os.major(device) else identity,
        device=device,
        folder=str(folder),
        total_bytes=usage.total,
        free_bytes=usage.free,
    )


def read_login(root: Path) -> LoginSettings:
    """Whether systemd removes a user's shared memory at the end of the last session."""
    user_id = os.getuid()
    return LoginSettings(
        user_id=user_id,
        has_logind=(root / "run/systemd/system").is_dir(),
        removes_ipc=_removes_ipc(root),
        lingers=(root / "var/lib/systemd/linger" / _user_name(user_id)).exists(),
    )


def parse_remove_ipc(text: str) -> bool | None:
    """The setting in a configuration file of logind; where it is commented out, the default shown there."""
    settings = {
        bool(comment): word.lower() in ("yes", "true", "1", "on")
        for comment, word in _REMOVE_IPC.findall(text)
    }
    return settings.get(False, settings.get(True))


def _shared_segments(folder: Path) -> dict[str, int]:
    """The largest segment, in bytes, and the number of segments, where the kernel has such limits."""
    paths = {name: folder / name for name in ("shmmax", "shmmni")}
    return {name: int(path.read_text(encoding="ascii")) for name, path in paths.items() if path.is_file()}


def _removes_ipc(root: Path) -> bool | None:
    main = next((root / name for name in _LOGIND if (root / name).is_file()), None)
    folders = [root / base / "systemd/logind.conf.d" for base in ("usr/lib", "run", "etc")]
    # A file below /etc hides those of its name elsewhere; later names override earlier ones.
    drop_ins = {path.name: path for folder in folders for path in sorted(folder.glob("*.conf"))}
    removes = None
    for path in ([main] if main else []) + [drop_ins[name] for name in sorted(drop_ins)]:
        setting = parse_remove_ipc(path.read_text(encoding="utf-8", errors="replace"))
        removes = removes if setting is None else setting
    return removes


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:  # containers run as users without an entry
        return str(user_id)


def _versions(comm: Comm) -> dict[str, str]:
    own = {"penstock": __version__, "Python": platform.python_version(), **package_versions()}
    return {**own, "messages": comm.carrier} if comm.carrier else own


def _target_volume(request: PreflightRequest, host: str) -> Volume | None:
    if request.uri is None:
        return None
    paths = find_local_paths_at(request.uri, request.environment)
    return None if paths is None else read_volume(Path(paths.local_root), host)


NUM_ROUNDS: Final = 5
"""The fastest of several rounds gives the tightest bound; each is a handful of messages."""

ReadClock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ClockRound:
    """Rank 0's clock before sending and after receiving, and every rank's clock in between."""

    before_s: float
    readings_s: Sequence[float]
    after_s: float


def measure_clock_offsets(comm: Comm, *, wall_s: ReadClock = time.time) -> tuple[ClockOffset, ...]:
    """The clock offset of every rank from rank 0; the same result on all ranks. Collective."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        before_s = wall_s()
        comm.broadcast(None, awaiting="rank 0 to query the clocks")
        readings_s = comm.gather(wall_s(), awaiting="the time on all ranks")
        rounds.append(ClockRound(before_s, readings_s, wall_s()))
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    return comm.broadcast(bound_offsets(rounds, hosts), awaiting="rank 0 to compare the clocks")


def bound_offsets(rounds: Sequence[ClockRound], hosts: Sequence[str]) -> tuple[ClockOffset, ...]:
    """The bounds that all rounds prove; rank 0 is the reference. Pure."""
    return tuple(
        ClockOffset(
            rank=rank,
            host=host,
            low_s=max(clock_round.readings_s[rank] - clock_round.after_s for clock_round in rounds)
            if rank
            else 0.0,
            high_s=min(clock_round.readings_s[rank] - clock_round.before_s for clock_round in rounds)
            if rank
            else 0.0,
        )
        for rank, host in enumerate(hosts)
    )
