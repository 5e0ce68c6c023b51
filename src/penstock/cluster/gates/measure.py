"""What one rank tells of its machine and its process, for the gates to judge.

Place in the flow: called once on every rank. Invariant: it only looks.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.cluster.gates.base import Login, RankFacts, Volume
from penstock.cluster.limits import soft_limits
from penstock.results.provenance import package_versions
from penstock.storage.space import nearest_folder, volume_identity
from penstock.storage.uri import FILE_SCHEMES, parse_uri

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.cluster.gates.base import Undertaking

_LOGIND = ("etc/systemd/logind.conf", "usr/lib/systemd/logind.conf")
_REMOVE_IPC = re.compile(r"^[ \t]*(#?)[ \t]*RemoveIPC[ \t]*=[ \t]*(\w+)", re.MULTILINE)


def read_rank(undertaking: Undertaking, comm: Comm) -> RankFacts:
    """The facts of this rank. `OSError` where the machine does not tell."""
    root = undertaking.root
    shared_memory = root / "dev/shm"
    return RankFacts(
        rank=comm.rank,
        host=comm.host,
        versions=_versions(comm),
        limits=soft_limits(),
        shared_memory=volume_of(shared_memory, comm.host) if shared_memory.is_dir() else None,
        shared_segments=_shared_segments(root / "proc/sys/kernel"),
        login=read_login(root),
        target=None if undertaking.uri is None else _volume_of_uri(undertaking.uri, comm.host),
        results=None if undertaking.results is None else volume_of(undertaking.results, comm.host),
        written_bytes=undertaking.written_bytes,
    )


def volume_of(path: Path, host: str) -> Volume:
    """The file system that holds `path` on `host`, or will."""
    folder = nearest_folder(path.absolute())
    usage = shutil.disk_usage(folder)
    device = folder.stat().st_dev
    # XFS makes its identity from the device's number, which equal hosts have in common. Only file systems
    # without a device of their own are shared.
    identity = volume_identity(folder)
    return Volume(
        identity=f"{host} {identity}" if os.major(device) else identity,
        device=device,
        folder=str(folder),
        total_bytes=usage.total,
        free_bytes=usage.free,
    )


def read_login(root: Path) -> Login:
    """What systemd does with a user's shared memory at the end of the last session."""
    user_id = os.getuid()
    return Login(
        user_id=user_id,
        has_logind=(root / "run/systemd/system").is_dir(),
        removes_ipc=_removes_ipc(root),
        lingers=(root / "var/lib/systemd/linger" / _user_name(user_id)).exists(),
    )


def parse_remove_ipc(text: str) -> bool | None:
    """The setting in a file of logind's; where it is commented out, the default that stands there."""
    found = {
        bool(comment): word.lower() in ("yes", "true", "1", "on")
        for comment, word in _REMOVE_IPC.findall(text)
    }
    return found.get(False, found.get(True))


def _shared_segments(folder: Path) -> dict[str, int]:
    """How large segments may be, in bytes, and how many; what the kernel lacks is left out."""
    found = {name: folder / name for name in ("shmmax", "shmmni")}
    return {name: int(path.read_text(encoding="ascii")) for name, path in found.items() if path.is_file()}


def _removes_ipc(root: Path) -> bool | None:
    main = next((root / name for name in _LOGIND if (root / name).is_file()), None)
    folders = [root / base / "systemd/logind.conf.d" for base in ("usr/lib", "run", "etc")]
    # Of files with one name the administrator's hides the others; the last name has the last word.
    drop_ins = {path.name: path for folder in folders for path in sorted(folder.glob("*.conf"))}
    told = None
    for path in ([main] if main else []) + [drop_ins[name] for name in sorted(drop_ins)]:
        setting = parse_remove_ipc(path.read_text(encoding="utf-8", errors="replace"))
        told = told if setting is None else setting
    return told


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:  # containers run as users that nobody has entered
        return str(user_id)


def _versions(comm: Comm) -> dict[str, str]:
    own = {"penstock": __version__, "Python": platform.python_version(), **package_versions()}
    return {**own, "messages": comm.carrier} if comm.carrier else own


def _volume_of_uri(uri: str, host: str) -> Volume | None:
    location = parse_uri(uri)
    return volume_of(Path(location.root), host) if location.scheme in FILE_SCHEMES else None
