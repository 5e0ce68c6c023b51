"""Whether all ranks see the same storage: rank 0 writes random bytes there, and every rank reads them back.

Contents are compared, because device numbers may differ between hosts of one file system and agree between
hosts of several. Invariant: the probe is removed, and missing folders are not created.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from penstock.cluster.comm import Comm
from penstock.cluster.gates.gate_model import ProbeView, StorageProbe
from penstock.errors import ObjectNotFound, PenstockError, StorageError
from penstock.storage import Storage
from penstock.storage.capabilities import find_local_root
from penstock.storage.files.file_storage import open_local
from penstock.storage.protocol import write_object
from penstock.storage.volumes import nearest_folder

PREFIX: Final = "penstock-gate-"
PATIENCE_S: Final = 10.0
"""Clients of network file systems may cache the content of a folder for seconds."""
_POLL_S: Final = 0.1
_PROBE_BYTES: Final = 4096
_LONGEST_READ: Final = 1 << 20
"""How many bytes of an existing object are compared."""


@dataclass(frozen=True, slots=True)
class _ProbeObject:
    """The object that rank 0 wrote, or found where it may not write. `folder` is set for a local file."""

    where: str
    folder: Path | None
    key: str
    digest: str
    is_fresh: bool


def probe_storage(
    comm: Comm, uri: str, reopen: Callable[[], Storage], *, patience_s: float = PATIENCE_S
) -> StorageProbe | str:
    """What every rank sees; or why there was nothing to compare. The same on all ranks. Collective."""
    own_probe = _write_probe(uri, reopen) if comm.rank == 0 else None
    probe = cast(
        "_ProbeObject | str", comm.broadcast(own_probe, awaiting="rank 0 to write a probe to the storage")
    )
    if isinstance(probe, str):
        return probe
    views = comm.gather(
        _look(probe, reopen, comm, patience_s=patience_s), awaiting="all ranks to read the probe"
    )
    if comm.rank == 0 and probe.is_fresh:
        _remove(probe, reopen)
    return StorageProbe(where=probe.where, digest=probe.digest, is_fresh=probe.is_fresh, views=views)


def _write_probe(uri: str, reopen: Callable[[], Storage]) -> _ProbeObject | str:
    """Write a probe; where that is refused, choose an existing object."""
    key = PREFIX + secrets.token_hex(8)
    content = secrets.token_bytes(_PROBE_BYTES)
    try:
        root = find_local_root(reopen())
        folder = None if root is None else nearest_folder(root)
        storage = _open(folder, reopen)
        try:
            write_object(storage, key, [content])
        except StorageError as refusal:
            return _choose_object(storage, folder, refusal)
    except PenstockError as error:
        return str(error)
    where = uri if folder is None else str(folder)
    return _ProbeObject(where, folder, key, hashlib.sha256(content).hexdigest(), is_fresh=True)


def _choose_object(storage: Storage, folder: Path | None, refusal: StorageError) -> _ProbeObject | str:
    key = next((info.key for info in storage.list() if not info.key.startswith(PREFIX)), None)
    if key is None:
        return f"it is empty and cannot be written to: {refusal}"
    where = storage.uri if folder is None else str(folder)
    return _ProbeObject(where, folder, key, _digest(storage, key), is_fresh=False)


def _look(probe: _ProbeObject, reopen: Callable[[], Storage], comm: Comm, *, patience_s: float) -> ProbeView:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            digest = _digest(_open(probe.folder, reopen), probe.key)
            return ProbeView(rank=comm.rank, host=comm.host, digest=digest)
        except ObjectNotFound:
            if time.monotonic() >= deadline_s:
                reason = f"it does not appear within {patience_s:g} s"
                return ProbeView(rank=comm.rank, host=comm.host, digest=None, reason=reason)
            time.sleep(_POLL_S)
        except PenstockError as error:
            return ProbeView(rank=comm.rank, host=comm.host, digest=None, reason=str(error))


def _remove(probe: _ProbeObject, reopen: Callable[[], Storage]) -> None:
    try:
        _open(probe.folder, reopen).delete(probe.key)
    except ObjectNotFound:
        return


def _open(folder: Path | None, reopen: Callable[[], Storage]) -> Storage:
    """Local files are probed in the innermost existing folder, so that none has to be created."""
    return reopen() if folder is None else open_local(folder)


def _digest(storage: Storage, key: str) -> str:
    with closing(storage.open(key)) as source:
        content = bytearray(min(source.size_bytes, _LONGEST_READ))
        source.read_into(0, memoryview(content))
    return hashlib.sha256(content).hexdigest()
