"""Who flushes: the daemon of each node where it can, else the trainer.

Invariant: all ranks choose alike, and say in the log where it is not what was asked for.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.checkpoint.tiers.daemon.flusher import DaemonFlusher
from penstock.checkpoint.tiers.trainer_flush import TrainerFlusher
from penstock.storage.powers import find_folders
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.keeping import DurableKeeper
    from penstock.checkpoint.members import Members
    from penstock.checkpoint.tiers.cache import CacheLevel
    from penstock.checkpoint.tiers.flush import Flush, Flusher

logger = logging.getLogger(__name__)


def make_flusher(
    cache: CacheLevel, durable: DurableKeeper, members: Members, settings: Flush, *, path: str | None
) -> Flusher:
    """The flusher that `settings` ask for. Collective.

    `path` is the durable level's path or URI, where it was given as one: another process opens it again.
    """
    if settings.by == "daemon":
        reason = _why_no_daemon(durable, path)
        told = members.comm.gather(reason, awaiting="all ranks to say whether a daemon can flush")
        reasons = [each for each in told if each]
        if not reasons and path is not None:
            return DaemonFlusher(cache, durable, _whole_uri(path), members, settings)
        level = logging.WARNING if members.comm.rank == 0 else logging.INFO
        logger.log(level, "The trainer flushes, and not a daemon: %s", reasons[0])
    return TrainerFlusher(cache, durable, members, settings)


def _why_no_daemon(durable: DurableKeeper, path: str | None) -> str:
    if path is None:
        return "the durable level was handed over as an open storage, which no other process has"
    if find_folders(durable.on_storage.storage) is None:
        return f"{durable.uri} is no file system"
    if "?" in parse_uri(path).root:
        return f"{path!r} cannot be written as a URI"
    return ""


def _whole_uri(path: str) -> str:
    """A path as the URI that means the same in any folder; a file is read while its last block is written."""
    location = parse_uri(path)
    options = {"writes_in_flight": "2", **location.options}
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{location.scheme}://{location.root}?{query}"
